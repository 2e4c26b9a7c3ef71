"""Takes messages over from the Redis transport of kombu; ``app/api/migration.py`` and the command use it.

``stock_message``  one message, as kombu's transport stores it
``stock_broker``   the lists, the unacknowledged messages, and the staged messages of a migration
``live_workers``   signs of workers that still consume from it
"""
