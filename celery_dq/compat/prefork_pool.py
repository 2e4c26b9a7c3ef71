"""Corrections of Celery's prefork pool: flushes, deaths of children, the last results, and their counts.

*Flush.* Celery flushes the pool after a lost connection, and when the worker stops. A stopping worker that
has forgotten a job does not read the result of the child. The child waits half a minute for the reader
(billiard's ``_ensure_messages_consumed``), and the worker waits for the child. A child with a part of a
message waits for the rest for ever.

*Deaths.* Celery's loop watches a pipe of each child, whose other end closes when the child dies. But the
kernel closes the files of a process some moments before the parent can reap it. If the loop is faster, Celery
checks the child once, finds it alive, and stops watching it. The next check is made in the round every five
seconds. Until then the child's messages stay in flight, and processes that wait for their end wait. If the
connection is lost during that time, Celery watches the closed pipe again, and the worker ends.

*Last results.* Celery's loop has ended when the worker shuts down, and Celery polls one child after the other
for its result. It sleeps half a second for each child without a result. During that time a stopping leader
does not know that its last message is over, and its successor waits.

*Counts.* The worker counts the results of each child in shared memory, under a lock. A child that ends takes
the lock, too, to look whether its results were read. If it is killed at that moment, as by a hard time limit,
the lock is never free again, and the worker waits for it at the next result of that child: its tasks stand
still, while its leases are renewed. Only the worker writes a count, so it needs no lock.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from billiard.pool import CLOSE, RUN
from celery.worker import state

from celery_dq.compat.guard import check

__all__ = ["count_without_locks", "deliver_results_promptly", "guard_flush", "notice_deaths"]

#: Seconds until the second check, and the longest time between two. Each further check comes after twice
#: the time of the one before, because a child that has closed all its files may live on for any time.
SOON_S, LONGEST_S = 0.001, 0.1
#: Seconds to wait for one child's result before the next child is asked.
TURN_S = 0.02


def terminates() -> bool:
    """Whether the worker stops cold, without waiting for tasks."""
    flag: Any = state.should_terminate
    return flag is not None and flag is not False


def _children_of(pool: Any) -> Any:
    """Return Celery's ``AsynPool`` inside a worker's pool, which has started; None for any other pool."""
    children = getattr(pool, "_pool", None)
    module = sys.modules.get("celery.concurrency.asynpool")
    return children if module is not None and isinstance(children, module.AsynPool) else None


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
    children = _children_of(pool)
    if children is None:
        return
    check("prefork_pool")
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


def notice_deaths(pool: Any) -> None:
    """Check a child whose pipe has closed until it is dead, instead of once.

    All checks are Celery's own, in the loop's thread, and only of a pool that runs. Does nothing for pools
    without such children. Idempotent.

    Args:
        pool: the worker's pool, which has started; methods of its inner pool are replaced on the instance.
    """
    children = _children_of(pool)
    if children is None:
        return
    check("prefork_pool")
    # The methods of the class, so that a replacement on the instance is never wrapped again.
    exited, track = type(children)._event_process_exit, type(children)._track_child_process

    def look(hub: Any, child: Any, pause_s: float) -> None:
        if is_awaited(child):
            children.maintain_pool()
            look_later(hub, child, min(2 * pause_s, LONGEST_S))

    def look_later(hub: Any, child: Any, pause_s: float) -> None:
        if is_awaited(child):
            hub.call_later(pause_s, look, hub, child, pause_s)

    def is_awaited(child: Any) -> bool:
        # Another check may have found it dead, because Celery's own rounds continue.
        return bool(children._state == RUN and child in children._pool)

    def exited_then_look(hub: Any, proc: Any) -> None:
        exited(children, hub, proc)
        look_later(hub, proc, SOON_S)

    def track_or_look(proc: Any, hub: Any) -> None:
        # The attribute is missing for a child that was never watched, and None for one that was.
        if getattr(proc, "_sentinel_poll", ...) is None:
            # The lost connection has removed the scheduled check.
            look_later(hub, proc, SOON_S)
        else:
            track(children, proc, hub)

    children._event_process_exit = exited_then_look
    children._track_child_process = track_or_look


def deliver_results_promptly(pool: Any) -> None:
    """Wait for each child's result in turn, instead of sleeping a fixed time.

    Reading the result, and handling a dead child, stay Celery's own. Does nothing for pools without such
    children. Idempotent.

    Args:
        pool: the worker's pool, which has started; a method is replaced on its result handler, the instance.
    """
    children = _children_of(pool)
    if children is None:
        return
    check("prefork_pool")
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


def _without_lock(shared: Any) -> Any:
    """Return the number of a shared count, which the worker then raises without the lock."""
    number = shared.get_obj()
    number.get_lock = contextlib.nullcontext
    return number


def count_without_locks(pool: Any) -> None:
    """Count the results of each child, present and future, without a lock that the child may have for ever.

    Does nothing for pools without such children. Idempotent.

    Args:
        pool: the worker's pool, which has started; a method of its inner pool is replaced on the instance.
    """
    children = _children_of(pool)
    if children is None:
        return
    check("prefork_pool")
    counts = children._on_ready_counters
    # The method of the class, so that a replacement on the instance is never wrapped again.
    create = type(children)._create_worker_process

    def create_and_count(i: int) -> Any:
        child = create(children, i)
        counts[child.pid] = _without_lock(counts[child.pid])
        return child

    children._create_worker_process = create_and_count
    for pid, count in list(counts.items()):
        if hasattr(count, "get_obj"):
            counts[pid] = _without_lock(count)
