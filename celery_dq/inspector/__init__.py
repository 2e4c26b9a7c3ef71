"""Read-only snapshots of queues, tenants, messages and dead letters. Every door reads through here.

A function takes a partition and a client, reads in a bounded number of commands, and returns frozen
dataclasses. It changes nothing and wakes nobody. A snapshot of what moves is out of date when it
arrives: counts that are read together may differ by what happened in between.
"""
