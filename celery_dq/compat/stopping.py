"""Whether the worker stops, by Celery's own flags.

The worker's modules import this one, so the private names that they use are checked here.
"""

from __future__ import annotations

from typing import Any

from celery.worker import state

from celery_dq.compat.guard import check

check("worker")


def stops() -> bool:
    """Whether the worker shuts down, and has not only lost its connection."""
    return _is_set(state.should_stop) or terminates()


def terminates() -> bool:
    """Whether the worker stops cold, without waiting for tasks."""
    return _is_set(state.should_terminate)


def _is_set(flag: Any) -> bool:
    # The flag may be the exit code 0, which also means a stop.
    return flag is not None and flag is not False
