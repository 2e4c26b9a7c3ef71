"""Careers that record their calls, and the runners that run them."""

from __future__ import annotations

import queue
import threading
import time

from celery_dq.leadership.career import Career
from celery_dq.leadership.runner import Runner
from celery_dq.testing.waiting import wait_until
from tests.leadership.election_harness import SESSION_S, ElectionHarness

Line = tuple[float, str, object]


class Diary(Career[str]):
    """A record of calls."""

    def __init__(self, lines: list[Line], name: str) -> None:
        self.lines, self.name, self.token = lines, name, 0
        self.holding = threading.Event()
        self.holding.set()

    def note(self, what: str, more: object = "") -> None:
        self.lines.append((time.monotonic(), f"{self.name} {what}", more))

    def inaugurate(self, token: int) -> None:
        self.token = token
        self.note("inaugurates", token)

    def execute(self, message: str) -> bool:
        self.note("executes", message)
        self.holding.wait(30)
        self.note("has executed", message)
        return message != "stop"

    def hand_over(self) -> None:
        self.note("hands over", self.token)


class RecordedCareers:
    """Runners that share an inbox and a record of calls."""

    def __init__(self, elections: ElectionHarness) -> None:
        self.elections = elections
        self.lines: list[Line] = []
        self.inbox: queue.Queue[str] = queue.Queue()
        self.runners: list[Runner[str]] = []

    def hire(self, name: str, session_s: float = SESSION_S, **options: object) -> tuple[Diary, Runner[str]]:
        diary = Diary(self.lines, name)
        options.setdefault("source", lambda timeout_s: self.inbox.get(timeout=timeout_s))
        runner: Runner[str] = Runner(
            diary,
            self.elections.candidate(session_s),
            **options,  # type: ignore[arg-type]
        ).open()
        self.runners.append(runner)
        return diary, runner

    def texts(self) -> list[str]:
        return [f"{what} {more}" for _, what, more in self.lines]

    def when(self, what: str) -> float:
        return wait_until(
            lambda: next((at for at, text, more in self.lines if what in (text, f"{text} {more}")), 0.0),
            what=what,
        )
