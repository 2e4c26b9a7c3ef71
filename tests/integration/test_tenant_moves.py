"""A change of the number of partitions while messages wait, run and are published."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import redis
from kombu.exceptions import OperationalError

from celery_dq.app.api import map_change
from celery_dq.app.api.broker import partitions_of
from celery_dq.app.api.move import Mover
from celery_dq.app.api.tenant_moves import TenantMoves
from celery_dq.errors import InvalidRequest, TenantMoving
from celery_dq.transport.redis.store import move_calls
from celery_dq.transport.redis.store.move_calls import drop_exported, export_messages, import_messages
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.script_calls import PipelinedConnection
from tests.integration.moving_world import TENANTS, MovingWorld
from tests.integration.partitioned_shop import COUNT, A, D, claim_in, dead_letter_of, opened
from tests.integration.shop import send
from tests.integration.test_quotas_during_changes import before_next

#: A tenant that moves when the queue gets seven partitions.
MOVING = next(each for each in (f"m{number}" for number in range(100)) if PartitionMap(7, 4).moves(each))


@pytest.mark.parametrize("seed", range(2))
def test_a_change_loses_doubles_and_reorders_nothing(wide: Any, seed: int) -> None:
    url = wide.conf.broker_url.removeprefix("dq-")
    world = MovingWorld(wide, url, seed)
    try:
        for _ in range(20):
            world.publish()
        for count in (7, 3, 4):
            kills = 1
            while not world.move(count, world.random.randint(1, 60) if kills < 8 else None):
                kills += 1
                for _ in range(3):
                    actors = (world.publish, world.publish, world.claim, world.end, world.cancel)
                    world.random.choice(actors)()
                if kills > 8:
                    world.claim()
                    world.end()
            assert len(wide.dq.queues["push"].snapshot().partitions) == count
        world.drain()
        found = world.verdict()
        assert found == {"lost": [], "doubled": [], "disordered": [], "revoked": []}
        assert world.kills >= 10
        now = wide.dq.queues["push"].snapshot()
        assert (now.waiting, now.held, now.delayed) == (0, 0, len(world.delayed))
        assert sum(map(len, world.published.values())) > 2 * len(TENANTS)
    finally:
        world.kombu.close()


def test_everything_of_a_tenant_moves_with_it(wide: Any, queue: Any) -> None:
    old, new = PartitionMap(7, 4).old_partitions(MOVING)[0], PartitionMap(7, 4).home(MOVING)
    dead_letter_of(wide, MOVING)
    wide.dq.quotas.set("push", MOVING, rate="1/h", burst=3)
    send(wide, MOVING, MOVING)
    crashed, first = claim_in(wide, MOVING, 2)
    delayed = wide.tasks["notify"].apply_async((MOVING, 9), countdown=3600).id
    keyed = wide.tasks["notify"].apply_async((MOVING, 10), dedup={"key": "{order}"}).id
    with wide.dq._broker.open_home("push", MOVING) as (home, client):
        home.release("worker:1", [crashed.tag], mode="crashed").run(client)
        limit = client.zscore(home.keys.limiter, MOVING)
        with pytest.raises(TenantMoving, match=r"\(tenants: 1, moved messages: 3\)"):
            queue.set_partitions(7, timeout=0)
        late = wide.tasks["notify"].apply_async((MOVING, 11)).id
        assert [each.state for each in wide.dq.find(late)] == ["waiting"]
        assert claim_in(wide, MOVING, 10) == [], "a task of it runs in the former home"
        # The tag of a delivery in the former home works; the message with a key is served there.
        assert home.ack("worker:1", finish=[first.tag]).run(client) == 0
        wide.dq.quotas.set("push", MOVING, rate=None)
        (entry,) = home.claim("worker:1", lease_ms=60_000, want=9).run(client).entries
        assert entry.id == keyed
        assert home.ack("worker:1", finish=[entry.tag]).run(client) == 0
    with wide.dq._broker.open("push") as (partitions, client):
        assert partitions[old].keys.partition == old
        assert client.zscore(partitions[old].keys.limiter, MOVING) is None, "it has no rate any more"
        client.zadd(partitions[old].keys.limiter, {MOVING: limit})
    queue.set_partitions(7, timeout=30)
    with wide.dq._broker.open("push") as (partitions, client):
        assert client.zscore(partitions[new].keys.limiter, MOVING) == limit
        assert client.hlen(partitions[old].keys.messages) == 0
        assert client.exists(partitions[new].keys.arrived) == 0
    assert [each.id for each in wide.dq.dead_letters["push"].list()] != []
    assert wide.dq.find(delayed)[0].partition == new
    (again,) = claim_in(wide, MOVING, 10)
    assert (again.id, again.deliveries) == (crashed.id, 1), "its crash counts, so it is claimed alone"


def test_the_time_of_a_change_counts_its_passes_too(wide: Any, queue: Any) -> None:
    send(wide, MOVING)
    claim_in(wide, MOVING, 1)
    passes: list[float] = []

    def pass_slowly(_: float) -> None:
        passes.append(0.2)
        time.sleep(0.2)  # as long as a pass over many tenants

    broker = wide.dq._broker
    with pytest.raises(TenantMoving):
        map_change.set_partitions(broker, broker.options, "push", 7, 0.5, sleep=pass_slowly)
    assert len(passes) <= 3, "at 0.2 s each, 0.6 s"


def test_a_tenant_that_comes_to_partition_0_again_waits_there_again(wide: Any, queue: Any) -> None:
    send(wide, D)
    queue.set_partitions(1, timeout=30)
    queue.set_partitions(4, timeout=30)
    (running,) = claim_in(wide, D, 1)
    with wide.dq._broker.open_home("push", D) as (home, client):
        with pytest.raises(TenantMoving, match="tenants: 1"):
            queue.set_partitions(1, timeout=0)
        late = wide.tasks["notify"].apply_async((D, 2)).id
        assert claim_in(wide, D, 9) == []
        assert home.ack("worker:1", finish=[running.tag]).run(client) == 0
    queue.set_partitions(1, timeout=30)
    assert [each.id for each in claim_in(wide, D, 9)] == [late]


def test_all_messages_of_a_tenant_are_cancelled_while_it_moves(wide: Any, queue: Any) -> None:
    notify = wide.tasks["notify"]
    notify.apply_async((MOVING, 1), dedup={"key": "{order}"})
    notify.apply_async((MOVING, 2), dedup={"key": "{order}"}, countdown=3600)
    with pytest.raises(TenantMoving):  # messages with dedup keys stay
        queue.set_partitions(7, timeout=0)
    assert queue.has_tenant(MOVING), "the commands refuse an unknown tenant"
    notify.apply_async((MOVING, 3))
    assert queue.cancel_tenant(MOVING, dry_run=True) == 3
    assert queue.cancel_tenant(MOVING) == 3
    queue.set_partitions(7, timeout=30)
    assert queue.snapshot().waiting + queue.snapshot().delayed == 0


def test_all_messages_of_a_tenant_are_moved_to_another_queue_while_it_moves(wide: Any, queue: Any) -> None:
    first = wide.tasks["notify"].apply_async((MOVING, 1), dedup={"key": "{order}"}).id
    with pytest.raises(TenantMoving):  # a message with a dedup key stays
        queue.set_partitions(7, timeout=0)
    second = wide.tasks["notify"].apply_async((MOVING, 2)).id
    assert queue.move("other", tenant=MOVING, dry_run=True) == 2
    assert queue.move("other", tenant=MOVING) == 2
    queue.set_partitions(7, timeout=30)
    assert [each.id for each in wide.dq.queues["other"].peek()] == [first, second]


def test_a_message_with_a_lost_answer_is_stored_once_although_the_number_has_changed(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = PipelinedConnection.ask
    changes: list[Any] = []

    def change_after(connection: PipelinedConnection, command: tuple[Any, ...]) -> Any:
        answer = ask(connection, command)
        if not changes:
            changes.append(queue.set_partitions(7, timeout=30))
            wide.dq.quotas.get("push", MOVING)
            with wide.dq._broker.channel() as channel:
                channel.queues("push", refresh=True)  # this process has learned the new number
            raise redis.ConnectionError("the answer was lost")
        return answer

    send(wide, MOVING)
    monkeypatch.setattr(PipelinedConnection, "ask", change_after)
    send(wide, MOVING)
    assert changes[0].after == 7
    assert queue.snapshot().waiting == 2


def test_a_dead_letter_that_moves_is_replayed_once(wide: Any) -> None:
    letters = wide.dq.dead_letters["push"]
    moving = dead_letter_of(wide, A)
    with opened(wide) as (partitions, client):
        outbox = export_messages(partitions[0], A, 1, [moving]).run(client)
        assert outbox is not None
        assert letters.replay(moving) == letters.replay() == 0
        assert letters.edit(moving, priority=3) is None
        part = letters.replay_part(lambda _: True)
        assert (part.sent, letters.replay_part(lambda _: True, part.after).after) == (0, "2.0.0")
        homes = partitions[0].homes
        assert import_messages(partitions[1], partitions[0], outbox, homes, 0, waits=False).run(client)
        assert letters.replay() == 1
        assert drop_exported(partitions[0], outbox).run(client) == 1
    assert len(claim_in(wide, A, 9)) == 1
    assert (len(letters), wide.dq.queues["push"].snapshot().waiting) == (0, 0)


def test_a_dead_letter_that_is_replayed_in_a_former_home_is_served_in_the_new_one_only(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(wide, MOVING)
    (running,) = claim_in(wide, MOVING)
    with wide.dq._broker.open_home("push", MOVING) as (home, client):
        with pytest.raises(TenantMoving):
            queue.set_partitions(7, timeout=0)
        home.dead_letter("worker:1", running.tag, reason="rejected", worker="worker:1").run(client)
        claimed: list[Any] = []
        claim = home.claim("worker:1", lease_ms=60_000, want=9)
        before_next(monkeypatch, Mover, "move", lambda: claimed.extend(claim.run(client).entries))
        assert wide.dq.dead_letters["push"].replay(running.id) == 1
    assert claimed == claim_in(wide, MOVING, 9) == []
    queue.set_partitions(7, timeout=30)
    assert [entry.id for entry in claim_in(wide, MOVING, 9)] == [running.id]


def test_a_dead_letter_that_moves_is_not_purged_and_does_not_return_afterwards(wide: Any) -> None:
    letters = wide.dq.dead_letters["push"]
    moving, staying = dead_letter_of(wide, A), dead_letter_of(wide, A)
    with opened(wide) as (partitions, client):
        outbox = export_messages(partitions[0], A, 1, [moving]).run(client)
        assert outbox is not None
        # The other partition may have it already.
        assert letters.purge(moving) == 0
        assert letters.purge() == 1
        assert letters.show(staying) is None
        assert drop_exported(partitions[0], outbox).run(client) == 1
    assert letters.purge(moving) == 0


def test_a_mover_with_an_old_map_takes_nothing_out_of_a_home(wide: Any, queue: Any) -> None:
    """It stood still while the tenant moved away and came back."""
    ids = send(wide, *[D] * 3)
    with wide.dq._broker.channel() as channel:
        old = PartitionMap(COUNT).begin(2)
        late = TenantMoves(channel.client, partitions_of(channel, "push", old), wide.dq._broker.options)
        for count in (2, COUNT):
            queue.set_partitions(count, timeout=30)
        with pytest.raises(InvalidRequest, match="Another change"):
            late.step()
    assert [entry.id for entry in claim_in(wide, D, 9)] == ids


def test_an_outbox_of_a_second_mover_is_delivered_at_the_end_of_a_change(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task_id,) = send(wide, D)
    decide = map_change._decide

    def export_before_the_end(first: Any, client: Any, options: Any, before: Any, now: Any) -> None:
        if now.before is None:
            with opened(wide) as (partitions, _):
                to = partitions[0].homes.home(D)
                client.hset(
                    partitions[3].keys.messages, "late", client.hget(partitions[to].keys.messages, task_id)
                )
                client.zadd(partitions[3].keys.tenant(D), {"late": 1})
                assert export_messages(partitions[3], D, to, ["late"]).run(client)
        decide(first, client, options, before, now)

    monkeypatch.setattr(map_change, "_decide", export_before_the_end)
    queue.set_partitions(2, timeout=30)
    assert [entry.id for entry in claim_in(wide, D, 9)] == ["late", task_id]


def test_a_dead_letter_without_a_readable_tenant_leaves_a_partition_that_goes(wide: Any, queue: Any) -> None:
    unreadable = dead_letter_of(wide, D)
    with opened(wide) as (partitions, client):
        client.hset(partitions[3].keys.dead, unreadable, b"noise")
    queue.set_partitions(2, timeout=0.1)
    assert [letter.id for letter in wide.dq.dead_letters["push"].list()] == [unreadable]


def test_a_change_goes_no_step_that_replicas_do_not_have(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_calls, "CONFIRM_TIMEOUT_MS", 1)
    broker = wide.dq._broker
    careful = replace(broker.options, confirm_replicas=1)
    ids = send(wide, *[D] * 3)

    def maps_of_others() -> set[bytes]:
        with opened(wide) as (partitions, client):
            return {client.hget(each.keys.state, "partitions") for each in partitions[1:]}

    with pytest.raises(OperationalError, match="dq_confirm_replicas = 1, but only 0 replicas had a step"):
        map_change.set_partitions(broker, careful, "push", 2)
    assert maps_of_others() == {b"4"}, "a failover could bring this map back"
    for _ in range(2):
        with pytest.raises(OperationalError, match="celery dq partitions push --set 2"):
            map_change.set_partitions(broker, careful, "push", 2)
        with opened(wide) as (partitions, client):
            assert not client.exists(partitions[partitions[0].homes.home(D)].keys.messages)
            assert client.hlen(partitions[3].keys.messages) == 3, "a failover could bring them back"
    assert maps_of_others() == {b"2<4#1"}
    queue.set_partitions(2, timeout=30)
    assert [entry.id for entry in claim_in(wide, D, 9)] == ids
