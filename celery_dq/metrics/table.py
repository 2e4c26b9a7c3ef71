"""The table of all metrics. Dashboards and alerts depend on names and labels, so these do not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from celery_dq.inspector.queue_counters import COUNTERS

__all__ = ["METRICS", "OTHER_TENANTS", "Metric"]

MetricKind: TypeAlias = Literal["gauge", "counter", "histogram"]
#: The objects of a reading that a metric describes, see :class:`~celery_dq.metrics.state.BrokerState`.
Subject: TypeAlias = Literal["scrape", "queue", "worker", "tenant", "leader", "buffer", "spill"]

#: Value of the label ``tenant`` for the tenants of a queue that have no metrics of their own.
OTHER_TENANTS = "__other__"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Name in Prometheus. A histogram adds ``_bucket``, ``_count`` and ``_sum`` to it.
        kind: Type in Prometheus.
        meaning: One sentence, the help text in Prometheus.
        labels: Names of the labels.
        subject: The objects that have the metric.
        sources: Attribute of the subject; where it differs by the last label, one per value of the label. The
            value ``*`` stands for the keys of a dict. An attribute that is None has no sample.
    """

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...]
    subject: Subject
    sources: tuple[tuple[str, str], ...]


def _queue(name: str, meaning: str, source: str, kind: MetricKind = "gauge", label: str = "queue") -> Metric:
    return Metric(name, kind, meaning, (label,), "queue", (("", source),))


METRICS: tuple[Metric, ...] = (
    Metric(
        "celery_dq_up",
        "gauge",
        "Whether the broker has answered within dq_metrics_timeout (1) or not (0).",
        (),
        "scrape",
        (("", "up"),),
    ),
    Metric(
        "celery_dq_elections_up",
        "gauge",
        "Whether the server of the elections has answered within dq_metrics_timeout (1) or not (0).",
        (),
        "scrape",
        (("", "elections_up"),),
    ),
    Metric(
        "celery_dq_scrape_duration_seconds",
        "gauge",
        "Time that the reading of the broker's state took.",
        (),
        "scrape",
        (("", "duration_s"),),
    ),
    # Queues.
    Metric(
        "celery_dq_queue_messages",
        "gauge",
        "Messages of a queue by state; held ones are in flight in a worker.",
        ("queue", "state"),
        "queue",
        tuple((state, f"snapshot.{state}") for state in ("waiting", "delayed", "held", "discards", "dead")),
    ),
    _queue(
        "celery_dq_queue_runnable_messages",
        "Messages that a worker with free slots would get now; throttled tenants have none.",
        "backlogs.runnable",
    ),
    _queue(
        "celery_dq_queue_paused",
        "Whether the whole queue is paused (1) or not (0); workers get no message of a paused queue.",
        "snapshot.is_paused",
    ),
    _queue(
        "celery_dq_queue_oldest_waiting_age_seconds",
        "How long the oldest waiting message has waited; 0 when none waits. Delayed messages do not count.",
        "oldest_waiting_s",
    ),
    Metric(
        "celery_dq_queue_tenants",
        "gauge",
        "Tenants with a backlog by state.",
        ("queue", "state"),
        "queue",
        tuple(
            (state, f"snapshot.{state}") for state in ("eligible", "throttled", "at_concurrency", "paused")
        ),
    ),
    _queue(
        "celery_dq_queue_consumers",
        "Living worker processes that consume the queue.",
        "snapshot.living_consumers",
    ),
    *(
        _queue(f"celery_dq_{each.metric}_total", each.meaning, f"snapshot.counters.{each.name}", "counter")
        for each in COUNTERS
    ),
    Metric(
        "celery_dq_queue_wait_seconds",
        "histogram",
        "Waiting times of claimed messages: quiet tenants had one message in line, noisy ones had more.",
        ("queue", "class"),
        "queue",
        (("quiet", "snapshot.counters.waits_alone"), ("noisy", "snapshot.counters.waits_in_line")),
    ),
    Metric(
        "celery_dq_dedup_verdicts_total",
        "counter",
        "Verdicts on calls with a dedup key.",
        ("queue", "verdict"),
        "queue",
        (("*", "verdicts"),),
    ),
    # The worker that serves them.
    Metric(
        "celery_dq_queue_slots",
        "gauge",
        "Pool slots of this worker, for each queue that it consumes; all its queues share them.",
        ("queue",),
        "worker",
        (("", "slots"),),
    ),
    Metric(
        "celery_dq_claim_duration_seconds",
        "histogram",
        "Times from sending a claim to reading its answer in this worker, delays of its loop included.",
        ("queue",),
        "worker",
        (("", "claim_times"),),
    ),
    # The two names of celery-exporter that it does not export for other brokers than its own.
    _queue(
        "celery_queue_length",
        "Waiting messages, under the name that celery-exporter uses.",
        "snapshot.waiting",
        label="queue_name",
    ),
    _queue(
        "celery_active_consumer_count",
        "Living worker processes that consume the queue, under the name that celery-exporter uses.",
        "snapshot.living_consumers",
        label="queue_name",
    ),
    # Tenants, only with dq_metrics_tenants.
    Metric(
        "celery_dq_tenant_backlog_messages",
        "gauge",
        "Waiting messages of the tenants with the largest backlogs; the others are one, __other__.",
        ("queue", "tenant"),
        "tenant",
        (("", "waiting"),),
    ),
    Metric(
        "celery_dq_tenant_oldest_waiting_age_seconds",
        "gauge",
        "How long the oldest waiting message of a tenant has waited.",
        ("queue", "tenant"),
        "tenant",
        (("", "oldest_waiting_s"),),
    ),
    Metric(
        "celery_dq_tenant_throttled",
        "gauge",
        "Whether a tenant with a backlog waits for its rate (1) or not (0).",
        ("queue", "tenant"),
        "tenant",
        (("", "is_throttled"),),
    ),
    # Leaders.
    Metric(
        "celery_dq_leader_present",
        "gauge",
        "Whether a singleton queue or another election has a leader (1) or not (0).",
        ("leadership",),
        "leader",
        (("", "is_present"),),
    ),
    Metric(
        "celery_dq_leader_token",
        "gauge",
        "Fencing token of the leader, which grows with each term; absent without a leader.",
        ("leadership",),
        "leader",
        (("", "token_in_force"),),
    ),
    Metric(
        "celery_dq_leader_candidates",
        "gauge",
        "Living candidates, the leader included.",
        ("leadership",),
        "leader",
        (("", "candidates"),),
    ),
    # Calls of this process.
    Metric(
        "celery_dq_breaker_open",
        "gauge",
        "Whether the last unbuffered calls of this process had no answer, until one succeeds (1), or not.",
        (),
        "scrape",
        (("", "breaker_open"),),
    ),
    # The buffered producer.
    Metric(
        "celery_dq_buffer_messages",
        "gauge",
        "Buffered messages of this process that the broker has not confirmed.",
        (),
        "buffer",
        (("", "pending"),),
    ),
    Metric(
        "celery_dq_buffer_bytes",
        "gauge",
        "Memory of the buffered messages of this process.",
        (),
        "buffer",
        (("", "bytes"),),
    ),
    Metric(
        "celery_dq_buffer_oldest_age_seconds",
        "gauge",
        "Age of the oldest buffered message of this process; 0 without one.",
        (),
        "buffer",
        (("", "age_s"),),
    ),
    Metric(
        "celery_dq_buffer_degraded",
        "gauge",
        "Whether the last write of this process to the spill log failed (1) or not (0).",
        (),
        "buffer",
        (("", "degraded"),),
    ),
    Metric(
        "celery_dq_spill_bytes",
        "gauge",
        "Size of the spill log of all processes that share dq_buffer_folder.",
        (),
        "spill",
        (("", "bytes"),),
    ),
    Metric(
        "celery_dq_spill_oldest_age_seconds",
        "gauge",
        "Time since the last write to the oldest file of the spill log; 0 without files.",
        (),
        "spill",
        (("", "age_s"),),
    ),
    Metric(
        "celery_dq_spill_quarantined_files",
        "gauge",
        "Files with damaged or refused messages beside the spill log.",
        (),
        "spill",
        (("", "quarantined"),),
    ),
)
