"""Errors of the broker and of requests, with the status and the remedy that a page shows."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from kombu.exceptions import OperationalError

from celery_dq.errors import ConfigurationError, DQError

__all__ = ["BrokerSilent", "Failure", "failure_of"]


class BrokerSilent(DQError, ConnectionError):
    """The broker has not answered within the deadline of a page."""


@dataclass(frozen=True)
class Failure:
    """A page that cannot be shown.

    Attributes:
        status: HTTP status of the page.
        title: The failure in a few words.
        reason: The text of the error.
        remedy: The next step of the user.
    """

    status: int
    title: str
    reason: str
    remedy: str


_DOCTOR = "Check that it runs and that the network reaches it. 'celery dq doctor' checks all servers."


def failure_of(error: Exception) -> Failure | None:
    """Return the page of an error; None for a fault of the program, which must not be hidden."""
    reason = (str(error) or type(error).__name__).rstrip(".")
    if isinstance(error, BrokerSilent):
        return Failure(503, "The broker does not answer", reason, _DOCTOR)
    if isinstance(error, ConfigurationError):
        return Failure(503, "The app cannot show this", reason, "'celery dq doctor' checks the settings.")
    if isinstance(error, redis.exceptions.NoPermissionError):
        remedy = "The guide 'Operating' lists the rights of the role 'operator'."
        return Failure(503, "The Redis user of broker_url lacks a right", reason, remedy)
    # An error of celery-dq about a server is a ConnectionError as well, which is an OSError.
    if isinstance(error, (OperationalError, redis.ConnectionError, redis.TimeoutError, OSError)):
        return Failure(503, "The broker cannot be reached", reason, _DOCTOR)
    if isinstance(error, redis.RedisError):
        return Failure(503, "Redis refuses the request", reason, _DOCTOR)
    if isinstance(error, ImportError):
        return Failure(503, "A library is missing", reason, "Install the libraries that broker_url needs.")
    if isinstance(error, UnicodeEncodeError):
        remedy = "A program other than Celery has written it; delete it in Redis."
        return Failure(503, "A stored name is not valid Unicode", reason, remedy)
    if isinstance(error, DQError):
        return Failure(400, "The request cannot be answered", reason, "Go back, and correct it.")
    return None
