"""Several processes that change the partitions of one queue at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.app.api import map_change, quotas
from celery_dq.errors import InvalidRequest
from tests.integration.moving_world import Killed
from tests.integration.partitioned_shop import A, B
from tests.integration.test_quotas_during_changes import before_next, die
from tests.integration.test_spread_operations import lives_in


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
