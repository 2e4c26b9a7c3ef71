"""How claimed messages get from Redis to the consumers of a channel.

``consumer_threads``    one thread per process and server, and one more per master of a cluster
``consumer_thread``     collects, makes one trip, and waits; owns all sockets of the consuming side
``trip``                the calls that one write sends, and their answers
``ack_sender``          which acks are due, beside those that a claim takes along
``leases``              the leases of a process, renewed by calls in trips
``channel_claims``      the claims of one channel: which queues are due, and what came of it
``subscriptions``       the state of each queue, their turns, and the times at which they are due
``claim_limits``        how much a claim asks for: a window or the pace of callbacks, shares, discards
``wakeups``             waits for wake-ups with one ``BLPOP`` per group of queues
``sharded_wakeups``     waits for wake-ups on a Redis Cluster, by PUB/SUB
``broadcasts``          the subscription of a channel to broadcasts
``delivery``            the delivering half of a channel; measures free capacity
``inbox``               claimed messages before their delivery, in fair order
``partition_consumers`` which partitions are consumed, and by which consumer
``singleton_delivery``  singleton queues: claimed in a term, delivered one after the other
``watchdog``            notices a consumer that no longer claims beside a backlog

``transport.redis.channel`` makes a ``ChannelDelivery``; ``connection_context`` makes the ``ConsumerThreads``.
"""
