"""Dedup and singleton queues on brokers without them: ``redis://``, ``amqp://``, ``memory://`` and others.

Such a broker gives no verdicts and cannot refuse a stale token. So the worker requests a task's dedup lock
before the task runs, and consumes a singleton queue only in its term.

``dedup_locks``        the boot step, and the calls between Celery's consumer and its pool
``dedup_requests``     the dedup request of a task; the calls of a singleton queue that a run covers
``outside_prefetch``   calls without a verdict, and calls that another call covers, wait outside the prefetch
``redis_coordinator``  the Redis with the locks, and its coordinator: one Lua call per change
``lock_heartbeat``     renews the locks of a process, and receives the end of waiting calls
``lua``                the scripts; ``lua/include/dedup_lock.lua`` is the state of one key
``singleton_sequencer``, ``singleton_message``   the boot step; singleton queues in the terms of a worker
"""
