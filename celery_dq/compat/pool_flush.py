"""Keep the jobs that a prefork pool has begun when Celery flushes the pool.

Celery flushes the pool after a lost connection, and when the worker stops. A stopping worker that has
forgotten a job does not read the result of the child. The child waits half a minute for the reader
(billiard's ``_ensure_messages_consumed``), and the worker waits for the child. A child with a part of a
message waits for the rest for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from billiard.pool import CLOSE

from celery_dq.compat.guard import check
from celery_dq.compat.pools import asynchronous_pool
from celery_dq.compat.stopping import terminates


def guard_flush(pool: Any, flushed: Callable[[frozenset[int]], None]) -> None:
    """Keep the children's jobs when Celery flushes the pool: after a lost connection, and at the end.

    Celery's flush empties the buffer. It forgets the callbacks of jobs that the children have not confirmed
    (Celery 5.5: of all jobs), but the children run these jobs all the same. So a job that a living child has,
    whole or in part, stays known during the flush and after it. The unconfirmed jobs of a dead child are in
    the buffer again.

    Does nothing for other pools. Idempotent for the same `flushed`.

    Args:
        pool: the worker's pool; its ``flush`` is replaced on the instance.
        flushed: called after a flush with the ``id`` of each job that is still known; the others do not run.
            Several callbacks are called in reverse order, as boot steps are stopped.
    """
    children = asynchronous_pool(pool)
    if children is None:
        return
    check("pool_flush")
    guard = pool.flush
    if not isinstance(guard, _Guarded) or guard.children is not children:
        guard = pool.flush = _Guarded(children)
    if flushed not in guard.listeners:
        guard.listeners.append(flushed)


class _Guarded:
    """Replaces the method with which Celery flushes the children of a pool."""

    def __init__(self, children: Any) -> None:
        self.children = children
        self.listeners: list[Callable[[frozenset[int]], None]] = []

    def __call__(self) -> None:
        """Flush, and call the callbacks with the jobs that are left."""
        children = self.children
        cache: dict[Any, Any] = children._cache
        buffered = set(map(id, children.outbound_buffer))
        busy = set(children._busy_workers)
        begun = {
            number: job for number, job in list(cache.items()) if id(job) not in buffered and _is_begun(job)
        }
        # The method is missing before the first turn of the loop, when no child has a job.
        put_back = getattr(children, "_put_back", None)

        def forget(job: Any) -> None:
            # The child has died just now. Its job is put back into the buffer, which the flush empties.
            if begun.pop(job._job, None) is not None:
                del job.discard
            job.discard()

        for job in begun.values():
            job.discard = _stay
        if put_back is not None:
            children._put_back = forget
        try:
            if children._state == CLOSE and not terminates():
                # Celery writes the rest itself while the pool runs, and a cold stop does not wait.
                _write_the_rest(children, list(begun.values()))
            children.flush()
        finally:
            if put_back is not None:
                children._put_back = put_back
            for job in begun.values():
                del job.discard
        for number, job in begun.items():
            if not job.ready():
                cache.setdefault(number, job)
                child = job._write_to
                if child is not None and child._is_alive() and child.inqW_fd in busy:
                    # Celery 5.5 forgets that the child is busy, and the next task would wait behind this one.
                    children._busy_workers.add(child.inqW_fd)
        kept = frozenset(map(id, cache.values()))
        for flushed in reversed(self.listeners):
            flushed(kept)


def _is_begun(job: Any) -> bool:
    """Whether a child has, or had, the job or a part of it. A job of the buffer may have been put back."""
    return bool(getattr(job, "_accepted", False) or getattr(job, "_write_to", None) is not None)


def _write_the_rest(children: Any, jobs: list[Any]) -> None:
    """Finish partly written jobs, because the child would read the next bytes as the rest of such a job."""
    for job in jobs:
        writer = getattr(job, "_writer", _nothing)()
        if writer in children._active_writers:
            children._flush_writer(job._write_to, writer)


def _nothing() -> None:
    """Stand in for a missing reference to a writer."""


def _stay() -> None:
    """Replace a job's ``discard``, so that the job stays known."""
