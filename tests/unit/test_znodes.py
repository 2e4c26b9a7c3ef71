from __future__ import annotations

import pytest

from celery_dq.errors import ConfigurationError
from celery_dq.znodes import LeadershipNodes, sequence_of, serial_order


def test_names_are_encoded() -> None:
    assert LeadershipNodes("online", "a/b.c").path == "/dq/online/leaders/a%2Fb%2Ec"
    assert LeadershipNodes("online", "..").path == "/dq/online/leaders/%2E%2E"


def test_a_leadership_has_a_name() -> None:
    with pytest.raises(ConfigurationError):
        LeadershipNodes("online", "")


@pytest.mark.parametrize(("number", "written"), [(0, "0000000000"), (7, "0000000007"), (-5, "-000000005")])
def test_reads_a_sequence(number: int, written: str) -> None:
    assert sequence_of(f"c-1f2e-{written}") == number


def test_orders_by_age_over_the_roll_over() -> None:
    born = [2**31 - 2, 2**31 - 1, -(2**31) + 1, -(2**31) + 2]
    nodes = [f"c-x-{number:010d}" for number in born]
    assert serial_order([nodes[2], nodes[0], nodes[3], nodes[1]]) == nodes
    assert serial_order([]) == []
