"""The verdict for constructed records."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest

from tests.chaos.faults import KILL, WEIGHTS, Fault, draw_schedule
from tests.chaos.ledger import Entry
from tests.chaos.load import Message, Published, draw_messages
from tests.chaos.verdict import (
    ACK_ALLOWANCE,
    ORPHAN_ALLOWANCE,
    RECONNECT_ALLOWANCE,
    REPLICATION_ALLOWANCE,
    count_overtaken,
    find_disordered,
    judge,
    runs_of,
)


def entry(
    event: Literal["start", "finish"], at: float, worker: str = "w1", pid: int = 1, number: int = 0
) -> Entry:
    return Entry(event, f"m{number}", number, "t", worker, pid, at, at, False)


def published(amount: int = 1) -> Published:
    return Published(confirmed={f"m{n}": Message(f"m{n}", n, "t", 0) for n in range(amount)})


TWICE = [entry("start", 10), entry("finish", 11), entry("start", 14, "w2"), entry("finish", 15, "w2")]


def test_a_message_that_ran_once_is_fine() -> None:
    verdict = judge(published(), [entry("start", 1), entry("finish", 2)], [], ())
    assert verdict.good
    assert (verdict.finished, verdict.duplicated) == (1, 0)


def test_an_unfinished_message_is_lost_or_stuck() -> None:
    verdict = judge(published(3), [entry("start", 1, number=1)], [], {"m2"})
    assert (verdict.lost, verdict.stuck) == (["m0", "m1"], ["m2"])


def test_an_uncertain_publish_is_not_missed() -> None:
    unsure = Published(uncertain={"m0": Message("m0", 0, "t", 0)})
    assert judge(unsure, [], [], ()).good


@pytest.mark.parametrize(
    ("confirmed_at", "mode", "replicated", "excused"),
    [
        (10 - REPLICATION_ALLOWANCE / 2, "failover", False, True),
        (10 - 2 * REPLICATION_ALLOWANCE, "failover", False, False),
        # during the failover; after it, by the new master
        (10.5, "failover", False, True),
        (11.5, "failover", False, False),
        # a replica had it, or it was another fault
        (10 - REPLICATION_ALLOWANCE / 2, "failover", True, False),
        (10 - REPLICATION_ALLOWANCE / 2, "restart-broker", False, False),
    ],
)
def test_a_failover_may_lose_messages_that_only_the_master_had_confirmed(
    confirmed_at: float, mode: str, replicated: bool, excused: bool
) -> None:
    gone = published()
    gone.confirmed_at["m0"], gone.replicated = confirmed_at, replicated
    verdict = judge(gone, [], [Fault(mode, "", 0, 10, 11)], ())
    assert (verdict.lost_with_master, verdict.lost) == ((["m0"], []) if excused else ([], ["m0"]))
    assert verdict.good is excused
    assert ("lost with a master: 1" in verdict.report()) is excused


def test_a_message_on_the_new_master_is_stuck() -> None:
    gone = published()
    gone.confirmed_at["m0"] = 10.0
    assert judge(gone, [], [Fault("failover", "", 0, 10, 11)], {"m0"}).stuck == ["m0"]


@pytest.mark.parametrize(
    ("fault", "attributable"),
    [
        (Fault("kill-worker", "w1", 0, 10.5, 10.5), True),
        (Fault("kill-worker", "w1", 0, 11 + ACK_ALLOWANCE / 2, 11 + ACK_ALLOWANCE / 2), True),
        # long after the ack was due, before the run, or another worker
        (Fault("kill-worker", "w1", 0, 13, 13), False),
        (Fault("kill-worker", "w1", 0, 9.5 - ORPHAN_ALLOWANCE, 9.5 - ORPHAN_ALLOWANCE), False),
        # its orphaned children continue with the messages in their pipes
        (Fault("kill-worker", "w1", 0, 10 - ORPHAN_ALLOWANCE / 2, 10 - ORPHAN_ALLOWANCE / 2), True),
        (Fault("kill-worker", "w2", 0, 10.5, 10.5), False),
        # another child of the same worker
        (Fault("kill-child", "w1", 1, 10.5, 10.5), True),
        (Fault("kill-child", "w1", 2, 10.5, 10.5), False),
        # a pause that spans the run; a stop after which no message may be lost
        (Fault("pause", "w1", 0, 8, 12), True),
        (Fault("warm", "w1", 0, 10.5, 10.5), False),
        (Fault("script-flush", "", 0, 10.5, 10.5), False),
        # the second runner had it first, and slept; or woke long before
        (Fault("pause", "w2", 0, 9, 14 - ORPHAN_ALLOWANCE / 2), True),
        (Fault("pause", "w2", 0, 9, 14 - 2 * ORPHAN_ALLOWANCE), False),
        # the connections of all workers, until they are back
        (Fault("kill-connections", "", 0, 10.5, 10.5), True),
        (Fault("restart-broker", "", 0, 9 - RECONNECT_ALLOWANCE, 9.5 - RECONNECT_ALLOWANCE), False),
    ],
)
def test_a_second_run_needs_an_excuse(fault: Fault, attributable: bool) -> None:
    verdict = judge(published(), TWICE, [fault], ())
    assert (verdict.attributable, len(verdict.unattributable)) == ((1, 0) if attributable else (0, 1))


@pytest.mark.parametrize(
    ("mode", "at", "undisturbed"),
    [("kill-worker", 12, 1), ("kill-worker", 20, 0), ("kill-child", 12, 0), ("kill-child", 10.2, 1)],
)
def test_no_other_worker_has_a_message_before_the_lease_of_its_holder_ends(
    mode: str, at: float, undisturbed: int
) -> None:
    entries = [entry("start", 10), entry("start", 25, "w2"), entry("finish", 26, "w2")]
    faults = [Fault(mode, "w1", 0, 10.5, 10.5), Fault("kill-worker", "w3", 0, at, at)]
    verdict = judge(published(), entries, faults, (), lease_s=10.0)
    assert verdict.undisturbed[0] == undisturbed
    assert verdict.slowest_recovery == (14.5 if undisturbed else 25 - at)


def test_recovery_is_counted_from_the_fault() -> None:
    entries = [entry("start", 10), entry("start", 14, "w2"), entry("finish", 15, "w2")]
    verdict = judge(published(), entries, [Fault("kill-worker", "w1", 0, 10.5, 10.5)], ())
    assert verdict.recovery == {"kill-worker": (1, 3.5, 3.5, 3.5)}
    assert verdict.slowest_recovery == 3.5


@pytest.mark.parametrize(
    ("other", "slowest"),
    [
        # another worker may have had it by then, and was hit as well
        (Fault("kill-worker", "w3", 0, 12.0, 12.0), 2.0),
        (Fault("restart-broker", "", 0, 13.0, 13.5), 1.0),
        # a fault that loses no message, or one that was too early, too late, or of the same worker
        (Fault("warm", "w3", 0, 12.0, 12.0), 3.5),
        (Fault("kill-worker", "w3", 0, 10.2, 10.2), 3.5),
        (Fault("kill-worker", "w3", 0, 14.5, 14.5), 3.5),
        (Fault("soft", "w1", 0, 10.4, 12.0), 3.5),
    ],
)
def test_the_slowest_recovery_is_counted_from_the_last_hit(other: Fault, slowest: float) -> None:
    entries = [entry("start", 10), entry("start", 14, "w2"), entry("finish", 15, "w2")]
    verdict = judge(published(), entries, [Fault("kill-worker", "w1", 0, 10.5, 10.5), other], ())
    assert verdict.slowest_recovery == slowest
    assert len(verdict.slow) == 1


def test_runs_that_overlap_are_counted() -> None:
    entries = [entry("start", 1), entry("start", 2, "w2"), entry("finish", 3), entry("finish", 4, "w2")]
    assert judge(published(), entries, [], ()).overlapping == 1


def test_overtaking() -> None:
    order = [2, 0, 1, 4, 3]
    entries = [entry("start", at, number=number) for at, number in enumerate(order)]
    assert sorted(count_overtaken(runs_of(entries))) == [0, 0, 1, 1, 1]


def test_a_seed_draws_the_same_schedule_and_load() -> None:
    schedule = draw_schedule(7, 1000, 20, 12, 3)
    assert schedule == draw_schedule(7, 1000, 20, 12, 3) != draw_schedule(8, 1000, 20, 12, 3)
    drawn = Counter(planned.mode for planned in schedule)
    assert drawn[KILL] == 20
    assert drawn.total() == 32
    assert set(drawn) == {KILL, *WEIGHTS}
    assert {planned.mode for planned in draw_schedule(7, 1000, 20, 5, 3, ["cold"])} == {"cold"}
    one, other = draw_messages(7, 50, 5, 1), draw_messages(7, 50, 5, 1)
    assert [(m.tenant, m.seconds) for m in one] == [(m.tenant, m.seconds) for m in other]
    # The ids differ, so that two runs on one broker do not interfere.
    assert one[0].id != other[0].id


def test_a_message_that_starts_after_a_younger_one_is_out_of_order() -> None:
    entries = [entry("start", at, number=number) for at, number in ((1, 0), (2, 2), (3, 1), (4, 3))]
    again = entry("start", 5, number=0)  # a second run, after a crash
    (found,) = find_disordered(runs_of([*entries, again]), ["t"])
    assert found.startswith("m1, number 1 of t, started on w1 1.000 s after number 2")
    assert find_disordered(runs_of(entries), ["another"]) == []
    assert not judge(published(4), entries, [], {"m0", "m1", "m2", "m3"}, in_order=["t"]).good
