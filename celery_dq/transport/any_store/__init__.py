"""A broker above any store that implements the calls of :mod:`celery_dq.transport.partition_store`.

``queue_store``    the protocol of a store: its partitions, queues and bindings
``transport``      the kombu transport, of which a subclass opens the store, and its channel
``fetcher``        claims messages, sends acks and renews the leases, in the thread of a connection

Imports go down this list. Messages, in-flight messages and acks are shared with the tenant broker
(``transport/in_flight``); the thread, queues, bindings and the delivery with the broker on ZooKeeper
(``fetcher``, ``threaded_channel``, ``threaded_transport``). ``celery_dq.testing.sqlite_broker`` is an
example of a store.
"""
