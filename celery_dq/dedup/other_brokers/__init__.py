"""Dedup locks for brokers that give no verdicts, such as RabbitMQ.

``coordinator``        the interface between a worker and the store of the locks
``server``             the Redis that the settings name for the locks
``redis_coordinator``  the coordinator for workers on many machines: one Lua call per change
``lock_heartbeat``     renews the dedup locks of a process, and receives the end of waiting calls
``lua``                the scripts; ``lua/include/dedup_lock.lua`` is the state of one key

``celery_dq.worker.dedup_locks`` asks here before the pool gets a task.
"""
