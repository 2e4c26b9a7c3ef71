"""A short seeded run of every broker; ``make chaos`` is the long one."""

from __future__ import annotations

import pytest

from tests.brokers import ACTIVE, BROKERS
from tests.chaos.__main__ import RECOVERY_ALLOWANCE
from tests.chaos.driver import Plan, run

#: One fault of every kind whose price is less than a second or two.
SHORT = Plan(
    seed=7,
    messages=1200,
    kills=2,
    others=5,
    lease=2.0,
    patience=15.0,
    modes=("kill-worker", "kill-child", "kill-connections", "script-flush", "restart-broker", "pause"),
)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_short_seeded_run(name: str) -> None:
    verdict = run(BROKERS[name], SHORT, print)
    print(verdict.report())
    assert verdict.finished > 0
    assert sum(verdict.faults.values()) >= SHORT.kills + SHORT.others
    if BROKERS[name].has_leases:
        assert verdict.good, verdict.report()
        assert verdict.slowest_recovery <= SHORT.lease + RECOVERY_ALLOWANCE, verdict.report()
