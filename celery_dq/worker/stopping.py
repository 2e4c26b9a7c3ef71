"""Whether the worker stops, by what Celery has noted of it."""

from __future__ import annotations

from typing import Any

from celery.worker import state


def stops() -> bool:
    """Whether the worker shuts down: a step is also stopped when the connection is lost."""
    return _is_set(state.should_stop) or terminates()


def terminates() -> bool:
    """Whether the worker stops cold: it waits for nobody."""
    return _is_set(state.should_terminate)


def _is_set(flag: Any) -> bool:
    # The exit code 0 is one to stop with, too.
    return flag is not None and flag is not False
