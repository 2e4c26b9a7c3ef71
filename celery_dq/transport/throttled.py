"""``Throttled``: the exception with which a task pauses its tenant because a service has asked it to wait."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from celery.exceptions import Retry

from celery_dq.errors import LONGEST_REASON, InvalidRequest
from celery_dq.transport.resource_set import resources_of
from celery_dq.transport.tenant import check_tenant

__all__ = ["Throttled"]

#: Longest pause, in seconds, about 100 years: a later end is a mistake.
LONGEST_S = 3_200_000_000
_SECONDS = re.compile(r"\s*\d+(?:\.\d+)?\s*")


class Throttled(Retry):
    """Pause the tenant of the running task, and run the task again after the pause.

    ``raise Throttled(retry_after=30)`` suits a service that has answered 429 with ``Retry-After``. On a
    tenant broker, the message returns to its old place, before the later messages of its tenant, and the
    tenant is paused in the same step. No retry and no delivery is counted. The pause ends by itself. A pause
    that ends later, or never, stays. On other brokers no tenant is paused, and the task is sent again with
    ``countdown=retry_after``. An eager task runs again at once, as often as ``max_retries`` allows.

    For Celery it is a ``Retry``. The state of the result is RETRY, Celery calls ``on_retry`` of the task, and
    neither ``on_failure`` nor ``autoretry_for`` sees it.

    Args:
        retry_after: Seconds (int or float), a timedelta, or the text of an HTTP header ``Retry-After``, which
            has seconds or a date. With 0, or a date that is over, the task runs again at once, without a
            pause.
        tenant: The tenant to pause, a str or an int; an ``AnyOf`` means each of its resources. None pauses
            the tenant of the task; of a set of resources, the one that has taken the task. If another tenant
            is named, the tenant of the task goes on, and the task itself waits until the end.
        reason: A text that is shown with the pause, such as ``"429 of api.example.com"``.

    Attributes:
        retry_after: Seconds, a float.
        tenants: Names of the tenants to pause; () for the one of the task.
        reason: The text, at most 500 characters.

    Raises:
        InvalidRequest: `retry_after` has another form or is out of range, or `reason` is not a text.
        InvalidTenant: `tenant` is not the name of a tenant.
    """

    #: The call that Celery makes for an eager task.
    sig: Any

    def __init__(
        self,
        retry_after: float | timedelta | str,
        tenant: str | int | None = None,
        reason: str = "",
    ) -> None:
        if not isinstance(reason, str):
            raise InvalidRequest(
                f"Throttled: reason = {reason!r} is of type {type(reason).__name__}; give a str"
            )
        self.retry_after = _seconds(retry_after)
        self.tenants: tuple[str, ...] = ()
        if tenant is not None:
            name = check_tenant(tenant, where="Throttled: tenant")
            self.tenants = resources_of(name) or (name,)
        self.reason = reason[:LONGEST_REASON]
        self._tenant = tenant
        self._raised_at = time.time()
        when: Any = self.retry_after  # the type that Celery names, numbers.Real, is none of mypy's
        super().__init__(message=self._text(), when=when)

    def _text(self) -> str:
        text = f"throttled for {self.retry_after:g} s"
        return f"{text}: {self.reason}" if self.reason else text

    @property
    def remaining_us(self) -> int:
        """Return the µs from now until the end, because some time passes between the raise and the pause."""
        since_s = max(time.time() - self._raised_at, 0.0)  # the clock may have been set back
        return round(max(self.retry_after - since_s, 0.0) * 1e6)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        # A subclass may have other arguments, or attributes that pickle refuses. The worker needs neither.
        arguments = (self.retry_after, self._tenant, self.reason)
        return Throttled, arguments, {"_raised_at": self._raised_at}


def _seconds(value: Any) -> float:
    seconds: float | None = None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = float(value) if _SECONDS.fullmatch(value) else _seconds_until(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    # A comparison with NaN is false.
    if seconds is None or not 0 <= seconds <= LONGEST_S:
        remedy = (
            "the service has sent no such header, so give a default: headers.get('Retry-After', 30)"
            if value is None
            else f"give seconds from 0 to {LONGEST_S}, a timedelta, or the text of a Retry-After header "
            "(seconds or an HTTP date)"
        )
        raise InvalidRequest(f"Throttled: retry_after = {value!r}: {remedy}")
    return float(seconds)


def _seconds_until(text: str) -> float | None:
    """Return the seconds until an HTTP date, 0 for one that is over; None when the text is not a date."""
    try:
        when = parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError):
        return None
    if when.tzinfo is None:  # HTTP dates are in UTC
        when = when.replace(tzinfo=timezone.utc)
    return max((when - datetime.now(timezone.utc)).total_seconds(), 0.0)
