"""Dedup and singleton queues on brokers without them: ``redis://``, ``amqp://``, ``memory://`` and others.

Such a broker gives no verdicts and cannot refuse a stale token. So the worker requests a task's dedup lock
before the task runs, and consumes a singleton queue only in its term.

``dedup_locks``        the boot step, and the calls between Celery's consumer and its pool
``dedup_calls``        the dedup request of a task; calls that wait, or that a run covers
``redis_coordinator``  the Redis with the locks, its coordinator (one Lua call per change), and its heartbeat
``lua``                the scripts; ``lua/include/dedup_lock.lua`` is the state of one key
``singleton_sequencer``  the boot step; singleton queues in the terms of a worker, and their messages
"""
