"""Quotas that are set while another process changes the partitions or the spread of the tenant."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from celery_dq import TenantMoving
from celery_dq.app.api import map_change, pauses, quotas, tenant_settings
from celery_dq.app.api.tenant_moves import TenantMoves
from celery_dq.errors import InvalidRequest
from celery_dq.options import Quota
from celery_dq.transport.redis.store import quotas as settings_quotas
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.script_calls import run_all
from tests.integration.moving_world import Killed
from tests.integration.partitioned_shop import TENANTS, A, B, C, D, opened
from tests.integration.shop import send
from tests.integration.test_spread_operations import claim_everywhere, finish


def before_next(patch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], Any]) -> None:
    """Run an action of another process once, before the next call of a function."""
    function, actions = getattr(owner, name), [action]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if actions:
            actions.pop()()
        return function(*args, **kwargs)

    patch.setattr(owner, name, interrupted)


def owner_of(moment: str) -> Any:
    """Return the module or class that has the function of a change with this name."""
    return map_change if hasattr(map_change, moment) else TenantMoves


def die() -> None:
    raise Killed


def stored(app: Any, name: str) -> list[bytes | None]:
    with opened(app) as (partitions, client):
        return [client.hget(each.keys.quotas, name) for each in partitions]


def limits(app: Any, tenant: str) -> list[int]:
    with opened(app) as found:
        return [
            int(each.explain_tenant(tenant).run(found.client)["concurrency"]) for each in found.of(tenant)
        ]


@pytest.mark.parametrize("moment", ["stored_quota", "_check_spread"])
def test_a_quota_is_divided_among_the_shares_of_now(
    wide: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    wide.dq.quotas.set("push", A, concurrency=4)
    owner = quotas if hasattr(quotas, moment) else quotas.QuotasApi
    before_next(monkeypatch, owner, moment, lambda: wide.dq.quotas.set("push", A, spread=2))
    assert wide.dq.quotas.set("push", A, concurrency=8) == Quota(concurrency=8, spread=2)
    assert limits(wide, A) == [4, 4]
    send(wide, *[A] * 40)
    assert len(claim_everywhere(wide)) == 8


@pytest.mark.parametrize("name", ["default", "config"])
def test_a_quota_for_all_reaches_partitions_that_were_added(
    wide: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    add = lambda: wide.dq.queues["push"].set_partitions(7)  # noqa: E731
    if name == "config":
        wide.conf.dq_queues = {"push": {"partitions": 4, "concurrency": 3}}
    send(wide, A)
    if name == "default":
        before_next(monkeypatch, quotas, "refuse_default_spread", add)
        wide.dq.quotas.set_default("push", concurrency=3)
    else:
        before_next(monkeypatch, settings_quotas, "apply_settings", add)
        with wide.connection_for_read() as connection:
            connection.default_channel.basic_consume("push", False, lambda message: None, "1")
    assert stored(wide, name) == [Quota(concurrency=3).pack()] * 7


@pytest.mark.parametrize("change", ["number", "spread"])
def test_a_pause_by_the_map_before_holds_in_the_new_homes(
    wide: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    queue = wide.dq.queues["push"]

    def make(number: int) -> None:
        if change == "spread":
            wide.dq.quotas.set("push", A, spread=number)
        else:
            queue.set_partitions(10 * number)

    moving = next(each for each in TENANTS if PartitionMap(20, 4).moves(each))
    tenant = A if change == "spread" else moving
    before_next(monkeypatch, pauses, "run_all", lambda: make(2))
    assert wide.dq.quotas.pause("push", tenant).paused
    send(wide, *[tenant] * 20)
    assert claim_everywhere(wide) == []
    before_next(monkeypatch, pauses, "run_all", lambda: make(3))
    assert queue.resume(tenant)
    assert len(claim_everywhere(wide)) == 20


@pytest.mark.parametrize("tenant", [A, None])
def test_a_pause_or_its_end_counts_although_its_last_partition_goes_meanwhile(
    wide: Any, monkeypatch: pytest.MonkeyPatch, tenant: str | None
) -> None:
    queue = wide.dq.queues["push"]

    def narrow() -> None:
        if tenant is None:
            queue.set_partitions(1)
        else:
            wide.dq.quotas.set("push", tenant, spread=1)

    def then_narrow(calls: Any, client: Any) -> Any:
        monkeypatch.setattr(pauses, "run_all", run_all)
        replies = run_all(calls, client)
        before_next(monkeypatch, pauses, "run_all", narrow)
        return replies

    for change in (queue.pause, queue.resume):
        queue.set_partitions(4)
        if tenant is not None:
            wide.dq.quotas.set("push", tenant, spread=3)
        monkeypatch.setattr(pauses, "run_all", then_narrow)
        assert change(tenant)
    actions = [each.action for each in wide.dq.audit()]
    assert [each for each in actions if each in ("paused", "resumed")] == ["resumed", "paused"]


@pytest.mark.parametrize("moment", ["_decide", "follow", "align_settings", "step"])
def test_a_spread_that_another_process_completes_has_the_new_shares(
    wide: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    wide.dq.quotas.set("push", A, concurrency=8)
    send(wide, *[A] * 100)  # by their random ids, each share has some of them
    claimed = claim_everywhere(wide)
    before_next(monkeypatch, owner_of(moment), moment, die)
    with pytest.raises(Killed):
        wide.dq.quotas.set("push", A, concurrency=12, spread=4)
    queue = wide.dq.queues["push"]
    if moment == "_decide":
        with pytest.raises(TenantMoving):
            wide.dq.quotas.set("push", A, spread=4, timeout=0)
    else:
        with pytest.raises(TenantMoving):  # eight messages run
            queue.set_partitions(4, timeout=0)
    assert claim_everywhere(wide) == []
    finish(wide, claimed[:6])
    queue.set_partitions(4)
    assert len(claim_everywhere(wide)) == 10
    assert limits(wide, A) == [3, 3, 3, 3]
    assert wide.dq.quotas.get("push", A) == Quota(concurrency=12, spread=4)


@pytest.mark.parametrize("moment", ["_decide", "follow"])
def test_a_quota_that_is_set_by_the_map_before_moves_with_its_tenant(
    wide: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    for tenant in TENANTS:
        wide.dq.quotas.set("push", tenant, concurrency=4)
    with opened(wide) as late:

        def change_all() -> None:
            late.set_quota(B, None)
            late.set_quota(C, Quota(concurrency=2))
            late.set_quota(D, Quota(concurrency=2))

        before_next(monkeypatch, map_change, moment, change_all)
        if moment == "_decide":
            monkeypatch.setattr(map_change, "align_settings", killed_once(tenant_settings.align_settings))
            with pytest.raises(Killed):
                wide.dq.queues["push"].set_partitions(7)
        wide.dq.queues["push"].set_partitions(7)
        with pytest.raises(InvalidRequest, match="Another change of the partitions of queue 'push'"):
            late.set_quota(B, None)
    limits_now = {tenant: quota.concurrency for tenant, quota in wide.dq.quotas.list("push").items()}
    assert limits_now == {A: 4, C: 2, D: 2}
    with opened(wide) as found:
        for tenant in limits_now:
            numbers = [
                each.keys.partition
                for each in found.partitions
                if found.client.hexists(each.keys.quotas, f"t:{tenant}")
            ]
            assert numbers == [found.homes.home(tenant)]


def killed_once(function: Callable[..., Any]) -> Callable[..., Any]:
    left = [die]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()()
        return function(*args, **kwargs)

    return wrapped


def test_a_pause_that_begins_while_settings_move_ends_by_itself(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause begins before each request in turn that writes settings in the partition of its tenant."""
    moving = next(each for each in TENANTS if PartitionMap(7, 4).moves(each))
    (old,) = PartitionMap(4).partitions(moving)
    names = (f"staying-{number}" for number in range(1000))
    staying = next(each for each in names if PartitionMap(7, 4).shares_by_partition(each) == {old: 0})
    wide.dq.quotas.pause("push", moving, until=timedelta(hours=2))
    write, left = tenant_settings._write, [0]

    def write_slowly(partition: Any, settings: Any) -> Any:
        procedure = write(partition, settings)
        answer = None
        while True:
            try:
                request = procedure.send(answer)
            except StopIteration as end:
                return end.value
            left[0] -= partition.keys.partition == old
            if left[0] == 0 and partition.keys.partition == old:
                queue.pause(staying, until=timedelta(hours=1))
            answer = yield request

    monkeypatch.setattr(tenant_settings, "_write", write_slowly)
    for count in (7, 4):
        moment, is_over = 0, False
        while not is_over:
            queue.set_partitions(11 - count)
            moment += 1
            left[0] = moment
            queue.set_partitions(count)
            is_over = left[0] > 0
            left[0] = 0
            with opened(wide) as (partitions, client):
                keys = partitions[old].keys
                ends = [end for _, end in client.zrange(keys.pause_ends, 0, 0, withscores=True)]
                assert [float(client.hget(keys.state, "resume_at"))] == (ends or [0.0])
            queue.resume(staying)
        assert moment > 1


@pytest.mark.parametrize("division", [1, 2])
def test_a_quota_that_is_set_while_it_is_divided_among_fewer_shares_holds(
    wide: Any, monkeypatch: pytest.MonkeyPatch, division: int
) -> None:
    set_quota, calls = wide.dq.quotas.set, [0]
    set_quota("push", A, concurrency=12, spread=3)

    def divide_slowly(*args: Any) -> None:
        calls[0] += 1
        with monkeypatch.context() as patch:
            if calls[0] == division:
                action = lambda: set_quota("push", A, concurrency=6)  # noqa: E731
                before_next(patch, tenant_settings, "quota_of_bytes", action)
            tenant_settings.divide_quotas(*args)
        if calls[0] == 1:
            with opened(wide) as late:  # by the map of the change, so that the last division has to divide it
                late.set_quota(A, Quota(concurrency=9, spread=2))

    monkeypatch.setattr(map_change, "divide_quotas", divide_slowly)
    set_quota("push", A, spread=2)
    assert calls[0] >= 2
    assert limits(wide, A) == [3, 3]
    assert wide.dq.quotas.get("push", A) == Quota(concurrency=6, spread=2)
