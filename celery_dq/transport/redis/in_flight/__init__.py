"""Messages that this process holds under a lease, and their acks.

``message``             the message that a consumer receives
``in_flight_message``   one of the messages that the process holds, and the pending acks of a partition
``in_flight_messages``  every held message, its pending ack, and when its lease was renewed
``ack_calls``           acks, releases and dead letters as script calls
``script_pipeline``     sends these calls without waiting for answers
``node_pipelines``      does so on a Redis Cluster, on one connection per node
``in_doubt``            claims without an answer, and how their messages are found again
``heartbeat``, ``lease_holder``  renews leases from a thread of its own, and sends pending acks
``server_clock``, ``data_loss``, ``lost_workers``   what heartbeats and claims reveal
``consumer_identity``   one consumer id per process and broker; owns the objects above

``consuming`` adds messages, ``channel`` acknowledges them, and the worker's task events reach both.
"""
