"""The collector of ``prometheus_client``: makes samples of the broker's state by the table of metrics.

It reads queues, tenants, leaders, and the buffer of this process. Concurrent requests share one reading, with
a deadline.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric as Family,
)
from prometheus_client.registry import Collector

from celery_dq.app.api.api import DQ, QueuesApi, dq_of
from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.buffer import SpillFiles, spill_files
from celery_dq.app.api.dedup import DedupApi
from celery_dq.app.api.leaders import Leaders
from celery_dq.app.api.outbox import OutboxSnapshot
from celery_dq.app.timeouts import connection_with_timeout
from celery_dq.clock import Clock, SystemClock
from celery_dq.context import AppContext
from celery_dq.inspector.backlogs import QueueBacklogs, TenantBacklog
from celery_dq.inspector.queue_counters import WaitingTimes
from celery_dq.inspector.queues import QueueSnapshot, ZooKeeperQueueSnapshot
from celery_dq.inspector.workers import LeaderSnapshot
from celery_dq.metrics.table import METRICS, OTHER_TENANTS, Metric
from celery_dq.outage import Outage
from celery_dq.producer.buffered_producer import ProducerSnapshot
from celery_dq.shared_reading import SharedReading
from celery_dq.shown import shown_logger
from celery_dq.transport.redis.consumer_identity import ClaimTimes, ConsumerIdentity

_FAMILIES: dict[str, type[Any]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class DQCollector(Collector):
    """The metrics of an app, for a registry of ``prometheus_client``.

    The constructor opens no connection. A scrape answers within ``dq_metrics_timeout``, and never raises.
    Each process needs its own collector.

    Args:
        app: A Celery app.

    Raises:
        ConfigurationError: A ``dq_*`` setting cannot be used.
    """

    def __init__(self, app: Any) -> None:
        dq = dq_of(app)
        options = dq.options.metrics
        timeout_s = options.timeout_us / 1e6
        self._state = SharedState(StateReader(app, dq, timeout_s, options.tenants), timeout_s)

    def describe(self) -> Iterable[Family]:
        """Return the families without samples, so that a registry need not ask the broker for them."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield the families of one reading."""
        state = self._state.get()
        for metric in METRICS:
            family = _family(metric)
            for subject, labels in _subjects(metric, state):
                _add(family, metric, subject, labels)
            if family.samples:
                yield family


def make_registry(app: Any) -> CollectorRegistry:
    """Make a registry with the metrics of an app and no others."""
    registry = CollectorRegistry()
    registry.register(DQCollector(app))
    return registry


def _family(metric: Metric) -> Any:
    return _FAMILIES[metric.kind](metric.name, metric.meaning, labels=metric.labels)


def _subjects(metric: Metric, state: BrokerState) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the objects that have the metric, with the values of their labels."""
    if metric.subject == "scrape":
        yield state, ()
    elif metric.subject == "queue":
        yield from ((queue, (queue.snapshot.name,)) for queue in state.queues)
    elif metric.subject == "worker":
        yield from ((each, (each.queue,)) for each in state.worker)
    elif metric.subject == "tenant":
        yield from ((each, (each.queue, each.tenant)) for each in state.tenants)
    elif metric.subject == "outbox":
        yield from ((each, (each.database,)) for each in state.outboxes)
    elif metric.subject == "leader":
        yield from ((leader, (leader.name,)) for leader in state.leaders)
    else:
        found = state.buffer if metric.subject == "buffer" else state.spill
        yield from () if found is None else ((found, ()),)


def _add(family: Any, metric: Metric, subject: Any, labels: tuple[str, ...]) -> None:
    for label, source in metric.sources:
        try:
            value = attrgetter(source)(subject)
        except AttributeError:
            continue  # a broker on ZooKeeper does not know it
        if value is None:
            continue
        if isinstance(value, tuple):
            value = len(value)
        values = (*labels, label) if label else labels
        if isinstance(value, (WaitingTimes, ClaimTimes)):
            family.add_metric(values, _buckets(value), value.sum_s)
        elif label == "*":
            for key, count in value.items():
                family.add_metric((*labels, key), count)
        else:
            family.add_metric(values, value)


def _buckets(times: WaitingTimes | ClaimTimes) -> list[tuple[str, float]]:
    bounds = ("+Inf" if math.isinf(bound) else str(bound) for bound in times.bounds_s)
    return list(zip(bounds, accumulate(times.buckets), strict=True))


logger = shown_logger(__name__)


@dataclass(frozen=True)
class QueueReading:
    """One queue. The attributes that a broker on ZooKeeper does not know are None.

    Attributes:
        snapshot: Its counts.
        backlogs: Its runnable messages and largest backlogs.
        verdicts: Numbers of dedup verdicts.
    """

    snapshot: QueueSnapshot | ZooKeeperQueueSnapshot
    backlogs: QueueBacklogs | None = None
    verdicts: dict[str, int] = field(default_factory=dict)

    @property
    def oldest_waiting_s(self) -> float | None:
        """How long the oldest waiting message has waited, in seconds; 0 without one."""
        return (self.snapshot.oldest_waiting_s or 0.0) if isinstance(self.snapshot, QueueSnapshot) else None


@dataclass(frozen=True)
class WorkerReading:
    """One queue that the worker in this process consumes.

    Attributes:
        queue: Name of the queue.
        slots: Number of tasks that the pool may run at a time; None when the pool has no such number.
        claim_times: How long its claims of this queue took.
    """

    queue: str
    slots: int | None
    claim_times: ClaimTimes


@dataclass
class BrokerState:
    """A reading. It is filled step by step, and may be used at any time.

    Attributes:
        up: Whether the queues were read; None when the app's broker is not one of celery-dq.
        elections_up: Whether the leaders were read; None without elections.
        duration_s: Seconds that the reading took; None until its end.
        queues: The queues, once all of them were read.
        tenants: The tenants with the largest backlogs, and per queue all the other ones.
        leaders: The leaderships.
        worker: The queues of the worker in this process.
        outboxes: The databases of ``dq_outbox``.
        breaker_open: Whether the last unbuffered calls of this process had no answer, until one succeeds.
        buffer: The buffer of this process; None when no call can be buffered.
        spill: The files of the buffer; None without a folder.
    """

    up: bool | None = None
    elections_up: bool | None = None
    duration_s: float | None = None
    queues: tuple[QueueReading, ...] = ()
    tenants: tuple[TenantBacklog, ...] = ()
    leaders: tuple[LeaderSnapshot, ...] = ()
    worker: tuple[WorkerReading, ...] = ()
    outboxes: tuple[OutboxSnapshot, ...] = ()
    breaker_open: bool = False
    buffer: ProducerSnapshot | None = None
    spill: SpillFiles | None = None


class StateReader:
    """Reads the state over a connection of its own. For one thread at a time.

    Args:
        app: A Celery app.
        dq: Its API.
        timeout_s: Seconds that each step on the connection may take.
        tenants: Number of tenants with metrics of their own.
    """

    def __init__(self, app: Any, dq: DQ, timeout_s: float, tenants: int) -> None:
        self._app = app
        self._dq = dq
        self._timeout_s = timeout_s
        self._tenants = tenants
        self._connection: Any = None
        self._broker: BrokerAccess | None = None
        self._serves_tenants = dq.serves_queues()
        self._is_ours = self._serves_tenants or BrokerAccess(app, dq.context).is_zookeeper()

    def begin(self) -> BrokerState:
        """Return a reading of this process, without the broker's part."""
        return BrokerState(
            up=False if self._is_ours else None,
            elections_up=False if self._serves_tenants or self._dq.options.election else None,
            worker=tuple(_of_worker(self._dq.context)) if self._serves_tenants else (),
            breaker_open=self._dq.circuit() != "closed",
        )

    def read(self, state: BrokerState) -> None:
        """Fill a reading. Errors of the broker are raised, and end the connection."""
        self._read_buffer(state)
        if self._broker is None:
            self._connection = connection_with_timeout(self._app, self._timeout_s)
            self._broker = BrokerAccess(self._app, self._dq.context, self._connection)
        broker = self._broker
        try:
            if self._is_ours:
                self._read_queues(state, broker)
            if state.elections_up is not None:
                state.leaders = tuple(Leaders(broker)())
                state.elections_up = True
        except BaseException:
            self.close()
            raise
        # Last, because the databases are other servers.
        state.outboxes = tuple(self._dq.outbox.inspect())

    def close(self) -> None:
        """Close the connection without waiting for the broker."""
        connection, self._connection, self._broker = self._connection, None, None
        if connection is not None:
            connection.collect(socket_timeout=1)

    def _read_buffer(self, state: BrokerState) -> None:
        buffer = self._dq.buffer
        if buffer.options.folder is None:
            return
        state.buffer = buffer.inspect()
        if buffer.folder is not None:
            state.spill = spill_files(buffer.folder)

    def _read_queues(self, state: BrokerState, broker: BrokerAccess) -> None:
        queues, names = QueuesApi(broker), broker.queue_names()
        snapshots = list(queues.snapshots(*names)) if names else []
        if self._serves_tenants:
            verdicts = DedupApi(broker).verdicts(*names)
            backlogs = [self._read_backlogs(queues, each) for each in snapshots]
            found = [QueueReading(*each) for each in zip(snapshots, backlogs, verdicts, strict=True)]
        else:
            found = [QueueReading(each) for each in snapshots]
        if self._tenants:
            state.tenants = tuple(_tenants(found, self._tenants))
        state.queues = tuple(found)
        state.up = True

    def _read_backlogs(
        self, queues: QueuesApi, snapshot: QueueSnapshot | ZooKeeperQueueSnapshot
    ) -> QueueBacklogs:
        # Most of many queues are empty, and cost the least.
        if snapshot.waiting or snapshot.delayed or getattr(snapshot, "discards", 0):
            # One more, because a tenant may have the name that stands for all others.
            return queues[snapshot.name].backlogs(self._tenants + 1 if self._tenants else 0)
        return QueueBacklogs(0, ())


def _of_worker(context: AppContext) -> Iterator[WorkerReading]:
    """Yield the queues that the worker in this process consumes."""
    if context.capacity is None:
        return
    slots = context.capacity.slots()
    identities: Iterable[ConsumerIdentity] = (context.process or {}).values()
    for identity in tuple(identities):
        # Other threads change these dicts.
        for name in {queue.name for queue in tuple(identity.threads.queues.values())}:
            yield WorkerReading(name, slots, identity.claim_times[name])


def _tenants(queues: list[QueueReading], most: int) -> Iterator[TenantBacklog]:
    """Yield the `most` largest backlogs of all queues, and per queue the sum of the others."""
    backlogs: list[TenantBacklog] = []
    for queue in queues:
        if queue.backlogs is not None:
            # Two series may not have equal labels, so a tenant with this name counts among the others.
            backlogs += [each for each in queue.backlogs.largest if each.tenant != OTHER_TENANTS]
    backlogs.sort(key=lambda each: each.waiting, reverse=True)
    others = {each.snapshot.name: each.snapshot.waiting for each in queues}
    for each in backlogs[:most]:
        others[each.queue] -= each.waiting
        yield each
    for name, waiting in others.items():
        yield TenantBacklog(name, OTHER_TENANTS, None, max(waiting, 0), None)


class SharedState:
    """Returns the state of the broker, not older than a second, within a deadline. Thread-safe.

    A thread reads; there is never more than one. A caller waits for it until the deadline of the reading, and
    then gets what has been read by then. Every further caller gets that too, until the reading has ended.

    Args:
        reader: Reads the state.
        timeout_s: The deadline of a reading, in seconds.
        clock: Measures the age of readings.
    """

    def __init__(self, reader: StateReader, timeout_s: float, clock: Clock | None = None) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._outage = Outage(logger, "metrics_outage", self._clock)
        #: The latest reading, and the state that its thread fills.
        self._latest: tuple[SharedReading[None], BrokerState] | None = None

    def get(self) -> BrokerState:
        """Return a reading, which is incomplete if the servers do not answer in time. Never raises."""
        with self._lock:
            now = self._clock.monotonic()
            if self._latest is None or not self._latest[0].is_fresh(now):
                self._latest = SharedReading(now), self._reader.begin()
                self._latest[0].start("dq-metrics-reading", partial(self._read, self._latest[1], now))
            reading, state = self._latest
        reading.ends_within(reading.began + self._timeout_s - now)
        return state

    def _read(self, state: BrokerState, began: float) -> None:
        try:
            self._reader.read(state)
        except Exception as exc:
            self._outage.began(
                "The state of the broker cannot be read for the metrics: %s. The metric celery_dq_up or "
                "celery_dq_elections_up is 0 until it can; 'celery dq doctor' checks all servers.",
                (str(exc) or type(exc).__name__).rstrip("."),
            )
        else:
            took_s = self._clock.monotonic() - began
            if took_s <= self._timeout_s:
                self._outage.over("The state of the broker can be read for the metrics again.")
            else:
                self._outage.began(
                    "Reading the state of the broker for the metrics took %.1f s, longer than "
                    "dq_metrics_timeout (%.1f s), so scrapes lack queues or leaders. Set a longer time.",
                    took_s,
                    self._timeout_s,
                )
        finally:
            state.duration_s = self._clock.monotonic() - began
