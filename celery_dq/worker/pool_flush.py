"""Lets what a prefork pool has begun survive a lost connection, and a worker that stops hear its end.

Celery flushes the pool in both cases. A worker that stops and has forgotten a job does not read what the
child says of it, while the child waits half a minute to be heard (billiard's ``_ensure_messages_consumed``),
and the worker for the child; and a child that was given a part of a message waits for the rest for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from billiard.pool import CLOSE

from celery_dq.worker.stopping import terminates


def guard_flush(pool: Any, flushed: Callable[[frozenset[int]], None]) -> None:
    """Keep what the children have when Celery flushes the pool: after a lost connection, and at the end.

    The buffer is emptied, and the callbacks of what the children have not confirmed are forgotten, or of
    everything (Celery 5.5), by release. The children run what they were given all the same. So what a living
    child has, whole or in part, stays known during the flush and after it. A child that died first has put
    what it had not confirmed back into the buffer.

    Does nothing to other pools, and nothing when called again with the same `flushed`.

    Arguments:
        pool: the worker's pool; its ``flush`` is replaced on the instance.
        flushed: called after a flush with the ``id`` of each job that is still known; nobody runs the others.
            Of several the last one that came is told first, as boot steps are stopped.
    """
    children = getattr(pool, "_pool", None)
    if children is None or not callable(getattr(children, "flush", None)):
        return
    guard = pool.flush
    if not isinstance(guard, _Guarded) or guard.children is not children:
        guard = pool.flush = _Guarded(children)
    if flushed not in guard.listeners:
        guard.listeners.append(flushed)


class _Guarded:
    """Instead of the way in which Celery flushes the children of a pool."""

    def __init__(self, children: Any) -> None:
        self.children = children
        self.listeners: list[Callable[[frozenset[int]], None]] = []

    def __call__(self) -> None:
        """Flush, and tell what is left."""
        children = self.children
        cache: dict[Any, Any] = children._cache
        buffered = set(map(id, children.outbound_buffer))
        busy = set(children._busy_workers)
        begun = {
            number: job for number, job in list(cache.items()) if id(job) not in buffered and _is_begun(job)
        }
        # Before the loop has turned there is none yet, and no child has anything.
        put_back = getattr(children, "_put_back", None)

        def forget(job: Any) -> None:
            # Its child has died just now, and what is put back is emptied out with the buffer.
            if begun.pop(job._job, None) is not None:
                del job.discard
            job.discard()

        for job in begun.values():
            job.discard = _stay
        if put_back is not None:
            children._put_back = forget
        try:
            if children._state == CLOSE and not terminates():
                # Of a pool that goes on Celery does so itself, and a cold stop waits for nobody.
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
                    # Celery 5.5 forgets it, and the next task would wait behind this one.
                    children._busy_workers.add(child.inqW_fd)
        kept = frozenset(map(id, cache.values()))
        for flushed in reversed(self.listeners):
            flushed(kept)


def _is_begun(job: Any) -> bool:
    """Whether a child has the job, or a part of it; or had it, when it was put back into the buffer."""
    return bool(getattr(job, "_accepted", False) or getattr(job, "_write_to", None) is not None)


def _write_the_rest(children: Any, jobs: list[Any]) -> None:
    """Finish what was written in part: nobody does so later, and what follows would be read as the rest."""
    for job in jobs:
        writer = getattr(job, "_writer", _nothing)()
        if writer in children._active_writers:
            children._flush_writer(job._write_to, writer)


def _nothing() -> None:
    """Instead of the reference to a writer."""


def _stay() -> None:
    """Instead of a job's own way to be forgotten."""
