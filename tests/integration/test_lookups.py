"""A task id of a partitioned queue says where its message is: scripts that a look by the id costs."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from celery_dq.errors import TenantMoving
from celery_dq.transport.redis.store.home import id_rest, id_start
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.integration.partitioned_shop import TENANTS, A, D, claim_in, dead_letter_of, opened
from tests.integration.shop import send

PARTITIONS = 64


@pytest.fixture
def broker_url(quiet_redis_url: str) -> str:
    """A broker whose scripts can be counted."""
    return quiet_redis_url.replace("redis://", "dq-redis://", 1)


@pytest.fixture
def huge(shop: Any) -> Any:
    shop.conf.dq_queues = {"push": {"partitions": PARTITIONS}}
    return shop


@pytest.fixture
def scripts(huge: Any) -> Callable[[Callable[[], Any]], int]:
    """Count the scripts that a call runs in Redis."""

    def count(call: Callable[[], Any]) -> int:
        call()  # a script that the server does not know yet is sent twice
        with opened(huge) as (_, client):
            client.config_resetstat()
            call()
            stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))

    return count


def test_a_look_by_an_id_runs_in_one_partition(huge: Any, scripts: Any) -> None:
    queue, revoke = huge.dq.queues["push"], huge.dq.revoke
    send(huge, *TENANTS)
    ids = iter(send(huge, *[D] * 12))
    task_id = next(ids)
    found = {
        "find": scripts(lambda: queue.find(task_id)),
        "find everywhere": scripts(lambda: huge.dq.find(task_id)),
        "details": scripts(lambda: queue.details(task_id)),
        "arguments": scripts(lambda: queue.arguments(task_id)),
        "explain": scripts(lambda: huge.dq.explain(task_id=task_id)) - 1,
        "reprioritise": scripts(lambda: queue.reprioritise(task_id, 3)),
        "cancel": scripts(lambda: queue.cancel(next(ids))),
        "revoke": scripts(lambda: revoke([next(ids)])),
    }
    assert found == dict.fromkeys(found, 1)
    assert scripts(lambda: revoke([next(ids) for _ in range(3)])) == 1
    claim_in(huge, D, 9)
    assert scripts(lambda: revoke([task_id])) == 1 + PARTITIONS, "a claimed task gets tombstones"


def test_an_id_of_celerys_own_path_is_found_as_fast(huge: Any, scripts: Any) -> None:
    later = huge.tasks["notify"].apply_async((A,), countdown=100).id
    named = huge.send_task("elsewhere", tenant=D).id
    assert [uuid.UUID(each).version for each in (later, named)] == [8, 8]
    assert scripts(lambda: huge.dq.find(later)) == scripts(lambda: huge.dq.find(named)) == 1


def test_a_look_asks_both_homes_of_a_tenant_that_moves_and_one_share_of_a_spread_one(
    huge: Any, scripts: Any
) -> None:
    ids = send(huge, *TENANTS)
    huge.dq.quotas.set("push", A, spread=16)
    spread = send(huge, *[A] * 5)
    assert [scripts(lambda each=each: huge.dq.find(each)) for each in spread] == [1] * 5
    moving = next(each for each in TENANTS[1:] if PartitionMap(3, PARTITIONS).moves(each))
    with opened(huge) as (partitions, client):
        home = partitions[partitions[0].homes.home(moving)]
        home.claim("worker:1", lease_ms=60_000, want=9).run(client)
    with pytest.raises(TenantMoving):
        huge.dq.queues["push"].set_partitions(3 * PARTITIONS, timeout=0)
    (late,) = send(huge, moving)
    for each in (ids[TENANTS.index(moving)], late):
        assert scripts(lambda each=each: huge.dq.find(each)) == 2


@pytest.mark.parametrize("named", ["nothing", "version 4", "another tenant"])
def test_an_id_that_does_not_name_the_tenant_is_looked_for_everywhere(
    huge: Any, scripts: Any, named: str
) -> None:
    task_id = {"nothing": "mine", "version 4": str(uuid.uuid4())}.get(named)
    if task_id is None:
        (task_id,) = send(huge, A)
        with opened(huge) as (_, client):
            client.flushdb()
    huge.tasks["notify"].apply_async((D,), task_id=task_id)
    assert huge.dq.find(task_id)[0].tenant == D
    assert scripts(lambda: huge.dq.find(task_id)) == PARTITIONS
    assert huge.dq.queues["push"].cancel(task_id) == "waiting"
    assert scripts(lambda: huge.dq.revoke([task_id])) == PARTITIONS + (named == "another tenant")
    assert scripts(lambda: huge.dq.revoke(["unknown"])) == 2 * PARTITIONS


def test_a_claimed_message_does_not_hide_a_waiting_one_of_another_tenant_with_its_id(wide: Any) -> None:
    queue = wide.dq.queues["push"]
    ids = send(wide, A, A)
    claim_in(wide, A, 2)
    for task_id in ids:
        wide.tasks["notify"].apply_async((D,), task_id=task_id)
    assert queue.reprioritise(ids[0], 7) == "waiting"
    assert queue.arguments(ids[0]).args == [D]
    assert queue.edit(ids[0], args=[D]) == "waiting"
    assert queue.cancel(ids[0]) == "claimed"
    wide.control.revoke(ids[1])
    assert [entry.reason for entry in claim_in(wide, D, 9)] == ["cancelled", "cancelled"]
    for task_id, tenant in zip(ids, TENANTS[1:3], strict=True):
        wide.tasks["notify"].apply_async((tenant,), task_id=task_id)
        assert [entry.reason for entry in claim_in(wide, tenant, 9)] == ["cancelled"], "a tombstone is there"


def test_a_dead_letter_does_not_hide_a_message_of_another_tenant_with_its_id(wide: Any) -> None:
    task_id = dead_letter_of(wide, A)
    assert wide.dq.find(task_id)[0].state == "dead"
    wide.tasks["notify"].apply_async((D,), task_id=task_id)
    assert [(each.state, each.tenant) for each in wide.dq.find(task_id)] == [("waiting", D)]


@pytest.mark.parametrize("seed", range(2))
def test_a_look_finds_the_same_as_in_all_partitions_while_tenants_move(
    wide: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    notify, queue = wide.tasks["notify"], wide.dq.queues["push"]
    tenants = [f"shop-{number}" for number in range(12)]
    ids: list[str] = []
    held: list[tuple[Any, str]] = []

    def publish() -> None:
        tenant, named = draw.choice(tenants), draw.choice(tenants)
        options: dict[str, Any] = {"countdown": 900} if draw.random() < 0.2 else {}
        if draw.random() < 0.2:
            options["task_id"] = id_start(named) + id_rest(uuid.uuid4().hex)
        if draw.random() < 0.2:
            options["dedup"] = {"key": "{order}"}
        ids.append(notify.apply_async((tenant, len(ids)), **options).id)

    def claim() -> None:
        with opened(wide) as (partitions, client):
            for partition in partitions:
                claimed = partition.claim("worker:1", lease_ms=600_000, want=1).run(client).entries
                held.extend((partition, each.tag) for each in claimed)

    def end() -> None:
        with opened(wide) as (_, client):
            while held:
                partition, tag = held.pop()
                if draw.random() < 0.2:
                    partition.dead_letter("worker:1", tag, reason="rejected", worker="w").run(client)
                else:
                    partition.ack("worker:1", finish=[tag]).run(client)

    def move() -> None:
        with opened(wide) as (partitions, _):
            homes = partitions[0].homes
        if homes.respread:
            end()
            wide.dq.quotas.set("push", tenants[0], spread=len(homes.partitions(tenants[0])))
        elif homes.before is None and draw.random() < 0.5:
            with contextlib.suppress(TenantMoving):
                wide.dq.quotas.set("push", tenants[0], spread=draw.randint(1, 3), timeout=0)
        else:
            count = draw.randint(3, 9) if homes.before is None else homes.count
            queue.set_partitions(count, timeout=0)

    def compare() -> None:
        for each in draw.sample(ids, min(len(ids), 5)):
            with monkeypatch.context() as patch:
                patch.setattr(PartitionMap, "likely", lambda *_: set())
                everywhere = wide.dq.find(each)
            assert wide.dq.find(each) == everywhere
            if draw.random() < 0.2:
                state = everywhere[0].state if everywhere else "dead"
                wanted = {"dead": "tombstone", "cancelled": "tombstone"}.get(state, state)
                assert queue.cancel(each) == wanted

    for _ in range(9):
        publish()
    for _ in range(30):
        draw.choice([publish, publish, publish, claim, end, move])()
        compare()
    assert len(ids) > 20
