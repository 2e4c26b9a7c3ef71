"""Several processes that change the partitions of one queue at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.app.api import map_change, quotas
from celery_dq.errors import InvalidRequest
from celery_dq.options import Quota
from tests.integration.moving_world import Killed
from tests.integration.partitioned_shop import A, B, claim_in, opened
from tests.integration.shop import send
from tests.integration.test_moves_of_busy_tenants import OLD
from tests.integration.test_quotas_during_changes import before_next, die, limits, owner_of
from tests.integration.test_spread_operations import lives_in
from tests.integration.test_tenant_moves import MOVING


def test_a_process_that_waits_returns_when_another_one_has_ended_the_change(wide: Any, queue: Any) -> None:
    send(wide, MOVING)
    (entry,) = claim_in(wide, MOVING)

    def complete_elsewhere(_: float) -> None:
        with opened(wide) as (partitions, client):
            assert partitions[OLD].ack("worker:1", finish=[entry.tag]).run(client) == 0
        queue.set_partitions(7)

    broker = wide.dq._broker
    change = map_change.set_partitions(broker, broker.options, "push", 7, 5, sleep=complete_elsewhere)
    assert (change.before, change.after) == (4, 7)


@pytest.mark.parametrize("moment", ["follow", "align_settings", "step", "end", "divide_used_permits"])
@pytest.mark.parametrize("change", ["number", "spread"])
def test_the_second_process_to_complete_a_change_leaves_quotas_and_pauses(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch, change: str, moment: str
) -> None:
    wide.dq.quotas.set("push", A, concurrency=9)
    wide.dq.quotas.set("push", MOVING, rate=5)
    queue.pause(MOVING)
    count = 7 if change == "number" else 4
    before_next(monkeypatch, owner_of(moment), moment, lambda: queue.set_partitions(count))
    if change == "number":
        assert queue.set_partitions(7, timeout=1).after == 7
    else:
        assert wide.dq.quotas.set("push", A, spread=3, timeout=1).spread == 3
    assert wide.dq.quotas.get("push", MOVING) == Quota(rate=5, paused=True)
    assert limits(wide, A) == ([9] if change == "number" else [3, 3, 3])
    send(wide, MOVING)
    assert claim_in(wide, MOVING) == []
    assert queue.resume(MOVING)
    assert len(claim_in(wide, MOVING)) == 1


def test_a_change_that_begins_too_late_leaves_quotas_and_pauses(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide.dq.quotas.set("push", MOVING, rate=5)
    queue.pause(MOVING)
    before_next(monkeypatch, map_change, "copy_settings", lambda: queue.set_partitions(7))
    with pytest.raises(InvalidRequest, match="Another change of the partitions of queue 'push'"):
        queue.set_partitions(9)
    assert wide.dq.quotas.get("push", MOVING) == Quota(rate=5, paused=True)


def test_of_two_spreads_that_begin_at_once_one_is_refused(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_other() -> None:
        with monkeypatch.context() as patch:
            before_next(patch, quotas, "complete_change", die)
            with pytest.raises(Killed):
                wide.dq.quotas.set("push", B, spread=2)

    before_next(monkeypatch, map_change, "_decide", begin_other)
    with pytest.raises(InvalidRequest, match=f"the spread of tenant {B!r} is not complete"):
        wide.dq.quotas.set("push", A, spread=3)
    queue.set_partitions(4)
    wide.dq.quotas.set("push", A, spread=3)
    assert [len(lives_in(wide, tenant)[0]) for tenant in (A, B)] == [3, 2]
