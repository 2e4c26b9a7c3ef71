"""A short seeded run of each broker; ``make chaos`` does a long one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.brokers import ACTIVE, BROKERS
from tests.chaos.__main__ import RECOVERY_ALLOWANCE
from tests.chaos.driver import Plan, run

#: Timeout in seconds, long enough for a slow machine, because a run starts ten workers.
pytestmark = pytest.mark.timeout(300)

#: One fault of each kind that costs less than two seconds.
SHORT = Plan(
    seed=7,
    messages=1200,
    kills=2,
    others=6,
    # Long enough that a worker does not count as dead when the machine stalls for some seconds.
    lease=4.0,
    patience=30.0,
    partitions=4,
    modes=(
        "kill-worker",
        "kill-child",
        "kill-connections",
        "script-flush",
        "restart-broker",
        "pause",
        "change-partitions",
    ),
)
#: On stock the messages of a killed worker are stuck for an hour, so the run does not wait for them.
STOCK = replace(SHORT, lease=2.0, patience=5.0)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_short_seeded_run(name: str) -> None:
    verdict = run(BROKERS[name], SHORT if BROKERS[name].has_leases else STOCK, print)
    print(verdict.report())
    assert verdict.finished > 0
    assert sum(verdict.faults.values()) >= SHORT.kills + SHORT.others
    if BROKERS[name].has_leases:
        assert verdict.good, verdict.report()
        assert verdict.slowest_recovery <= SHORT.lease + RECOVERY_ALLOWANCE, verdict.report()
