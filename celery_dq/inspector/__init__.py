"""Read-only snapshots of queues, tenants, messages, dedup locks and dead letters.

A function takes the partitions of a queue, or one of them, and a client; it reads in a bounded number of
commands, and returns frozen dataclasses. It changes nothing and wakes no worker. What is read in each
partition is a procedure of ``transport.redis.store.rounds``, so that many partitions share the round trips.
A snapshot may be out of date when it arrives, and counts that are read together may differ by what happened
in between.

``redis_values``                   reads replies of Redis
``queues``, ``tenants``, ``waiting``, ``messages``   the state of a queue and of its tenants
``message_details``                one message with its headers and times
``queue_counters``                 counters of a queue, waiting times, the oldest waiting message
``pauses``                         pauses of tenants and of whole queues
``live_quotas``                    the live quotas of a queue, to compare, export and import
``zookeeper_queues``               queues and messages on ``dq-zookeeper://``
``dead_letters``, ``dedup_locks``  messages given up on; dedup locks
``leaders``                        leaders of singleton queues and other elections
``workers``                        workers that share partitions
``plain``                          snapshots as values of JSON
``explain``                        why a tenant or a message waits, as a sentence
``spill``, ``quarantine``          buffered messages on disk; refused and damaged ones

``app.dq``, the command line, the dashboard and the metrics read through here.
"""
