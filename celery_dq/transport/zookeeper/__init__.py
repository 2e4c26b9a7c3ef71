"""``dq-zookeeper://``: queues for Celery in ZooKeeper.

``transport``, ``channel``       kombu's roles
``address``, ``queues``          the connection; declared queues and their bindings
``record``, ``publisher``        a message as a node, published once
``fetcher``, ``subscription``    takes items and sends acks; which items are available, delayed items
``in_flight``, ``dead_letters``  items under locks; messages that were given up on

A message stays in its queue, under an ephemeral lock, until it is acknowledged;
``celery_dq.zookeeper.item_locks`` takes it. kombu opens the transport.
"""
