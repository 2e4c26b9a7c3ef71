"""Dedup and singleton queues on brokers without them: ``redis://``, ``amqp://``, ``memory://`` and others.

Such a broker gives no verdicts and cannot refuse a stale token. So the worker requests a task's dedup lock
before the task runs, and consumes a singleton queue only in its term.

``dedup_locks_step``, ``dedup_locks``   the boot step, and the calls between Celery's consumer and its pool
``dedup_requests``                      what a task requests, and what its message says of the verdict
``unanswered_calls``, ``declined_calls``, ``outside_prefetch``   calls without a verdict; calls that another
                                        call covers; requests that wait outside the prefetch
``server``, ``redis_coordinator``       the Redis with the locks, and its coordinator: one Lua call per change
``lock_heartbeat``                      renews the locks of a process, and receives the end of waiting calls
``lua``                                 the scripts; ``lua/include/dedup_lock.lua`` is the state of one key
``singleton_step``, ``singleton_sequencer``, ``singleton_message``   singleton queues in the terms of a worker
``queued_calls``                        dedup on a singleton queue, where one message runs after the other
"""
