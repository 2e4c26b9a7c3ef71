"""The elected beat: many may run, and each tick is sent once.

Start it with ``celery beat -S dq``, short for ``celery_dq.beat:ElectedScheduler``.

``schedule_store``  the last run of each entry, shared by all beats, in Redis or ZooKeeper
``scheduler``       ``ElectedScheduler``: stands for election, and sends the ticks of a wrapped scheduler

The Lua scripts beside them change one entry of the store each. Celery's beat service loads this package.
"""

from __future__ import annotations

from celery_dq.beat.scheduler import ElectedScheduler

__all__ = ["ElectedScheduler"]
