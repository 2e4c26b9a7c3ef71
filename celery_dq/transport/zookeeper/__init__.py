"""``dq-zookeeper://``: queues for Celery in ZooKeeper, whose messages survive the crash of their consumer."""
