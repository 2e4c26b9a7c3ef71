"""Moves messages between kombu's Redis transport and the tenant broker.

``app/api/migration.py``, ``app/api/return_migration.py`` and the command ``celery dq migrate`` use it.

``stock_broker``   a message as kombu's transport stores it, its lists, unacknowledged and staged messages,
                   and signs of its living workers
``tenant_source``  the messages of a partition on their way back, or by ``app/api/move.py`` to another queue
"""
