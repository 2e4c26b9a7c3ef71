"""The settings of calls that are not buffered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_dq.duration import SECOND_US
from celery_dq.options.schema import Kind, Setting

__all__ = ["PUBLISHING_SETTINGS", "PublishingOptions", "publishing_options"]

PUBLISHING_SETTINGS = (
    Setting(
        "dq_publish_timeout",
        Kind.DURATION,
        10 * SECOND_US,
        "Time that a call which is not buffered may take, retries included; 0 sets no limit.",
        low=100_000,
        high=3_600 * SECOND_US,
        zero_is_off=True,
    ),
    Setting(
        "dq_breaker_failures",
        Kind.WHOLE,
        3,
        "Failed calls in a row after which further calls fail at once for dq_breaker_pause; 0 is off.",
        low=0,
    ),
    Setting(
        "dq_breaker_pause",
        Kind.DURATION,
        SECOND_US,
        "Time for which calls fail at once, until one of them tries the broker again.",
        low=1_000,
        high=3_600 * SECOND_US,
    ),
)


@dataclass(frozen=True)
class PublishingOptions:
    """Options of calls that are not buffered. Durations are whole microseconds (``_us``).

    Attributes:
        timeout_us: ``dq_publish_timeout``; default 10 s. With 0 only Celery's retry policy limits a call.
        breaker_failures: ``dq_breaker_failures``; default 3, 0 is off.
        breaker_pause_us: ``dq_breaker_pause``; default 1 s.
    """

    timeout_us: int = 10 * SECOND_US
    breaker_failures: int = 3
    breaker_pause_us: int = SECOND_US

    @property
    def step_s(self) -> float:
        """Seconds that one step of a publish may take, a third of the timeout; 0 sets no limit."""
        return self.timeout_us / 3e6


def publishing_options(values: Mapping[str, Any]) -> PublishingOptions:
    """Make the options from checked `values`."""
    return PublishingOptions(
        values["dq_publish_timeout"], values["dq_breaker_failures"], values["dq_breaker_pause"]
    )
