"""The settings of the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_dq.duration import SECOND_US
from celery_dq.options.schema import Kind, Setting

__all__ = ["METRICS_SETTINGS", "MOST_METRICS_TENANTS", "MetricsOptions", "metrics_options"]

#: Most tenants that may have time series of their own.
MOST_METRICS_TENANTS = 200

METRICS_SETTINGS = (
    Setting(
        "dq_metrics_port",
        Kind.WHOLE,
        None,
        "Port on which each worker serves metrics for Prometheus; None is off.",
        low=1,
        high=65_535,
        optional=True,
    ),
    Setting(
        "dq_metrics_host",
        Kind.TEXT,
        "127.0.0.1",
        "Address on which a worker serves metrics; '0.0.0.0' is all. The metrics ask for no password.",
    ),
    Setting(
        "dq_metrics_tenants",
        Kind.WHOLE,
        0,
        "Number of tenants with the largest backlogs that have metrics of their own; 0 is none.",
        low=0,
        high=MOST_METRICS_TENANTS,
    ),
    Setting(
        "dq_metrics_timeout",
        Kind.DURATION,
        5 * SECOND_US,
        "Time after which a request for metrics is answered without the broker's.",
        low=100_000,
        high=60 * SECOND_US,
    ),
)


@dataclass(frozen=True)
class MetricsOptions:
    """Options of the metrics. Durations are whole microseconds (``_us``).

    Attributes:
        port: ``dq_metrics_port`` of a worker; default None, no metrics.
        host: ``dq_metrics_host``, the address of that port; default ``127.0.0.1``.
        tenants: ``dq_metrics_tenants``, number of tenants with metrics of their own; default 0.
        timeout_us: ``dq_metrics_timeout``, the limit for an answer; default 5 s.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    tenants: int = 0
    timeout_us: int = 5 * SECOND_US


def metrics_options(values: Mapping[str, Any]) -> MetricsOptions:
    """Make the options from checked `values`."""
    return MetricsOptions(
        values["dq_metrics_port"],
        values["dq_metrics_host"],
        values["dq_metrics_tenants"],
        values["dq_metrics_timeout"],
    )
