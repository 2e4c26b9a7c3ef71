"""Sees the death of a prefork pool's child when it dies, and not at the pool's next round.

Celery's loop watches a pipe of each child, whose other end closes when the child dies. But the kernel closes
what a process had open some moments before it lets the parent wait for it. When the loop is faster, Celery
looks at the child once, finds it alive, and watches it no more: its next look comes with the round that it
makes every five seconds. Until then what the child was running is held, and whoever waits for that waits.
When the connection is lost meanwhile, Celery watches its closed pipe again, and the worker ends.
"""

from __future__ import annotations

from typing import Any

from billiard.pool import RUN

#: Seconds until the second look; each further one comes after twice the time, and at most after the longest:
#: a child may have closed all its files, and live on for as long as it likes.
SOON_S, LONGEST_S = 0.001, 0.1


def notice_deaths(pool: Any) -> None:
    """Look at a child whose pipe has closed until it is dead, rather than once.

    All looks are Celery's own, in the loop's thread, and only at a pool that runs. Does nothing to pools
    without such children, and nothing when called again.

    Arguments:
        pool: the worker's pool, which has started; methods of its inner pool are replaced on the instance.
    """
    children: Any = getattr(pool, "_pool", None)
    # Of the class: it is not replaced twice.
    exited = getattr(type(children), "_event_process_exit", None)
    track = getattr(type(children), "_track_child_process", None)
    if exited is None or track is None:
        return

    def look(hub: Any, child: Any, pause_s: float) -> None:
        if is_awaited(child):
            children.maintain_pool()
            look_later(hub, child, min(2 * pause_s, LONGEST_S))

    def look_later(hub: Any, child: Any, pause_s: float) -> None:
        if is_awaited(child):
            hub.call_later(pause_s, look, hub, child, pause_s)

    def is_awaited(child: Any) -> bool:
        # Another look may have found it dead: Celery's own rounds go on.
        return bool(children._state == RUN and child in children._pool)

    def exited_then_look(hub: Any, child: Any) -> None:
        exited(children, hub, child)
        look_later(hub, child, SOON_S)

    def track_or_look(child: Any, hub: Any) -> None:
        # Celery has none yet for a child that it has not watched, and None for one that it watches no more.
        if getattr(child, "_sentinel_poll", ...) is None:
            # The lost connection has taken the next look with it.
            look_later(hub, child, SOON_S)
        else:
            track(children, child, hub)

    children._event_process_exit = exited_then_look
    children._track_child_process = track_or_look
