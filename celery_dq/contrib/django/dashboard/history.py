"""The history of the queues that users look at: samples of them, and plots.

The server draws the plots as SVG, so they need no script.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from celery_dq.app.api.api import DQ
from celery_dq.app.api.history import STEP_MS, HistoryPoint
from celery_dq.contrib.django.dashboard.broker_reads import failure_of
from celery_dq.daemon_threads import start_daemon
from celery_dq.inspector.queue_counters import WAIT_BOUNDS_S
from celery_dq.shown import shown_logger

#: Size of a plot in units of its SVG, and the margins of its axes.
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 400, 150, 50, 18, 20, 8
SPAN = timedelta(hours=1)
#: Points that are further apart are not connected.
GAP = timedelta(minutes=3)


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        style: Name of its colour.
        label: Its name.
        path: The commands of its SVG path.
        latest: Its present value; None if the last sample is too old.
    """

    style: str
    label: str
    path: str
    latest: float | None


@dataclass(frozen=True)
class Plot:
    """A plot with its axes.

    Attributes:
        title: The title.
        unit: Name of the template filter for its values: ``rate``, ``wait`` or ``count``.
        lines: The lines.
        levels: Labels of the vertical axis, each with its height in units of the SVG.
        times: Labels of the horizontal axis, each with its place.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    levels: Sequence[tuple[float, float]]
    times: Sequence[tuple[str, float]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT


Value = Callable[[HistoryPoint], "float | None"]
RATES: tuple[tuple[str, str, Value], ...] = (
    ("a", "published", lambda point: point.published_per_s),
    ("b", "started", lambda point: point.claimed_per_s),
    ("c", "finished", lambda point: point.finished_per_s),
)
WAITS: tuple[tuple[str, str, Value], ...] = (
    ("a", "50 %", lambda point: point.p50_s),
    ("b", "95 %", lambda point: point.p95_s),
    ("c", "99 %", lambda point: point.p99_s),
    ("d", "oldest that waits", lambda point: point.oldest_s),
)
COUNTS: tuple[tuple[str, str, Value], ...] = (("a", "waiting", lambda point: point.waiting),)


def plots(points: Sequence[HistoryPoint], now: datetime | None = None) -> list[Plot]:
    """Return the plots of an hour: rates, waiting times, and waiting messages. Two points make a line.

    Args:
        points: The history, the earliest point first.
        now: The right end of the plots, unless the clock of Redis is ahead; default: the present time.
    """
    now = now or datetime.now(timezone.utc)
    known = [point for point in points if point.at is not None and point.at >= now - SPAN]
    if len(known) < 2:
        return []
    end = max(now, known[-1].at or now)
    return [
        _plot("Messages per second", "rate", RATES, known, end, _linear(RATES, known)),
        _plot("Waiting times", "wait", WAITS, known, end, (_waiting_place, WAIT_LEVELS)),
        _plot("Waiting messages", "count", COUNTS, known, end, _linear(COUNTS, known)),
    ]


Scale = tuple[Callable[[float], float], Sequence[float]]


def _plot(
    title: str,
    unit: str,
    series: Sequence[tuple[str, str, Value]],
    points: Sequence[HistoryPoint],
    end: datetime,
    scale: Scale,
) -> Plot:
    place, levels = scale
    last = points[-1]
    # While nothing was sampled, no value is the present one.
    is_present = last.at is not None and end - last.at <= GAP
    lines = [
        Line(style, label, _path(points, value, end, place), value(last) if is_present else None)
        for style, label, value in series
    ]
    quarters = [end - SPAN * part / 4 for part in (4, 3, 2, 1, 0)]
    return Plot(
        title,
        unit,
        lines,
        [(level, _height(place(level))) for level in levels],
        [(f"{each:%H:%M}", _x(each, end)) for each in quarters],
    )


def _linear(series: Sequence[tuple[str, str, Value]], points: Sequence[HistoryPoint]) -> Scale:
    """Return a scale from 0 to a round number above all values."""
    highest = max((value(point) or 0 for point in points for _, _, value in series), default=0) or 1
    step = 10 ** math.floor(math.log10(highest))
    top = next(step * each for each in (1, 2, 5, 10) if step * each >= highest)
    return (lambda value: value / top), (0, top / 2, top)


#: Waiting times are known by their buckets, so the axis has one step for each of them.
WAIT_LEVELS = (0.001, 0.1, 2.0, 60.0, 3600.0)
_STEPS = len(WAIT_BOUNDS_S)


def _waiting_place(value: float) -> float:
    """Return the place of a waiting time among the bounds of the buckets, 0 to 1."""
    below = 0.0
    for number, bound in enumerate(WAIT_BOUNDS_S):
        if value <= bound:
            part = 1.0 if math.isinf(bound) else (value - below) / (bound - below)
            return (number + part) / _STEPS
        below = bound
    return 1.0


def _path(
    points: Sequence[HistoryPoint], value: Value, end: datetime, place: Callable[[float], float]
) -> str:
    commands: list[str] = []
    before: datetime | None = None
    for point in points:
        number = value(point)
        assert point.at is not None
        if number is None:
            before = None
            continue
        letter = "L" if before is not None and point.at - before <= GAP else "M"
        commands.append(f"{letter}{_x(point.at, end):.1f} {_height(place(number)):.1f}")
        before = point.at
    return " ".join(commands)


def _x(at: datetime, end: datetime) -> float:
    return round(WIDTH - RIGHT - (WIDTH - LEFT - RIGHT) * ((end - at) / SPAN), 1)


def _height(part: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(max(part, 0.0), 1.0), 1)


logger = shown_logger(__name__)

#: Seconds after the last look at a queue for which it is sampled.
WATCHED_S = 3600.0
#: Queues that are sampled, at most: those that were looked at last.
MOST_QUEUES = 50


class Sampler:
    """Samples the counters of queues in a thread, which runs while there are any. Thread-safe.

    Each process has one. Several processes share the samples in Redis, and one of them writes each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Name of a queue -> the time until which it is sampled.
        self._until: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Sample no queue any more, and wait for the sample under way."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, dq: DQ, queue: str) -> None:
        """Sample a queue from now on, and for an hour after the last call. Does not wait."""
        with self._lock:
            self._until.pop(queue, None)
            self._until[queue] = time.monotonic() + WATCHED_S
            while len(self._until) > MOST_QUEUES:
                del self._until[next(iter(self._until))]
            if self._thread is None:
                self._thread = start_daemon(self._run, "dq-dashboard-history", dq)

    def _run(self, dq: DQ) -> None:
        while queues := self._watched():
            for queue in queues:
                self._sample(dq, queue)
            if self._stopped.wait(STEP_MS / 1000):
                return

    def _watched(self) -> list[str]:
        """Return the queues to sample; without any, the thread ends."""
        with self._lock:
            now = time.monotonic()
            self._until = {queue: until for queue, until in self._until.items() if until > now}
            if not self._until:
                self._thread = None
            return [*self._until]

    @staticmethod
    def _sample(dq: DQ, queue: str) -> None:
        try:
            dq.history.sample(queue)
        except Exception as exc:
            # The pages show a failure of the broker; here it means a gap.
            if failure_of(exc) is None:
                logger.exception(
                    "Queue %s could not be sampled.", queue, extra={"event": "history_not_sampled"}
                )
