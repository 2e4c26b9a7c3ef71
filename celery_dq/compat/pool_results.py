"""Deliver the last results of a prefork pool at once while the worker shuts down.

Celery's loop has ended by then, and Celery polls one child after the other for its result. It sleeps half a
second for each child without a result. During that time a stopping leader does not know that its last message
is over, and its successor waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from celery_dq.compat.guard import check
from celery_dq.compat.pools import asynchronous_pool

#: Seconds to wait for one child's result before the next child is asked.
TURN_S = 0.02


def deliver_results_promptly(pool: Any) -> None:
    """Wait for each child's result in turn, instead of sleeping a fixed time.

    Reading the result, and handling a dead child, stay Celery's own. Does nothing for pools without such
    children. Idempotent.

    Args:
        pool: the worker's pool, which has started; a method is replaced on its result handler, the instance.
    """
    children = asynchronous_pool(pool)
    if children is None:
        return
    check("pool_results")
    handler = children._result_handler
    # The method of the class, so that a replacement on the instance is never wrapped again.
    flush = type(handler)._flush_outqueue

    def flush_what_has_come(
        fd: int, remove: Callable[[int], Any], process_index: Any, on_state_change: Any
    ) -> Any:
        child = process_index.get(fd)
        # Celery's own method, called below, handles a closed pipe.
        with contextlib.suppress(OSError, EOFError, ValueError):
            # A dead child may be skipped as well: Celery checks for dead children after each turn.
            if child is not None and not child.outq._reader.poll(TURN_S):
                return None
        return flush(handler, fd, remove, process_index, on_state_change)

    handler._flush_outqueue = flush_what_has_come
