"""Messages that this process holds under a lease, and their acks; no store is known here.

``in_flight_message``   one of the messages that the process holds, and the pending acks of a partition
``in_flight_messages``  every held message, its pending ack, and when its lease was renewed
``message``             the message that a consumer receives
``qos``                 the prefetch count of a channel, which acknowledges messages
``send_acks``           sends pending acks and waits, for stores and the heartbeat of Redis

The channels of the tenant broker and of ``any_store`` use them. ZooKeeper has messages of its own.
"""
