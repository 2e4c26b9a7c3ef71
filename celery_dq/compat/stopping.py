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
    # A flag may be the exit code 0, which also means a stop. Each task costs several calls of this function.
    stop: Any = state.should_stop
    terminate: Any = state.should_terminate
    return (stop is not None and stop is not False) or (terminate is not None and terminate is not False)


def terminates() -> bool:
    """Whether the worker stops cold, without waiting for tasks."""
    flag: Any = state.should_terminate
    return flag is not None and flag is not False
