"""How claimed messages get from Redis to the consumers of a channel.

``consumer_threads``    one thread per process and server, and one more per master of a cluster
``consumer_thread``     collects, makes one trip, and waits; its leases and acks; owns all sockets
``channel_claims``      the claims of one channel: which queues are due, how much it asks for, and what came
``subscriptions``       the state of each queue, their turns, and one ``BLPOP`` per group of them
``sharded_wakeups``     waits for wake-ups on a Redis Cluster, by PUB/SUB
``broadcasts``          the subscription of a channel to broadcasts
``delivery``            the delivering half of a channel: inbox, consumers, capacity, watchdog
``singleton_delivery``  singleton queues: claimed in a term, delivered one after the other

A ``ConsumingChannel`` makes a ``ChannelDelivery``; ``connection_context`` makes the ``ConsumerThreads``.
"""
