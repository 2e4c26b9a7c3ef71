"""A short seeded run; ``make chaos`` does a long one, and one of the stock transport."""

from __future__ import annotations

import pytest

from tests.brokers import DQ
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


def test_a_short_seeded_run() -> None:
    verdict = run(DQ, SHORT, print)
    print(verdict.report())
    assert verdict.finished > 0
    assert sum(verdict.faults.values()) >= SHORT.kills + SHORT.others
    assert verdict.good, verdict.report()
    assert verdict.slowest_recovery <= SHORT.lease + RECOVERY_ALLOWANCE, verdict.report()
