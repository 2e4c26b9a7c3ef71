"""Who has promised to look when something is due does so, or hands it on. No heartbeat helps here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_dq.transport.redis.process import Process
from tests.broker.counter import Counter
from tests.broker.lookout import Lookout, turn_for, turn_until
from tests.lua.desk import Desk

Crew = Callable[..., Lookout]

#: Of these tests alone: the keepers of earlier ones may still be about on the server.
QUEUE, OTHER = "bay", "mail"


@pytest.fixture
def desk(counter: Counter) -> Desk:
    desk = Desk(counter.client, QUEUE)
    desk.partition.nudge().run(desk.client)  # so that it is there, and a call is one command
    return desk


@pytest.fixture
def crew(counter: Counter) -> Iterator[Crew]:
    hired: list[Lookout] = []

    def hire(room: int, *queues: str, process: Process | None = None, holds: bool = True) -> Lookout:
        hired.append(Lookout(counter.url, room, queues or (QUEUE,), process, holds))
        return hired[-1]

    yield hire
    for each in hired:
        each.close()


def delay(desk: Desk, **seconds: float) -> None:
    now = desk.now_us()
    for task_id, after in seconds.items():
        desk.push(task_id, due_us=now + int(after * 1e6))


def owner(desk: Desk) -> Any:
    return (desk.client.hget(desk.keys.state, "appt_owner") or b"").decode()


def keeps(desk: Desk, lookout: Lookout) -> Callable[[], bool]:
    return lambda: owner(desk) == lookout.process.consumer and lookout.is_quiet


def test_who_is_full_hands_each_appointment_on(desk: Desk, crew: Crew) -> None:
    full, idle = crew(1), crew(3)
    delay(desk, a=0.3, b=0.5, c=0.7)
    turn_until(keeps(desk, full), full)
    turn_until(lambda: idle.is_quiet, idle)
    full.room = 0
    before = full.scripts.sent, idle.scripts.sent
    turn_until(lambda: idle.got == ["a", "b", "c"], full, idle)
    assert full.got == []
    # One nudge, and another one if the full one's own wait for a token, from before, has got it.
    assert full.scripts.sent - before[0] <= 2
    # For each message a claim: the idle one keeps the later appointments itself. A timer may be early.
    assert idle.scripts.sent - before[1] <= 6


def test_who_is_full_and_alone_says_so_once_and_looks_when_there_is_room(desk: Desk, crew: Crew) -> None:
    alone = crew(1)
    delay(desk, a=0.1)
    turn_until(keeps(desk, alone), alone)
    alone.room = 0
    before = alone.scripts.sent
    turn_until(desk.token, alone)
    turn_for(0.2, alone)
    # Its own wait for a token, from before, may get it once.
    assert alone.scripts.sent - before <= 2
    alone.room = 1
    turn_until(lambda: alone.got == ["a"], alone)


def test_a_token_among_full_ones_goes_round_once(desk: Desk, crew: Crew) -> None:
    full = [crew(1) for _ in range(3)]
    turn_until(lambda: all(each.is_quiet for each in full), *full)
    for each in full:
        each.room = 0
    once_more = [each.scripts.sent + 1 for each in full]
    desk.push("a")
    turn_until(lambda: [each.scripts.sent for each in full] == once_more and desk.token(), *full)
    turn_for(0.1, *full)
    assert [each.scripts.sent for each in full] == once_more
    full[1].room = 1
    turn_until(lambda: full[1].got == ["a"], *full)


def test_who_consumes_no_more_hands_its_appointment_on(desk: Desk, crew: Crew) -> None:
    leaver, idle = crew(1), crew(1)
    delay(desk, a=0.3)
    turn_until(keeps(desk, leaver), leaver)
    turn_until(lambda: idle.is_quiet, idle)
    leaver.fetcher.cancel(QUEUE)
    turn_until(keeps(desk, idle), leaver, idle)
    turn_until(lambda: idle.got == ["a"], idle)


def test_an_appointment_that_comes_too_late_is_handed_on(desk: Desk, crew: Crew) -> None:
    leaver, idle = crew(1), crew(1)
    turn_until(lambda: idle.is_quiet, idle)
    delay(desk, a=0.3)
    leaver.fetcher.tick()
    # The broker gives it the appointment, and the answer comes when it has gone.
    leaver.fetcher.cancel(QUEUE)
    turn_until(lambda: idle.got == ["a"], leaver, idle)


def test_a_new_connection_without_room_hands_on_what_the_lost_one_kept(desk: Desk, crew: Crew) -> None:
    first, idle = crew(1), crew(1)
    delay(desk, a=0.3)
    turn_until(keeps(desk, first), first)
    turn_until(lambda: idle.is_quiet, idle)
    first.close()
    second = crew(0, process=first.process)
    turn_until(lambda: idle.got == ["a"], second, idle)


def test_a_token_in_hand_is_passed_on_when_another_queue_takes_the_room(counter: Counter, crew: Crew) -> None:
    mails, pushes = Desk(counter.client, OTHER), Desk(counter.client, QUEUE)
    both, idle = crew(1, OTHER, QUEUE), crew(1)
    turn_until(lambda: both.is_quiet, both)
    turn_until(lambda: idle.is_quiet, idle)
    pushes.push("a")  # its token is on the way to the one that has waited longer
    mails.push("m")
    both.fetcher.wake(OTHER)
    turn_until(lambda: both.got == ["m"], both)
    turn_until(lambda: idle.got == ["a"], both, idle)


def test_who_is_about_to_block_does_not_take_its_own_tokens(counter: Counter, crew: Crew) -> None:
    mails, pushes = Desk(counter.client, OTHER), Desk(counter.client, QUEUE)
    solo, idle = crew(1, OTHER, QUEUE, holds=False), crew(1)
    delay(mails, m=0.2)
    delay(pushes, a=0.6)
    turn_until(lambda: keeps(mails, solo)() and keeps(pushes, solo)(), solo)
    turn_until(lambda: idle.is_quiet, idle)
    solo.on_message = solo.fetcher.step_back
    turn_until(lambda: solo.got == ["m"], solo)
    # Its loop does not turn any more.
    turn_until(lambda: idle.got == ["a"], idle)


def test_who_runs_a_suspect_looks_seldom_for_what_is_not_suspect(desk: Desk, crew: Crew) -> None:
    desk.push("a", tenant="t")
    desk.push("b", tenant="u")
    assert desk.take(2, "dead") == ["a", "b"]
    desk.lose("dead")
    assert desk.reap() == 2
    desk.client.zrem(desk.keys.leases, "reaper")
    worker = crew(4)
    turn_until(lambda: worker.got == ["a"], worker)
    before = worker.scripts.sent
    turn_for(1.0, worker)
    # After 20 ms, 40 ms, 80 ms, …
    assert worker.scripts.sent - before <= 12
    assert worker.got == ["a"]
    worker.process.ledger.finish(worker.tags[0])
    before = worker.scripts.sent
    turn_until(lambda: worker.got == ["a", "b"], worker)
    assert worker.scripts.sent - before <= 2  # one may have been on its way
