"""Careers outside of Celery, with both kinds of election."""

from __future__ import annotations

import queue
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from celery_dq.leadership.career import Term
from celery_dq.leadership.elector import PAUSE_S
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.testing.waiting import wait_until
from tests.leadership.election_harness import SHORT_S
from tests.leadership.recorded_careers import RecordedCareers


def test_a_career_is_led_in_order(careers: RecordedCareers) -> None:
    _, runner = careers.hire("ann")
    careers.inbox.put("m1")
    careers.inbox.put("m2")
    wait_until(lambda: "ann has executed m2" in careers.texts())
    assert runner.close(30)
    assert careers.texts() == [
        "ann inaugurates 1",
        "ann executes m1",
        "ann has executed m1",
        "ann executes m2",
        "ann has executed m2",
        "ann hands over 1",
    ]


def test_execute_reports_whether_to_go_on(careers: RecordedCareers) -> None:
    careers.hire("ann")
    careers.when("ann inaugurates")
    careers.hire("bob")
    careers.inbox.put("stop")
    careers.when("bob inaugurates")
    assert careers.texts()[-2:] == ["ann hands over 1", "bob inaugurates 2"]


def test_a_graceful_hand_over_takes_less_than_half_a_second(careers: RecordedCareers) -> None:
    _, first = careers.hire("ann")
    careers.when("ann inaugurates")
    careers.hire("bob")
    careers.hire("cid")
    wait_until(lambda: len(first.elector.election.candidates()) == 3, what="three in line")
    assert first.close(30)
    handed_over = careers.when("ann hands over")
    wait_until(lambda: len([line for line in careers.texts() if "inaugurates" in line]) == 2)
    assert careers.lines[-1][0] - handed_over < 0.5


def test_a_running_message_is_finished_before_the_successor_begins(careers: RecordedCareers) -> None:
    ann, first = careers.hire("ann", SHORT_S)
    careers.when("ann inaugurates")
    careers.hire("bob")
    ann.holding.clear()
    careers.inbox.put("m1")
    careers.when("ann executes")
    first.resign()
    assert first.term is not None
    assert first.term.wait(30)
    time.sleep(SHORT_S)  # longer than a session: the leader renews its term
    assert not any(line.startswith("bob") for line in careers.texts())
    ann.holding.set()
    careers.when("bob inaugurates")
    assert careers.texts()[2:] == [
        "ann has executed m1",
        f"ann hands over {ann.token}",
        f"bob inaugurates {ann.token + 1}",
    ]


def test_a_leader_that_is_cut_off_falls_before_the_successor_begins(careers: RecordedCareers) -> None:
    fallen: list[tuple[float, Term]] = []
    ann, first = careers.hire("ann", SHORT_S, on_fall=lambda term: fallen.append((time.monotonic(), term)))
    careers.when("ann inaugurates")
    careers.hire("bob")
    ann.holding.clear()
    careers.inbox.put("m1")
    careers.when("ann executes")
    first.elector.election.renew = cut_off  # type: ignore[method-assign]
    careers.elections.silence(first.elector.election)
    wait_until(lambda: fallen)
    ann.holding.set()
    careers.inbox.put("m2")
    begun = careers.when("bob inaugurates")
    assert fallen[0][0] < begun
    careers.when("bob executes")
    assert "ann executes m2" not in careers.texts()


def cut_off() -> None:
    raise ConnectionError("cut off")


def test_grace_is_waited_for_only_without_a_hand_over(careers: RecordedCareers) -> None:
    _, first = careers.hire("ann")
    careers.when("ann inaugurates")
    _, second = careers.hire("bob", SHORT_S, grace_s=60)
    began = time.monotonic()
    first.close(30)
    assert careers.when("bob inaugurates") - began < 30
    careers.hire("cid", grace_s=0.6)
    second.elector.election.renew = cut_off  # type: ignore[method-assign]
    careers.elections.silence(second.elector.election)
    cut_at = time.monotonic()
    assert careers.when("cid inaugurates") - cut_at > 0.6


@pytest.mark.logged_error("RuntimeError: not today")
def test_a_failed_inauguration_is_tried_again_with_a_new_token(careers: RecordedCareers) -> None:
    diary, runner = careers.hire("ann")
    careers.when("ann inaugurates")
    plain = diary.inaugurate

    def fail_once(token: int) -> None:
        diary.inaugurate = plain  # type: ignore[method-assign]
        raise RuntimeError("not today")

    diary.inaugurate = fail_once  # type: ignore[method-assign]
    runner.resign()
    wait_until(lambda: "ann inaugurates 3" in careers.texts())


def test_a_career_can_ask_whether_its_term_ends(careers: RecordedCareers) -> None:
    diary, runner = careers.hire("ann")

    def execute(message: str) -> bool:
        assert diary.term is not None
        assert not diary.term.ended
        diary.note("executes", message)
        diary.note("has stopped" if diary.term.wait(20) else "goes on", message)
        return True

    diary.execute = execute  # type: ignore[method-assign]
    careers.inbox.put("m1")
    careers.when("ann executes m1")
    runner.resign()
    careers.when("ann has stopped m1")


def test_tokens_grow_although_the_server_has_lost_its_data(careers: RecordedCareers) -> None:
    """A receiver that has seen token 1042 refuses lower ones."""
    _, runner = careers.hire("ann", floor=lambda: 1041)
    careers.when("ann inaugurates 1042")
    forget(runner.elector.election)
    careers.when("ann inaugurates 1043")
    runner._floor = lambda: 0
    forget(runner.elector.election)
    careers.when("ann inaugurates 1044")


def forget(election: Any) -> None:
    """Delete all data of the election from its server."""
    if isinstance(election, RedisElection):
        election._do("DEL", election._keys.leader, election._keys.candidates)
    else:
        election._ask(lambda client: client.delete_async(election._nodes.epoch))


@pytest.mark.logged_error("RuntimeError: not at all")
def test_a_career_that_always_fails_rests_longer_and_longer(careers: RecordedCareers) -> None:
    diary, _ = careers.hire("ann", requeue=careers.inbox.put)

    def fail(message: str) -> bool:
        raise RuntimeError("not at all")

    diary.execute = fail  # type: ignore[method-assign]
    careers.inbox.put("m1")
    began = [careers.when(f"ann inaugurates {token}") for token in range(1, 5)]
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert pauses[-1] >= PAUSE_S * 2 ** len(pauses)
    # The other candidate leads in the meantime.
    careers.hire("bob")
    careers.when("bob executes m1")


class SlowSource:
    """A source with one message, which comes on demand and later than the requested wait."""

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
def test_a_message_taken_before_the_end_is_executed(how: str, careers: RecordedCareers) -> None:
    source = SlowSource()
    _, runner = careers.hire("ann", source=source)
    assert source.asked.wait(30)
    term = runner.term
    assert term is not None
    ended = threading.Thread(target=getattr(runner, how))
    ended.start()
    wait_until(lambda: term.ended)
    source.comes.set()
    ended.join(30)
    wait_until(lambda: "ann hands over 1" in careers.texts())
    assert careers.texts()[:4] == [
        "ann inaugurates 1",
        "ann executes m1",
        "ann has executed m1",
        "ann hands over 1",
    ]


@pytest.mark.logged_error("ValueError: cannot be executed")
@pytest.mark.parametrize("how", ["returns", "fails", "is missing"])
def test_a_message_that_fails_in_execute_is_released(
    how: str, careers: RecordedCareers, caplog: pytest.LogCaptureFixture
) -> None:
    returned: list[str] = []

    def requeue(message: str) -> None:
        returned.append(message)
        if how == "fails":
            raise RuntimeError("a task that is not retried")

    diary, runner = careers.hire("ann", requeue=None if how == "is missing" else requeue)
    plain = diary.execute

    def fail_once(message: str) -> bool:
        diary.execute = plain  # type: ignore[method-assign]
        raise ValueError("cannot be executed")

    diary.execute = fail_once  # type: ignore[method-assign]
    careers.inbox.put("m1")
    # The term ends, and the process becomes a candidate again.
    wait_until(lambda: "ann inaugurates 2" in careers.texts())
    careers.inbox.put("m2")
    wait_until(lambda: "ann has executed m2" in careers.texts())
    assert careers.texts()[:3] == ["ann inaugurates 1", "ann hands over 1", "ann inaugurates 2"]
    assert returned == ([] if how == "is missing" else ["m1"])
    assert ("A message of" in caplog.text and "is lost" in caplog.text) is (how != "returns")
    assert "cannot be executed" in caplog.text
    assert runner.close(30)


@pytest.mark.parametrize("returns", [True, False])
def test_a_message_taken_before_the_fall_is_released(
    returns: bool, careers: RecordedCareers, caplog: pytest.LogCaptureFixture
) -> None:
    source, returned = SlowSource(), list[str]()
    _, runner = careers.hire("ann", source=source, requeue=returned.append if returns else None)
    assert source.asked.wait(30)
    term = runner.term
    assert term is not None
    term.fall("as if the session had expired")
    source.comes.set()
    wait_until(lambda: "ann hands over 1" in careers.texts())
    assert returned == (["m1"] if returns else [])
    assert ("is lost" in caplog.text) is not returns
    assert "ann executes m1" not in careers.texts()
