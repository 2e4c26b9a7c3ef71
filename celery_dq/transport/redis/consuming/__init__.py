"""How claimed messages get from Redis to the consumers of a channel.

``subscription``        the state of one queue: back-off, next look, claim limit
``ready_queues``        the queues that may have work, in turn, and the times at which others are due
``claims_under_way``    how many claims there may be, and how they share the capacity
``wakeups``             waits for wake-ups with one ``BLPOP`` per group of queues
``sharded_wakeups``     waits for wake-ups on a Redis Cluster, by PUB/SUB
``fetcher``             claims messages without polling and without blocking
``claim_window``        how many messages a worker claims beyond its free slots
``inbox``               claimed messages before their delivery, in fair order
``allocated_partitions`` the partitions that are allocated to this worker
``singleton_delivery``  singleton queues: claimed in a term, delivered one after the other
``watchdog``            notices a consumer that no longer claims beside a backlog
``single_claim``        claims one message at once
``channel_consumer``    the consuming half of a channel; measures free capacity
``poller``              watches the sockets of all channels of a connection
``consuming_channel``   what this package asks of a channel, as a protocol

``transport.redis.channel`` makes a ``ChannelConsumer``; ``transport.redis.transport`` makes the ``Poller``.
"""
