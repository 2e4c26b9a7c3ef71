"""Moves messages between kombu's Redis transport and the tenant broker.

``app/api/migration.py``, ``app/api/return_migration.py`` and the command ``celery dq migrate`` use it.

``stock_message``  reads a message, as kombu's transport stores it
``stock_writer``   writes one
``stock_broker``   the lists, the unacknowledged messages, and the staged messages of a migration
``live_workers``   signs of workers that still consume from it
``tenant_source``  the messages of a partition on their way back, or by ``app/api/move.py`` to another queue
"""
