"""The load: numbered messages of many tenants, published as fast as the workers finish them."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

_NAMESPACE = uuid.UUID("6f9a6c8e-50a3-4a0e-9a53-0d6b7f1f3a11")


@dataclass(frozen=True)
class Message:
    """One message as it was published."""

    id: str
    number: int
    tenant: str
    seconds: float


@dataclass
class Published:
    #: Ids of the confirmed messages.
    confirmed: dict[str, Message] = field(default_factory=dict)
    #: Ids whose connection broke before an answer, so that their outcome is unknown.
    uncertain: dict[str, Message] = field(default_factory=dict)
    #: Time of the confirmation by message, in seconds on CLOCK_MONOTONIC.
    confirmed_at: dict[str, float] = field(default_factory=dict)
    #: Whether a confirmation means that a replica has the message too.
    replicated: bool = False


def draw_messages(seed: int, amount: int, tenants: int, work_ms: float) -> list[Message]:
    """Return the messages of a seed. One in fifty works twenty times as long, so that kills hit it."""
    draw = random.Random(f"load-{seed}")
    messages = []
    for number in range(amount):
        seconds = draw.uniform(0, 2 * work_ms) / 1000 * (20 if draw.random() < 0.02 else 1)
        tenant = f"tenant-{draw.randrange(tenants)}"
        task_id = str(uuid.uuid5(_NAMESPACE, f"{seed}-{time.time_ns()}-{number}"))
        messages.append(Message(task_id, number, tenant, round(seconds, 5)))
    return messages


class LoadGenerator:
    """Publishes in a thread, with at most `ahead` unfinished messages.

    Messages that are `buffered` go through the producer's buffer, which confirms them later.
    """

    def __init__(
        self,
        app: Celery,
        messages: list[Message],
        *,
        finished: Callable[[], int],
        await_broker: Callable[[], None],
        ahead: int,
        replicated: bool = False,
        options: Callable[[Message], dict[str, Any]] = lambda message: {},
        buffered: Callable[[Message], bool] = lambda message: False,
    ) -> None:
        self.published = Published(replicated=replicated)
        self._app = app
        self._messages = messages
        self._finished = finished
        self._await_broker = await_broker
        self._ahead = ahead
        self._options = options
        self._buffered = buffered
        self._in_buffer: dict[str, Message] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-load", daemon=True)

    def start(self) -> LoadGenerator:
        self._thread.start()
        return self

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(30)

    def _confirm(self, ids: Sequence[str]) -> None:
        for each in ids:
            self.published.confirmed_at[each] = time.monotonic()
            self.published.confirmed[each] = self._in_buffer.pop(each)

    def _run(self) -> None:
        app: Any = self._app
        if any(map(self._buffered, self._messages)):
            app.dq.buffer.on_delivered(self._confirm)
            self._publish_all()
            while app.dq.buffer.flush(1) and not self._stop.is_set():
                pass
            app.dq.buffer.close()
        else:
            self._publish_all()

    def _publish_all(self) -> None:
        work = self._app.tasks["work"]
        for message in self._messages:
            while message.number - self._finished() > self._ahead:
                if self._stop.wait(0.01):
                    return
            if self._stop.is_set():
                return
            options = self._options(message)
            if self._buffered(message):
                self._in_buffer[message.id] = message
                options["buffered"] = True
            try:
                # No retries, because a message that was published twice may rightly run twice.
                work.apply_async(
                    (message.number, message.tenant, message.seconds),
                    task_id=message.id,
                    retry=False,
                    **options,
                )
            except Exception:  # the broker is gone: whatever the reason, the outcome is unknown
                self.published.uncertain[message.id] = message
                self._await_broker()
            else:
                if options.get("buffered"):
                    continue
                self.published.confirmed_at[message.id] = time.monotonic()
                self.published.confirmed[message.id] = message
