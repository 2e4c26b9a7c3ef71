"""Messages that this process holds under a lease, and their acks; no store is known here.

``message``             the message that a consumer receives; the prefetch count and acks of its channel
``in_flight_messages``  all held messages, their states, and when their leases were renewed
``pending_acks``        one held message, the acks that the store does not have yet, and the calls for them

The channels of the tenant broker and of ``any_store`` use them. ZooKeeper has messages in flight of
its own, and the same prefetch count.
"""
