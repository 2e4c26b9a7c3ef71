"""Read-only snapshots of queues, tenants, messages, dedup locks and dead letters.

A function takes a partition and a client, reads in a bounded number of commands, and returns frozen
dataclasses. It changes nothing and wakes no worker. A snapshot may be out of date when it arrives, and
counts that are read together may differ by what happened in between.

``redis_values``                   reads replies of Redis
``queues``, ``tenants``, ``waiting``, ``messages``   the state of a queue and of its tenants
``live_quotas``                    the live quotas of a queue, to compare, export and import
``zookeeper_queues``               queues and messages on ``dq-zookeeper://``
``dead_letters``, ``dedup_locks``  messages given up on; dedup locks
``leaders``                        leaders of singleton queues and other elections
``explain``                        why a tenant or a message waits, as a sentence
``spill``                          buffered messages on disk

``app.dq``, the command line and the metrics read through here.
"""
