"""Careers outside of Celery, led by both kinds of election."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from celery_dq.leadership.career import TRUST, Term
from celery_dq.testing.waiting import wait_until
from tests.leadership.booth import SHORT_S
from tests.leadership.hall import Hall


def test_a_career_is_led_in_order(hall: Hall) -> None:
    _, runner = hall.hire("ann")
    hall.inbox.put("m1")
    hall.inbox.put("m2")
    wait_until(lambda: "ann has executed m2" in hall.said())
    assert runner.close(30)
    assert hall.said() == [
        "ann inaugurates 1",
        "ann executes m1",
        "ann has executed m1",
        "ann executes m2",
        "ann has executed m2",
        "ann hands over 1",
    ]


def test_execute_says_whether_to_go_on(hall: Hall) -> None:
    hall.hire("ann")
    hall.when("ann inaugurates")
    hall.hire("bob")
    hall.inbox.put("stop")
    hall.when("bob inaugurates")
    assert hall.said()[-2:] == ["ann hands over 1", "bob inaugurates 2"]


def test_a_graceful_hand_over_takes_less_than_half_a_second(hall: Hall) -> None:
    _, first = hall.hire("ann")
    hall.when("ann inaugurates")
    hall.hire("bob")
    hall.hire("cid")
    wait_until(lambda: len(first.office.election.standing()) == 3, what="three in line")
    assert first.close(30)
    handed_over = hall.when("ann hands over")
    wait_until(lambda: len([line for line in hall.said() if "inaugurates" in line]) == 2)
    assert hall.lines[-1][0] - handed_over < 0.5


def test_what_runs_is_finished_before_the_successor_begins(hall: Hall) -> None:
    ann, first = hall.hire("ann", SHORT_S)
    hall.when("ann inaugurates")
    hall.hire("bob")
    ann.holding.clear()
    hall.inbox.put("m1")
    hall.when("ann executes")
    first.resign()
    assert first.term is not None
    assert first.term.wait(30)
    time.sleep(SHORT_S)  # longer than a session: the leader goes on renewing
    assert not any(line.startswith("bob") for line in hall.said())
    ann.holding.set()
    hall.when("bob inaugurates")
    assert hall.said()[2:] == [
        "ann has executed m1",
        f"ann hands over {ann.token}",
        f"bob inaugurates {ann.token + 1}",
    ]


def test_who_is_cut_off_falls_before_the_successor_begins(hall: Hall) -> None:
    fallen: list[tuple[float, Term]] = []
    ann, first = hall.hire("ann", SHORT_S, on_fall=lambda term: fallen.append((time.monotonic(), term)))
    hall.when("ann inaugurates")
    hall.hire("bob")
    ann.holding.clear()
    hall.inbox.put("m1")
    hall.when("ann executes")
    cut_at = time.monotonic()
    first.office.election.renew = cut_off  # type: ignore[method-assign]
    hall.booth.silence(first.office.election)
    wait_until(lambda: fallen)
    ann.holding.set()
    hall.inbox.put("m2")
    begun = hall.when("bob inaugurates")
    assert fallen[0][0] < begun
    assert fallen[0][0] - cut_at < (TRUST + 0.2) * SHORT_S
    assert begun - cut_at < 2 * SHORT_S + 1
    hall.when("bob executes")
    assert "ann executes m2" not in hall.said()


def cut_off() -> None:
    raise ConnectionError("cut off")


def test_grace_is_waited_for_only_where_nobody_handed_over(hall: Hall) -> None:
    _, first = hall.hire("ann")
    hall.when("ann inaugurates")
    _, second = hall.hire("bob", SHORT_S, grace_s=60)
    began = time.monotonic()
    first.close(30)
    assert hall.when("bob inaugurates") - began < 0.5
    hall.hire("cid", grace_s=0.6)
    second.office.election.renew = cut_off  # type: ignore[method-assign]
    hall.booth.silence(second.office.election)
    cut_at = time.monotonic()
    assert hall.when("cid inaugurates") - cut_at > 0.6


def test_a_failed_inauguration_is_tried_again_with_a_new_token(hall: Hall) -> None:
    diary, runner = hall.hire("ann")
    hall.when("ann inaugurates")
    plain = diary.inaugurate

    def fail_once(token: int) -> None:
        diary.inaugurate = plain  # type: ignore[method-assign]
        raise RuntimeError("not today")

    diary.inaugurate = fail_once  # type: ignore[method-assign]
    runner.resign()
    wait_until(lambda: "ann inaugurates 3" in hall.said())


class SlowSource:
    """One message, which comes when it is told to; it waits for that longer than it was asked to."""

    def __init__(self) -> None:
        self.asked, self.comes = threading.Event(), threading.Event()
        self.messages = ["m1"]

    def __call__(self, timeout_s: float) -> str:
        self.asked.set()
        self.comes.wait(30)
        if not self.messages:
            raise queue.Empty
        return self.messages.pop()


@pytest.mark.parametrize("how", ["resign", "close"])
def test_what_was_taken_before_the_end_is_executed(how: str, hall: Hall) -> None:
    source = SlowSource()
    _, runner = hall.hire("ann", source=source)
    assert source.asked.wait(30)
    term = runner.term
    assert term is not None
    ended = threading.Thread(target=getattr(runner, how))
    ended.start()
    wait_until(lambda: term.ended)
    source.comes.set()
    ended.join(30)
    wait_until(lambda: "ann hands over 1" in hall.said())
    assert hall.said()[:4] == [
        "ann inaugurates 1",
        "ann executes m1",
        "ann has executed m1",
        "ann hands over 1",
    ]


@pytest.mark.parametrize("returns", [True, False])
def test_what_was_taken_before_the_fall_is_given_back(
    returns: bool, hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    source, returned = SlowSource(), list[str]()
    _, runner = hall.hire("ann", source=source, give_back=returned.append if returns else None)
    assert source.asked.wait(30)
    term = runner.term
    assert term is not None
    term.fall("as if the session had expired")
    source.comes.set()
    wait_until(lambda: "ann hands over 1" in hall.said())
    assert returned == (["m1"] if returns else [])
    assert ("is lost" in caplog.text) is not returns
    assert "ann executes m1" not in hall.said()
