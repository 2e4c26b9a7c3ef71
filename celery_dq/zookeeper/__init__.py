"""Talking to ZooKeeper: sessions. Needs the extra ``celery-dq[zookeeper]``."""
