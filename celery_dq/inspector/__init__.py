"""Read-only snapshots of queues, tenants, messages, dedup locks and dead letters.

A function takes the partitions of a queue, or one of them, and a client; it reads in a bounded number of
commands, and returns frozen dataclasses. It changes nothing and wakes no worker. What is read in each
partition is a procedure of ``transport.redis.store.rounds``, so that many partitions share the round trips.
A snapshot may be out of date when it arrives, and counts that are read together may differ by what happened
in between.

``redis_values``                   reads replies of Redis
``queues``, ``tenants``, ``messages``   the state of a queue, of its tenants and messages, with pauses
``queue_counters``                 counters of a queue, waiting times, the oldest waiting message
``live_quotas``                    the live quotas of a queue, to compare, export and import
``dead_letters``, ``dedup_locks``  messages given up on; dedup locks
``workers``                        workers, and leaders of singleton queues and other elections
``explain``                        why a tenant or a message waits, as a sentence

``app.dq``, the command line, the dashboard and the metrics read through here.
"""
