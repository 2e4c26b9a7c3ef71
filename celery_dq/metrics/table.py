"""The table of all metrics. Dashboards and alerts depend on names and labels, so these do not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from celery_dq.inspector.queue_counters import COUNTERS

MetricKind: TypeAlias = Literal["gauge", "counter", "histogram"]
#: The objects of a reading that a metric describes, see :class:`~celery_dq.metrics.collector.BrokerState`.
Subject: TypeAlias = Literal["scrape", "queue", "worker", "tenant", "leader", "outbox", "buffer", "spill"]

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


#: The labels of the metrics of an object; those of others have none.
_LABELS: dict[str, tuple[str, ...]] = {"tenant": ("queue", "tenant"), "leader": ("leadership",)}
_LABELS["outbox"] = ("database",)
_LABELS |= dict.fromkeys(("queue", "worker"), ("queue",))


def _metric(
    source: str, name: str, meaning: str, kind: MetricKind = "gauge", labels: tuple[str, ...] | None = None
) -> Metric:
    """Return the metric of one attribute, such as ``spill.bytes``."""
    subject, _, attribute = source.partition(".")
    own = labels or _LABELS.get(subject, ())
    return Metric(name, kind, meaning, own, cast(Subject, subject), (("", attribute),))


METRICS: tuple[Metric, ...] = (
    _metric(
        "scrape.up",
        "celery_dq_up",
        "Whether the broker has answered within dq_metrics_timeout (1) or not (0).",
    ),
    _metric(
        "scrape.elections_up",
        "celery_dq_elections_up",
        "Whether the server of the elections has answered within dq_metrics_timeout (1) or not (0).",
    ),
    _metric(
        "scrape.duration_s",
        "celery_dq_scrape_duration_seconds",
        "Time that the reading of the broker's state took.",
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
    _metric(
        "queue.backlogs.runnable",
        "celery_dq_queue_runnable_messages",
        "Messages that a worker with free slots would get now; throttled tenants have none.",
    ),
    _metric(
        "queue.snapshot.is_paused",
        "celery_dq_queue_paused",
        "Whether the whole queue is paused (1) or not (0); workers get no message of a paused queue.",
    ),
    _metric(
        "queue.oldest_waiting_s",
        "celery_dq_queue_oldest_waiting_age_seconds",
        "How long the oldest waiting message has waited; 0 when none waits. Delayed messages do not count.",
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
    _metric(
        "queue.snapshot.living_consumers",
        "celery_dq_queue_consumers",
        "Living worker processes that consume the queue.",
    ),
    *(
        _metric(
            f"queue.snapshot.counters.{each.name}", f"celery_dq_{each.metric}_total", each.meaning, "counter"
        )
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
    _metric(
        "worker.slots",
        "celery_dq_queue_slots",
        "Pool slots of this worker, for each queue that it consumes; all its queues share them.",
    ),
    _metric(
        "worker.claim_times",
        "celery_dq_claim_duration_seconds",
        "Times from sending a claim to reading its answer in this worker, delays of its loop included.",
        "histogram",
    ),
    # The two names of celery-exporter that it does not export for other brokers than its own.
    _metric(
        "queue.snapshot.waiting",
        "celery_queue_length",
        "Waiting messages, under the name that celery-exporter uses.",
        labels=("queue_name",),
    ),
    _metric(
        "queue.snapshot.living_consumers",
        "celery_active_consumer_count",
        "Living worker processes that consume the queue, under the name that celery-exporter uses.",
        labels=("queue_name",),
    ),
    # Tenants, only with dq_metrics_tenants.
    _metric(
        "tenant.waiting",
        "celery_dq_tenant_backlog_messages",
        "Waiting messages of the tenants with the largest backlogs; the others are one, __other__.",
    ),
    _metric(
        "tenant.oldest_waiting_s",
        "celery_dq_tenant_oldest_waiting_age_seconds",
        "How long the oldest waiting message of a tenant has waited.",
    ),
    _metric(
        "tenant.is_throttled",
        "celery_dq_tenant_throttled",
        "Whether a tenant with a backlog waits for its rate (1) or not (0).",
    ),
    # Leaders.
    _metric(
        "leader.is_present",
        "celery_dq_leader_present",
        "Whether a singleton queue or another election has a leader (1) or not (0).",
    ),
    _metric(
        "leader.token_in_force",
        "celery_dq_leader_token",
        "Fencing token of the leader, which grows with each term; absent without a leader.",
    ),
    _metric(
        "leader.candidates",
        "celery_dq_leader_candidates",
        "Living candidates, the leader included.",
    ),
    # Calls of this process.
    _metric(
        "scrape.breaker_open",
        "celery_dq_breaker_open",
        "Whether the last unbuffered calls of this process had no answer, until one succeeds (1), or not.",
    ),
    # The outbox.
    _metric(
        "outbox.is_up",
        "celery_dq_outbox_up",
        "Whether the outbox of a database can be read (1) or not (0), for example because it has no table.",
    ),
    _metric(
        "outbox.rows",
        "celery_dq_outbox_rows",
        "Rows of committed transactions in the outbox of a database that the broker has not confirmed.",
    ),
    _metric(
        "outbox.oldest_s",
        "celery_dq_outbox_oldest_age_seconds",
        "Age of the oldest row of the outbox of a database; 0 without one.",
    ),
    _metric(
        "outbox.refused",
        "celery_dq_outbox_refused_rows",
        "Rows of the outbox of a database that the broker has refused; they are not sent again.",
    ),
    # The buffered producer.
    _metric(
        "buffer.pending",
        "celery_dq_buffer_messages",
        "Buffered messages of this process that the broker has not confirmed.",
    ),
    _metric(
        "buffer.bytes",
        "celery_dq_buffer_bytes",
        "Memory of the buffered messages of this process.",
    ),
    _metric(
        "buffer.age_s",
        "celery_dq_buffer_oldest_age_seconds",
        "Age of the oldest buffered message of this process; 0 without one.",
    ),
    _metric(
        "buffer.degraded",
        "celery_dq_buffer_degraded",
        "Whether the last write of this process to the spill log failed (1) or not (0).",
    ),
    _metric(
        "spill.bytes",
        "celery_dq_spill_bytes",
        "Size of the spill log of all processes that share dq_buffer_folder.",
    ),
    _metric(
        "spill.age_s",
        "celery_dq_spill_oldest_age_seconds",
        "Time since the last write to the oldest file of the spill log; 0 without files.",
    ),
    _metric(
        "spill.quarantined",
        "celery_dq_spill_quarantined_files",
        "Files with damaged or refused messages beside the spill log.",
    ),
)
