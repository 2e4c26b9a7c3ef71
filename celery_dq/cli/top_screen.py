"""The screen of ``celery dq top``. Needs the extra 'tui'."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from celery_dq.cli.output import cell
from celery_dq.cli.top_state import TopState
from celery_dq.inspector.queues import QueueSnapshot

T = TypeVar("T")

#: The lines that are not table rows: title, three headings with an empty line before each, three below.
_FIXED = 10
#: Lines below which a terminal shows queues and tenants only.
_LOW = 16
_KEYS = "↑↓ choose  Tab queue or tenant  s sort  p pause or resume  t rate  q quit"
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
    consumers = {each.name for queue in queues for each in queue.consumers if each.is_alive}
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
    found = [each for queue in chosen for each in queue.consumers]
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
        return Text(f" {state.prompt} {state.typed}▏", style="reverse", no_wrap=True)
    if state.notice:
        return Text(f" {cell(state.notice)}", style="reverse", no_wrap=True, overflow="ellipsis")
    return Text(f" {_KEYS}", style="dim", no_wrap=True, overflow="ellipsis")
