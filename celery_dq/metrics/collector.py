"""The collector of ``prometheus_client``: makes samples of the broker's state by the table of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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

from celery_dq.app.api.api import dq_of
from celery_dq.inspector.queue_counters import WaitingTimes
from celery_dq.metrics.state import BrokerState, SharedState, StateReader
from celery_dq.metrics.table import METRICS, Metric
from celery_dq.transport.redis.consumer_identity import ClaimTimes

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
