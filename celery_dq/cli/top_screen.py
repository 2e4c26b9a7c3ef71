"""The screen of ``celery dq top``, its state, and the answers to keys. Needs the extra 'tui'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import cell
from celery_dq.cli.quotas import read_rate
from celery_dq.errors import DQError
from celery_dq.inspector.backlogs import TenantBacklog
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.inspector.workers import LeaderSnapshot
from celery_dq.producer.buffered_producer import ProducerSnapshot

T = TypeVar("T")

#: The lines that are not table rows: title, three headings with an empty line before each, three below.
_FIXED = 10
#: Lines below which a terminal shows queues and tenants only.
_LOW = 16
_KEYS = "arrows choose  Tab queue or tenant  s sort  p pause or resume  t rate  q quit"
_WHY = {
    "eligible": "its turn",
    "throttled": "its rate",
    "at_concurrency": "its concurrency",
    "paused": "paused",
}


def screen(state: TopState, height: int) -> RenderableType:
    """Return the screen, of at most `height` lines."""
    if height < _LOW:
        return _low_screen(state, height)
    workers = _workers(state)
    rows = height - _FIXED
    shown_workers = min(len(workers), 3)
    rows -= shown_workers
    queues = min(len(state.reading.queues), max(rows // 2, rows - len(state.reading.tenants)))
    return Group(
        _title(state),
        Text(),
        _queue_table(state, queues),
        Text(),
        _tenant_table(state, rows - queues),
        Text(),
        *(Text(f" {each}", no_wrap=True, overflow="ellipsis") for each in workers[:shown_workers]),
        _leaders(state),
        _buffer(state),
        _last_line(state),
    )


def _low_screen(state: TopState, height: int) -> RenderableType:
    """Return the screen of a low terminal: queues, tenants if they fit, and the keys or a question."""
    rows = height - 4  # title, two headings, last line
    if rows < 0:
        return Group(_queue_table(state, 1), _last_line(state))
    if rows < 2:
        return Group(_title(state), _queue_table(state, rows + 1), _last_line(state))
    queues = min(len(state.reading.queues), max(rows // 2, rows - len(state.reading.tenants)))
    tables = (_queue_table(state, queues), _tenant_table(state, rows - queues))
    return Group(_title(state), *tables, _last_line(state))


def _title(state: TopState) -> Text:
    queues = state.reading.queues
    waiting, held = sum(each.waiting for each in queues), sum(each.held for each in queues)
    consumers = {each.name for queue in queues for each in queue.workers if each.is_alive}
    clock = f"{datetime.now():%H:%M:%S}"
    text = f"celery dq top  {clock}  queues {len(queues)}  waiting {waiting:,}  held {held:,}"
    return Text(f"{text}  workers {len(consumers)}  sort {state.sort}", style="bold", no_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True, header_style="bold reverse")
    for number, name in enumerate(columns):
        is_text = name in ("queue", "tenant", "waits for")
        table.add_column(
            Text(name),  # a name in it may look like markup
            justify="left" if is_text else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=None if number else 1,
        )
    return table


def _queue_table(state: TopState, rows: int) -> Table:
    table = _table(
        *("queue", "waiting", "delayed", "held", "dead", "oldest", "in/s", "claimed/s", "waits for")
    )
    queues = state.queues
    for queue in _around(queues, [each.name for each in queues].index(state.queue) if queues else 0, rows):
        is_chosen = queue.name == state.queue
        table.add_row(
            _marked(queue.name, is_chosen),
            *(f"{count:,}" for count in (queue.waiting, queue.delayed, queue.held, queue.dead)),
            _age(queue.oldest_waiting_s),
            _per_second(state.rate_of(queue, "pushed")),
            _per_second(state.rate_of(queue, "claimed")),
            _reason(queue),
            style="bold" if is_chosen else None,
        )
    return table


def _tenant_table(state: TopState, rows: int) -> Table:
    table = _table(f"tenant of {cell(state.queue)}", "waiting", "oldest", "waits for")
    table.columns[0].justify = "left"
    tenants = state.tenants
    names = [each.tenant for each in tenants]
    place = names.index(state.tenant) if state.tenant in names else 0
    for snapshot in _around(tenants, place, rows):
        is_chosen = snapshot.tenant == state.tenant
        table.add_row(
            _marked(snapshot.tenant or "(none)", is_chosen),
            f"{snapshot.waiting:,}",
            _age(snapshot.oldest_waiting_s),
            _WHY.get(str(snapshot.state), "a resource"),
            style="bold" if is_chosen else None,
        )
    return table


def _around(items: Sequence[T], place: int, rows: int) -> Sequence[T]:
    """Return as many items as there are rows, the one at `place` among them."""
    first = min(max(place - rows // 2, 0), max(len(items) - rows, 0))
    return items[first : first + rows]


def _marked(name: str, is_chosen: bool) -> Text:
    return Text(f"{'>' if is_chosen else ' '} {cell(name)}", no_wrap=True, overflow="ellipsis")


def _reason(queue: QueueSnapshot) -> str:
    """Return why the messages of a queue wait; "" when none waits."""
    if queue.is_paused:
        return "paused"
    if queue.waiting + queue.delayed + queue.discards == 0:
        return ""
    if not queue.living_consumers:
        return "a worker"
    counts = {name: getattr(queue, "resource_sets" if name == "resource_set" else name) for name in _WHY}
    most = max(counts, key=lambda name: counts[name])
    return _WHY[most].replace("its", "tenants'") if counts[most] else "ETA"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.1f}s"


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}"


def _workers(state: TopState) -> list[str]:
    """Return a line for each consumer of the chosen queue, those with most in-flight messages first."""
    chosen = [each for each in state.reading.queues if each.name == state.queue]
    found = [each for queue in chosen for each in queue.workers]
    found.sort(key=lambda each: -each.held)
    return [
        f"worker {cell(each.worker)}  held {each.held:,}  "
        + (f"lease {each.lease_s:.0f} s" if each.is_alive else "lost")
        for each in found
    ]


def _leaders(state: TopState) -> Text:
    found = [f"{cell(each.name)}: {cell(each.leader) or 'vacant'}" for each in state.reading.leaders]
    return Text(f" leaders  {'  '.join(found) or 'none'}", no_wrap=True, overflow="ellipsis")


def _buffer(state: TopState) -> Text:
    found = state.reading.buffer
    text = "not used by this app"
    if found is not None:
        text = f"pending {found.pending:,}  oldest {found.age_s:.1f} s  quarantined {len(found.quarantined)}"
    return Text(f" buffer   {text}", no_wrap=True, overflow="ellipsis")


def _last_line(state: TopState) -> Text:
    if state.prompt:
        return Text(f" {state.prompt} {state.typed}_", style="reverse", no_wrap=True)
    if state.notice:
        return Text(f" {cell(state.notice)}", style="reverse", no_wrap=True, overflow="ellipsis")
    return Text(f" {_KEYS}", style="dim", no_wrap=True, overflow="ellipsis")


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

    def refresh(self, wanted: str = "") -> None:
        """Read all queues in shared round trips, the tenants of the chosen queue, and the leaders.

        An error leaves the state as it was; one of the leaders, which another server may keep, leaves the
        former leaders.

        Args:
            wanted: Name of the queue to choose; default: the chosen one.
        """
        at = self.now()
        queues = tuple(each for each in self.dq.queues.snapshots() if isinstance(each, QueueSnapshot))
        queue, tenant = wanted or self.queue, self.tenant
        if all(each.name != queue for each in queues):
            fullest = max(queues, key=lambda each: each.waiting + each.delayed, default=None)
            queue = "" if fullest is None else fullest.name
        tenants: tuple[TenantBacklog, ...] = ()
        if queue:
            tenants = self.dq.queues[queue].backlogs(MOST_TENANTS).largest
        if queue != self.queue or all(each.tenant != tenant for each in tenants):
            tenant = None
        buffer = None if self.dq.buffer.options.folder is None else self.dq.buffer.inspect()
        self.before, self.reading = self.reading, Reading(at, queues, tenants, self.reading.leaders, buffer)
        self.queue, self.tenant = queue, tenant
        self.reading = replace(self.reading, leaders=tuple(self.dq.leaders()))

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
                self.refresh(names[min(max(names.index(self.queue) + step, 0), len(names) - 1)])
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
