"""``dq-zookeeper://``: queues for Celery in ZooKeeper.

``transport``, ``channel``, ``qos``, ``message``   kombu's roles
``address``, ``bindings``, ``queues``              the connection, exchanges, declared queues
``record``, ``publisher``, ``batch``               a message as a node, published once
``fetcher``, ``subscription``, ``delays``          takes items in a thread of its own; delayed items
``in_flight``, ``delivery_count``                  items under locks, their outcomes, their deliveries
``dead_letters``                                   messages that were given up on

A message stays in its queue, under an ephemeral lock, until it is acknowledged;
``celery_dq.zookeeper.item_locks`` takes it. kombu opens the transport.
"""
