"""How claimed messages get from Redis to the consumers of a channel.

``subscriptions``       the state of each queue, their turns, and the times at which they are due
``claim_limits``        how much a claim asks for: a window or the pace of callbacks, shares, discards
``wakeups``             waits for wake-ups with one ``BLPOP`` per group of queues, and hands them over
``sharded_wakeups``     waits for wake-ups on a Redis Cluster, by PUB/SUB
``fetcher``             claims messages without polling and without blocking
``inbox``               claimed messages before their delivery, in fair order
``partition_consumers`` which partitions are consumed, and by which consumer
``singleton_delivery``  singleton queues: claimed in a term, delivered one after the other
``watchdog``            notices a consumer that no longer claims beside a backlog
``channel_consumer``    the consuming half of a channel; measures free capacity
``poller``              watches the sockets of all channels of a connection
``consuming_channel``   what this package asks of a channel, as a protocol

``transport.redis.channel`` makes a ``ChannelConsumer``; ``transport.redis.transport`` makes the ``Poller``.
"""
