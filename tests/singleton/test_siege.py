"""A short fault run, chosen by a seed; ``python -m tests.singleton`` is the long one."""

from __future__ import annotations

import os
import random

import pytest

from tests.singleton.siege import FAULTS, Siege


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strict_order_and_no_stale_effect_under_a_handful_of_faults() -> None:
    seed = int(os.environ.get("DQ_SIEGE_SEED", "1"))
    faults = [
        "pause_leader",
        *random.Random(seed).sample([name for name in FAULTS if name != "pause_leader"], 4),
    ]
    with Siege() as siege:
        for fault in faults:
            siege.suffer(fault)
        verdict = siege.judge()
    assert verdict.sound, f"seed {seed}, {faults}: {verdict}"
    assert verdict.terms >= 2
