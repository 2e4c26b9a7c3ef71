"""Notice the death of a prefork pool's child at once, and not at the pool's next round.

Celery's loop watches a pipe of each child, whose other end closes when the child dies. But the kernel
closes the files of a process some moments before the parent can reap it. If the loop is faster, Celery
checks the child once, finds it alive, and stops watching it. The next check is made in the round every five
seconds. Until then the child's messages stay in flight, and processes that wait for their end wait. If the
connection is lost during that time, Celery watches the closed pipe again, and the worker ends.
"""

from __future__ import annotations

from typing import Any

from billiard.pool import RUN

from celery_dq.compat.guard import check
from celery_dq.compat.pools import asynchronous_pool

#: Seconds until the second check, and the longest time between two. Each further check comes after twice
#: the time of the one before, because a child that has closed all its files may live on for any time.
SOON_S, LONGEST_S = 0.001, 0.1


def notice_deaths(pool: Any) -> None:
    """Check a child whose pipe has closed until it is dead, instead of once.

    All checks are Celery's own, in the loop's thread, and only of a pool that runs. Does nothing for pools
    without such children. Idempotent.

    Args:
        pool: the worker's pool, which has started; methods of its inner pool are replaced on the instance.
    """
    children = asynchronous_pool(pool)
    if children is None:
        return
    check("pool_deaths")
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
