"""Queues in ZooKeeper that Java programs with Apache Curator can share. Needs ``celery-dq[zookeeper]``."""
