"""``app.dq`` on a queue with four partitions, on a real Redis without a worker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dq.app.api.move import Mover
from celery_dq.app.checks.doctor import read_status
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.live_quotas import LiveQuotas
from celery_dq.options import Quota
from celery_dq.transport.redis.store.home import home_of
from celery_dq.transport.redis.store.move_calls import set_map
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.server_errors import PartitionsChanging
from tests.dq_command import run_dq
from tests.integration.partitioned_shop import (
    A2,
    COUNT,
    TENANTS,
    A,
    B,
    C,
    D,
    claim_in,
    dead_letter_of,
    opened,
    tombstones,
)
from tests.integration.shop import send
from tests.integration.test_quotas_during_changes import before_next


def test_the_tenants_of_the_tests_live_in_one_partition_each() -> None:
    assert [home_of(tenant, COUNT) for tenant in TENANTS] == [0, 1, 2, 3]


# Reading.


def test_a_snapshot_sums_the_partitions(wide: Any, queue: Any) -> None:
    send(wide, A, A, B, C)
    send(wide, D, countdown=100)
    queue.cancel(send(wide, D)[0])
    claim_in(wide, B)
    dead_letter_of(wide, B)
    wide.dq.quotas.pause("push", C)
    now = queue.snapshot()
    assert (now.name, now.waiting, now.delayed, now.discards, now.dead) == ("push", 3, 1, 1, 1)
    assert (now.eligible, now.paused, now.held, now.counters.pushed) == (1, 1, 1, 7)
    assert [(each.name, each.waiting, each.held) for each in now.partitions] == [
        ("push/0", 2, 0),
        ("push/1", 0, 1),
        ("push/2", 1, 0),
        ("push/3", 0, 0),
    ]
    assert [(consumer.name, consumer.held) for consumer in now.consumers] == [("worker:1", 1)]
    assert now.oldest_waiting_s == max(each.oldest_waiting_s or 0 for each in now.partitions) > 0
    assert now.counters.waits_alone.count == sum(each.counters.claimed for each in now.partitions) == 2
    assert queue.depth == 4


def test_a_consumer_of_all_partitions_counts_once(wide: Any, queue: Any) -> None:
    send(wide, *TENANTS)
    for tenant in (A, B):
        claim_in(wide, tenant)
    assert [(each.name, each.held) for each in queue.snapshot().consumers] == [("worker:1", 2)]


def test_tenants_and_messages_are_listed_in_turns_of_the_partitions(wide: Any, queue: Any) -> None:
    send(wide, A, A, A2, B, C, C, D)
    assert home_of(A2, COUNT) == 0
    wide.dq.quotas.pause("push", B)
    assert [(each.tenant, each.state) for each in queue.tenants()] == [
        (A, "eligible"),
        (C, "eligible"),
        (D, "eligible"),
        (A2, "eligible"),
        (B, "paused"),
    ]
    assert [each.tenant for each in queue.tenants(2)] == [A, C]
    assert [each.tenant for each in queue.peek(20)] == [A, C, D, A2, B, A, C]
    assert [each.tenant for each in queue.peek(2)] == [A, C]
    assert [each.args for each in queue.peek(5, tenant=C)] == [f"({C!r}, 4)", f"({C!r}, 5)"]


def test_delayed_messages_are_listed_by_their_time_over_all_partitions(wide: Any, queue: Any) -> None:
    ids = [send(wide, tenant, countdown=300 - 50 * place)[0] for place, tenant in enumerate(TENANTS)]
    assert [each.id for each in queue.peek(3, delayed=True)] == ids[:0:-1]


def test_one_partition_is_peeked_by_its_name(wide: Any, queue: Any) -> None:
    ids = send(wide, *TENANTS, A2)
    assert [each.id for each in queue.peek(partition=0)] == [ids[0], ids[4]]
    assert [each.id for each in queue.peek(partition=2, tenant=C)] == [ids[2]]
    assert queue.peek(partition=1, tenant=C) == queue.peek(partition=1, delayed=True) == []
    output = {}
    for name in ("push/3", "push/4", "other/0"):
        output[name] = run_dq(wide, "peek", name, status=None).output
    assert ids[3] in output["push/3"]
    assert ids[0] not in output["push/3"]
    assert output["push/4"] == "Error: 'push' has no partition 4: give 0 to 3\n"
    assert "There is no queue 'other/0'" in output["other/0"]


def test_the_explanation_names_a_partition_that_no_worker_consumes(wide: Any, queue: Any) -> None:
    ids = send(wide, C, D)
    claim_in(wide, C, want=0)  # the worker of one partition
    assert "no worker consumes 'push/3'; start one with -Q push or -Q push/3" in queue.explain(D).sentence
    assert "in 'push/3' waits and is the next" in wide.dq.explain(task_id=ids[1]).sentence
    assert queue.explain(C).reason == "turn"


def test_a_task_is_found_and_explained_in_its_partition(wide: Any, queue: Any) -> None:
    ids = send(wide, *TENANTS)
    wide.dq.revoke(["never-published"])
    for number, task_id in enumerate(ids):
        assert [(each.queue, each.partition, each.state) for each in wide.dq.find(task_id)] == [
            ("push", number, "waiting")
        ]
        assert "is the next of its tenant" in wide.dq.explain(task_id=task_id).sentence
    assert queue.find("never-published").state == "cancelled"
    assert wide.dq.find("never-published") == []
    assert wide.dq.find("absent") == []
    assert queue.explain(D).sentence.startswith(f"Tenant {D!r} has 1 message waiting")
    assert queue.has_tenant(D)
    assert not queue.has_tenant("absent")


def test_the_round_trips_do_not_grow_with_the_partitions(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = count_round_trips(monkeypatch)

    def measure(name: str) -> dict[str, int]:
        shop.tasks["notify"].apply_async((A,), queue=name)
        queue = shop.dq.queues[name]
        return {
            "snapshot": trips(queue.snapshot),
            "tenants": trips(queue.tenants),
            "peek": trips(queue.peek),
            "find": trips(lambda: queue.find("absent")),
            "dead": trips(shop.dq.dead_letters[name].list),
            "locks": trips(shop.dq.dedup[name].list),
            "quotas": trips(lambda: shop.dq.quotas.live(name)),
            "default": trips(lambda: shop.dq.quotas.set_default(name, rate=5)),
            "backlogs": trips(queue.backlogs),
            "largest": trips(lambda: queue.backlogs(9)),
            "pause": trips(queue.pause),
            "paused": trips(lambda: shop.dq.quotas.paused(name)),
            "resume": trips(queue.resume),
            "edit": trips(lambda: queue.reprioritise("absent", 1)),
            "show": trips(lambda: shop.dq.dead_letters[name].show("absent")),
            "replay": trips(shop.dq.dead_letters[name].replay),
            "purge": trips(queue.purge),
            "dead purge": trips(shop.dq.dead_letters[name].purge),
        }

    shop.conf.dq_queues = {"wide": {"partitions": 64}}
    narrow, wide = measure("narrow"), measure("wide")
    # Some scripts are looked up in the server twice, and several lists of a tenant are read together.
    assert {name: wide[name] <= most + 4 for name, most in narrow.items()} == dict.fromkeys(narrow, True)


def test_the_round_trips_do_not_grow_with_the_queues(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = count_round_trips(monkeypatch)
    send(shop, A)
    send(shop, A, A, queue="other")
    with opened(shop) as (_, client):
        client.sadd(shop.dq._broker._registry, "empty-0")
        few = trips(lambda: list(shop.dq.queues.snapshots(ages=False))), trips(lambda: read_status(shop))
        client.sadd(shop.dq._broker._registry, *(f"empty-{number}" for number in range(60)))
    many = trips(lambda: list(shop.dq.queues.snapshots(ages=False))), trips(lambda: read_status(shop))
    assert many == few
    found = {each.name: each for each in shop.dq.queues.snapshots()}
    assert (found["push"].waiting, found["other"].waiting, found["empty-9"].waiting) == (1, 2, 0)
    assert found["other"].oldest_waiting_s >= 0
    assert found["empty-9"].oldest_waiting_s is None
    assert [each.name for each in shop.dq.queues.snapshots("push", "absent")] == ["push", "absent"]


def count_round_trips(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], int]:
    from redis.connection import AbstractConnection

    sent = 0
    send_packed: Any = AbstractConnection.send_packed_command

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        return send_packed(self, *args, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)

    def trips(call: Callable[[], Any]) -> int:
        nonlocal sent
        call()  # a script that the server does not know yet is sent twice
        sent = 0
        call()
        return sent

    return trips


# Cancelling.


def test_cancelling_leaves_a_tombstone_everywhere_for_a_task_that_did_not_wait(wide: Any, queue: Any) -> None:
    for tenant in TENANTS:  # ids that do not name their tenant
        wide.tasks["notify"].apply_async((tenant,), task_id=f"of {tenant}")
    claim_in(wide, D)
    assert queue.cancel(f"of {B}") == "waiting"
    assert queue.cancel(f"of {B}") == "discarded"
    assert tombstones(wide) == [0, 0, 0, 0]
    assert queue.cancel(f"of {D}") == "claimed"
    assert tombstones(wide) == [1, 1, 1, 1], "its retry may name another tenant"
    assert queue.cancel("later") == "tombstone"
    assert tombstones(wide) == [2, 2, 2, 2]
    for tenant in TENANTS:
        wide.tasks["notify"].apply_async((tenant,), task_id="later")
    assert queue.snapshot().discards == 1 + len(TENANTS)


def test_a_revoke_reaches_all_partitions_of_all_queues(wide: Any, queue: Any) -> None:
    ids = send(wide, *TENANTS)
    elsewhere = send(wide, A, queue="other")[0]
    wide.dq.revoke([*ids, elsewhere, "later"])
    assert queue.snapshot().discards == len(TENANTS)
    assert wide.dq.queues["other"].snapshot().discards == 1
    # The task in the other queue gets one here where its tenant would live.
    assert tombstones(wide) == [2, 1, 1, 1]


def test_a_move_leads_from_home_to_home(shop: Any) -> None:
    shop.conf.dq_queues = {"push": {"partitions": COUNT}, "slow": {"partitions": 7}}
    ids = send(shop, C, C, D)
    queue, slow = shop.dq.queues["push"], shop.dq.queues["slow"]
    assert queue.move("slow", tenant=C) == 2
    assert queue.move("slow", task_id=ids[2]) == 1
    assert [(each.id, each.partition) for each in slow.peek(5, tenant=C)] == [
        (each, home_of(C, 7)) for each in ids[:2]
    ]
    assert shop.dq.find(ids[2])[0].partition == home_of(D, 7)
    assert queue.depth == 0


# Dead letters.


def test_a_dead_letter_that_gets_another_tenant_is_sent_to_its_home(wide: Any, queue: Any) -> None:
    task_id = dead_letter_of(wide, A)
    assert wide.dq.dead_letters["push"].edit(task_id, tenant=D) == task_id
    (found,) = wide.dq.find(task_id)
    assert (found.partition, found.state, found.tenant) == (3, "waiting", D)
    assert queue.depth == 1


@pytest.mark.parametrize("state", ["waiting", "delayed"])
def test_a_dead_letter_that_gets_another_tenant_is_served_in_its_home_only(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The partition of the former tenant knows neither a quota nor a pause of the new one."""
    queue.pause(D)
    task_id = dead_letter_of(wide, A)
    changes = {} if state == "waiting" else {"eta": datetime.now(timezone.utc) + timedelta(hours=1)}
    claimed: list[Any] = []
    before_next(monkeypatch, Mover, "move", lambda: claimed.extend(claim_in(wide, A)))
    assert wide.dq.dead_letters["push"].edit(task_id, tenant=D, **changes) == task_id
    assert claimed == claim_in(wide, D) == []
    (found,) = wide.dq.find(task_id)
    assert (found.partition, found.state, found.tenant) == (3, state, D)


# Quotas.


def test_an_own_quota_is_stored_in_the_home_and_a_default_everywhere(wide: Any) -> None:
    quotas = wide.dq.quotas
    for tenant in TENANTS:
        quotas.set("push", tenant, rate=5)
    quotas.set_default("push", rate=7)
    quotas.pause("push", D)
    with opened(wide) as (partitions, client):
        assert [client.hlen(each.keys.quotas) for each in partitions] == [2, 2, 2, 2]
    assert quotas.list("push") == dict.fromkeys(TENANTS, Quota(rate=5))
    assert [quotas.get("push", each).rate for each in (*TENANTS, "other", None)] == [5] * 4 + [7] * 2
    assert [str(each.source) for each in quotas.origins("push", D, "other", None)] == [
        "tenant",
        "default",
        "default",
    ]
    assert list(quotas.paused("push")) == [D]
    assert quotas.resume("push", D) == Quota(rate=5)
    wanted = LiveQuotas(Quota(rate=9), {B: Quota(weight=2)})
    assert quotas.make(quotas.changes("push", wanted)) == 5
    assert quotas.live("push") == wanted
    quotas.remove("push", B)
    quotas.remove_default("push")
    assert quotas.live("push") == LiveQuotas()


def test_a_new_default_acts_on_the_backlog_of_every_partition(wide: Any, queue: Any) -> None:
    wide.dq.quotas.set_default("push", paused=True)
    send(wide, *TENANTS)
    assert queue.snapshot().paused == 4
    wide.dq.quotas.remove_default("push")
    assert (queue.snapshot().paused, queue.snapshot().eligible) == (0, 4)


def test_the_quota_of_the_settings_is_stored_in_every_partition(wide: Any) -> None:
    wide.conf.dq_queues = {"push": {"partitions": COUNT, "rate": 3}}
    assert wide.dq.quotas.apply_settings("push") == Quota(rate=3)
    assert [wide.dq.quotas.get("push", each).rate for each in TENANTS] == [3] * 4


def test_a_quota_that_is_set_first_finds_its_tenant_at_home(wide: Any, queue: Any) -> None:
    wide.dq.quotas.set("push", D, paused=True)
    send(wide, D)
    assert queue.snapshot().partitions[3].paused == 1


def test_a_partition_is_no_queue_of_its_own(wide: Any, queue: Any) -> None:
    send(wide, *TENANTS)
    wide.amqp.queues.select_add("push/3")  # as in a worker with -Q push/3
    assert "push/3" in wide.amqp.queues
    assert list(wide.dq.queues) == ["push"]
    with pytest.raises(InvalidRequest, match="one partition of queue 'push': name 'push'"):
        wide.dq.quotas.set("push/3", A, rate=5)
    assert wide.dq.queues["push/4"].depth == 0


def test_a_move_that_the_destination_has_refused_loses_nothing(wide: Any, queue: Any) -> None:
    (task_id,) = send(wide, C)
    with wide.dq._broker.open_all(["push", "slow"]) as (source, destination):
        # As if another client had just given the destination more partitions.
        set_map(destination.partitions[0], PartitionMap(), PartitionMap(2)).run(source.client)
        mover = Mover(source.of(C)[0], destination.partitions, source.client, 0)
        with pytest.raises(PartitionsChanging, match="move again"):
            mover.move([[task_id]])
    assert [(each.queue, each.state) for each in wide.dq.find(task_id)] == [("push", "waiting")]


def test_tenants_come_in_pages_over_all_partitions(wide: Any, queue: Any) -> None:
    for tenant in (*TENANTS, A2):
        send(wide, tenant)
    queue.pause(B)
    for limit in (1, 2, 5):
        names, after = [], ""
        while True:
            page = queue.tenant_page(after, limit=limit)
            names += [each.tenant for each in page.tenants]
            after = page.after
            if not after:
                break
        assert names == [A, A2, C, D, B]
    found = queue.tenant_page(text_in_name=C.upper())
    assert [(each.tenant, each.state) for each in found.tenants] == [(C, "eligible")]
    assert found.looked_at == 5
    assert queue.tenant(B).state == "paused"
    with pytest.raises(InvalidRequest, match="is not a cursor"):
        queue.tenant_page("eligible.4.0")
