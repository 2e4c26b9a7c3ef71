"""Sent and received messages are compared, with lost answers, clock jumps and ends of terms in a tick."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from celery_dq.beat import ElectedScheduler, scheduler
from celery_dq.leadership.career import Term
from celery_dq.testing.waiting import wait_until
from tests.beat.conftest import Beats, lead, once, tick_until, ticks
from tests.doubles.jumping_clock import JumpingClock

#: Seconds after which a term with a session of 8 s is in doubt and not fallen.
DOUBT_S = 4.0


class Sends:
    """Counts the messages that a beat sends to the broker."""

    def __init__(self, beat: ElectedScheduler) -> None:
        self.count = 0
        send = beat._send

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return send(*args, **kwargs)

        beat._send = counted


def fail(target: Any, method: str, times: int, *, reached: bool) -> list[int]:
    """Let the first calls fail, and return the list of failures.

    The request is lost, or only its answer if `reached` is set.
    """
    real, failed = getattr(target, method), list[int]()

    def called(*args: Any, **kwargs: Any) -> Any:
        if len(failed) >= times:
            return real(*args, **kwargs)
        failed.append(1)
        if reached:
            real(*args, **kwargs)
        raise ConnectionError("no answer")

    setattr(target, method, called)
    return failed


@pytest.mark.parametrize("reached", [False, True])
@pytest.mark.parametrize("method", ["begin", "done"])
def test_a_tick_whose_record_fails_is_neither_lost_nor_doubled(
    method: str, reached: bool, app: Any, beats: Beats
) -> None:
    beats.append(ElectedScheduler(app))
    sends = Sends(beats[0])
    lead(beats[0])
    beats[0].tick()
    failed = fail(beats[0].schedule_store, method, 2, reached=reached)
    tick_until(beats[0], app, len(ticks(app)) + 4)
    assert len(failed) == 2
    assert sends.count == len(ticks(app))
    assert once(app)
    assert beats[0].schedule["tick"].total_run_count == len(ticks(app))


@pytest.mark.parametrize("reached", [False, True])
def test_a_send_that_fails_is_repeated_under_its_number(reached: bool, app: Any, beats: Beats) -> None:
    beats.append(ElectedScheduler(app))
    sends = Sends(beats[0])
    lead(beats[0])
    beats[0].tick()
    failed = fail(beats[0]._inner, "send_task", 1, reached=reached)
    tick_until(beats[0], app, len(ticks(app)) + 3)
    assert failed
    assert sends.count == len(ticks(app)) + 1
    assert beats[0].schedule["tick"].total_run_count == len(ticks(app))
    assert once(app)


@pytest.mark.parametrize("seconds", [DOUBT_S, 100.0])
def test_no_tick_is_sent_when_the_term_is_in_doubt_before_the_answer(
    seconds: float, app: Any, beats: Beats
) -> None:
    clock = JumpingClock()
    beats.append(ElectedScheduler(app, clock=clock))
    sends, began = Sends(beats[0]), list[int]()
    lead(beats[0])
    beats[0].tick()
    # If the election was slow, a tick was sent before.
    before = ticks(app)
    book: Any = beats[0].schedule_store
    begin = book.begin

    def counted(*args: Any) -> Any:
        began.append(sends.count)
        return begin(*args)

    book.begin = counted
    clock.jump_before_answer(book, "begin", seconds)
    wait_until(lambda: (beats[0].tick(), began)[1])
    assert sends.count == len(before)
    assert ticks(app) == before
    lead(beats[0])
    tick_until(beats[0], app, len(before) + 2)
    assert sends.count == len(ticks(app))
    assert once(app)


def end(beat: ElectedScheduler) -> None:
    """Let the term begin to end."""
    assert beat.elector.term is not None
    beat.elector.term.end("the test")


def close(beat: ElectedScheduler) -> None:
    beat.elector.close(30)


@pytest.mark.parametrize("how", [end, close])
def test_no_tick_is_sent_in_a_term_that_ended_before_the_answer(
    how: Callable[[ElectedScheduler], None],
    app: Any,
    beats: Beats,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed_over = threading.Event()

    def serve(duties: scheduler.BeatCallbacks, term: Term) -> None:
        term.inaugurated()
        term.wait()
        if how is end:
            # The term stays in its hand-over until the answer comes.
            handed_over.wait(60)

    monkeypatch.setattr(scheduler.BeatCallbacks, "serve", serve)
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    old, new = beats
    sends = Sends(old)
    lead(old)
    old.tick()
    before = ticks(app)
    book: Any = old.schedule_store
    begin, began = book.begin, list[Any]()

    def ended(*args: Any) -> Any:
        began.append(begin(*args))
        how(old)
        return began[-1]

    book.begin = ended
    wait_until(lambda: (old.tick(), began)[1])
    assert sends.count == len(before)
    assert ticks(app) == before
    handed_over.set()
    old.elector.close(30)
    lead(new)
    successor = Sends(new)
    # The new leader sends the pending tick under its number.
    tick_until(new, app, len(before) + 2)
    assert successor.count == len(ticks(app)) - len(before)
    assert once(app)
