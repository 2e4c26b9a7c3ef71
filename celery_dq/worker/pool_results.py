"""Hears the last results of a prefork pool when they come, while the worker shuts down.

Celery's loop has ended by then, and Celery asks one child after the other for its result: it sleeps half a
second for each that has none yet. So long a leader that stops does not know that its last message is over,
and its successor waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

#: Seconds to wait for one child's result before the next child is asked.
TURN_S = 0.02


def hear_results(pool: Any) -> None:
    """Wait for each child's result in turn, rather than to sleep whatever comes.

    All else is Celery's own: what is read, and what is made of a child that is dead. Does nothing to pools
    without such children, and nothing when called again.

    Arguments:
        pool: the worker's pool, which has started; a method is replaced on its result handler, the instance.
    """
    handler: Any = getattr(getattr(pool, "_pool", None), "_result_handler", None)
    # Of the class: it is not replaced twice.
    flush = getattr(type(handler), "_flush_outqueue", None)
    if flush is None:
        return

    def flush_what_has_come(fd: int, remove: Callable[[int], Any], children: Any, on_result: Any) -> Any:
        child = children.get(fd)
        # What Celery makes of a pipe that is closed, it makes below.
        with contextlib.suppress(OSError, EOFError, ValueError):
            # Also of one that has died: Celery looks for the dead after each turn.
            if child is not None and not child.outq._reader.poll(TURN_S):
                return None
        return flush(handler, fd, remove, children, on_result)

    handler._flush_outqueue = flush_what_has_come
