"""The state of ``celery dq top``: the latest readings, the chosen queue or tenant, the answers to keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import cell
from celery_dq.cli.quotas import read_rate
from celery_dq.errors import DQError
from celery_dq.inspector.backlogs import TenantBacklog
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.inspector.workers import LeaderSnapshot
from celery_dq.producer.buffered_producer import ProducerSnapshot

#: Tenants of the chosen queue that are read, the largest backlogs.
MOST_TENANTS = 50

Sort = Literal["waiting", "oldest", "claimed/s"]
SORTS: tuple[Sort, ...] = ("waiting", "oldest", "claimed/s")


@dataclass(frozen=True)
class Reading:
    """The state of the broker at one time.

    Attributes:
        at: Monotonic time of the reading, in seconds.
        queues: All queues.
        tenants: The tenants of the chosen queue with the largest backlogs.
        leaders: The leaders of singleton queues and of other elections.
        buffer: The buffer of this host's processes; None without one.
    """

    at: float
    queues: tuple[QueueSnapshot, ...] = ()
    tenants: tuple[TenantBacklog, ...] = ()
    leaders: tuple[LeaderSnapshot, ...] = ()
    buffer: ProducerSnapshot | None = None


@dataclass
class TopState:
    """All that the screen shows. The keys change it, and the queues and tenants.

    Attributes:
        dq: ``app.dq``.
        now: Returns the monotonic time.
        sort: Column by which queues and tenants are sorted, the largest first.
        queue: Name of the chosen queue; "" without any.
        tenant: Name of the chosen tenant; None when the queue itself is chosen.
        reading: The latest reading.
        before: The reading before it, for rates.
        notice: The result of the last change, or an error.
        prompt: The question under way; "" without one.
        typed: The text typed so far as the answer to it.
        is_over: Whether the user has left.
    """

    dq: DQ
    now: Callable[[], float]
    sort: Sort = "waiting"
    queue: str = ""
    tenant: str | None = None
    reading: Reading = field(default_factory=lambda: Reading(0.0))
    before: Reading = field(default_factory=lambda: Reading(0.0))
    notice: str = ""
    prompt: str = ""
    typed: str = ""
    is_over: bool = False
    _on_answer: Callable[[str], None] | None = None

    def refresh(self) -> None:
        """Read the broker: all queues in shared round trips, and the tenants of the chosen queue."""
        at = self.now()
        queues = tuple(each for each in self.dq.queues.snapshots() if isinstance(each, QueueSnapshot))
        names = [each.name for each in queues]
        self.before, self.reading = self.reading, Reading(at, queues)
        if self.queue not in names:
            self.queue, self.tenant = (self.queues[0].name if queues else ""), None
        tenants: tuple[TenantBacklog, ...] = ()
        if self.queue:
            tenants = self.dq.queues[self.queue].backlogs(MOST_TENANTS).largest
        buffer = None if self.dq.buffer.options.folder is None else self.dq.buffer.inspect()
        self.reading = Reading(at, queues, tenants, tuple(self.dq.leaders()), buffer)
        if self.tenant is not None and all(each.tenant != self.tenant for each in tenants):
            self.tenant = None

    def rate_of(self, queue: QueueSnapshot, counter: Literal["pushed", "claimed"]) -> float | None:
        """Return the messages per second between the last two readings; None before the second one."""
        earlier = next((each for each in self.before.queues if each.name == queue.name), None)
        seconds = self.reading.at - self.before.at
        if earlier is None or seconds <= 0:
            return None
        more: int = getattr(queue.counters, counter) - getattr(earlier.counters, counter)
        return max(more, 0) / seconds

    @property
    def queues(self) -> list[QueueSnapshot]:
        """The queues in the chosen order."""
        keys: dict[Sort, Callable[[QueueSnapshot], float]] = {
            "waiting": lambda each: each.waiting + each.delayed,
            "oldest": lambda each: each.oldest_waiting_s or 0.0,
            "claimed/s": lambda each: self.rate_of(each, "claimed") or 0.0,
        }
        return sorted(self.reading.queues, key=lambda each: (-keys[self.sort](each), each.name))

    @property
    def tenants(self) -> list[TenantBacklog]:
        """The tenants of the chosen queue in the chosen order; their rates are not counted."""
        if self.sort == "oldest":
            return sorted(self.reading.tenants, key=lambda each: -(each.oldest_waiting_s or 0.0))
        return list(self.reading.tenants)

    # Keys.

    def press(self, key: str) -> None:
        """Answer a key: a character, or ``up``, ``down``, ``tab``, ``enter``, ``escape``, ``backspace``."""
        if self.prompt:
            self._type(key)
            return
        self.notice = ""
        if key in ("q", "escape"):
            self.is_over = True
        elif key in ("up", "k", "down", "j"):
            self._move(1 if key in ("down", "j") else -1)
        elif key == "tab":
            self.tenant = self.tenants[0].tenant if self.tenant is None and self.tenants else None
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "p" and self.queue:
            self._ask_to_pause()
        elif key == "t" and self.queue:
            self._ask_to_throttle()

    def _move(self, step: int) -> None:
        if self.tenant is None:
            names = [each.name for each in self.queues]
            if names:
                self.queue = names[min(max(names.index(self.queue) + step, 0), len(names) - 1)]
                self.refresh()
        else:
            tenants = [each.tenant for each in self.tenants]
            self.tenant = tenants[min(max(tenants.index(self.tenant) + step, 0), len(tenants) - 1)]

    @property
    def chosen(self) -> str:
        """The chosen queue or tenant in words."""
        whose = f"queue {cell(self.queue)!r}"
        return whose if self.tenant is None else f"tenant {cell(self.tenant)!r} of {whose}"

    @property
    def _is_paused(self) -> bool:
        if self.tenant is None:
            return any(each.name == self.queue and each.is_paused for each in self.reading.queues)
        return self.dq.queues[self.queue].tenant(self.tenant).paused_since is not None

    def _ask_to_pause(self) -> None:
        queue, tenant = self.dq.queues[self.queue], self.tenant
        subject, is_paused = self.chosen, self._is_paused

        def change() -> str:
            if is_paused:
                queue.resume(tenant)
                return f"Resumed: {subject}."
            queue.pause(tenant)
            return f"Paused until it is resumed: {subject}."

        question = f"Resume {subject}?" if is_paused else f"Pause {subject} until it is resumed?"
        self._confirm(question, change)

    def _ask_to_throttle(self) -> None:
        queue, tenant, subject = self.queue, self.tenant, self.chosen
        if tenant is None:
            self.notice = "Choose a tenant (Tab) to set its rate."
            return
        quotas = self.dq.quotas

        def confirm(rate: str) -> None:
            if rate:
                self._confirm(
                    f"Set rate {cell(rate)} of {subject}?",
                    lambda: f"Quota of {subject}: {quotas.set(queue, tenant, rate=read_rate(rate))}.",
                )

        self._ask(f"New rate of {subject}, such as 5/s or unlimited:", confirm)

    def _confirm(self, question: str, change: Callable[[], str]) -> None:
        def answered(text: str) -> None:
            if text.strip().lower() not in ("y", "yes"):
                self.notice = "Nothing was changed."
                return
            self.notice = change()
            self.refresh()

        self._ask(f"{question} [y/N]", answered)

    def _ask(self, prompt: str, on_answer: Callable[[str], None]) -> None:
        self.prompt, self.typed, self._on_answer = prompt, "", on_answer

    def _type(self, key: str) -> None:
        if key == "backspace":
            self.typed = self.typed[:-1]
        elif key == "escape":
            self.prompt, self.notice = "", "Nothing was changed."
        elif key == "enter":
            on_answer, typed = self._on_answer, self.typed
            self.prompt = ""
            try:
                if on_answer is not None:
                    on_answer(typed.strip())
            except DQError as exc:
                self.notice = str(exc)
        elif len(key) == 1 and key.isprintable():
            self.typed += key
