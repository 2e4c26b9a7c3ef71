"""The data of the tenant broker in Redis, and the calls that change it.

``slot_map``               the masters of a Redis Cluster and their slots
``cluster_connection``, ``cluster_client``   one connection to all of its nodes
``address``                the parts of a broker URL besides host and port
``message_ids``            message ids, task ids and delivery tags; pure
``script_calls``           the scripts, a call of one, calls on many queues, a connection that does not wait
``partition``              one partition as a set of script calls with their answers; a queue with its options
``home``                   the partition in which a tenant lives, and ids that name a tenant; pure
``whole_queue``            reads and calls on many partitions in few round trips
``publisher``              publishes messages, each once
``asyncio_publisher``, ``asyncio_connections``   publishes from coroutines
``quotas``                 quotas from the settings
``rounds``                 the same steps on many partitions, in the round trips of one
``transient``              reply queues that end with their consumer
``server_checks``, ``server_errors``, ``rights``, ``full_server``   what a server must offer, and its errors

The floors above call ``Partition`` and ``RedisPublisher``; keys are spelled in ``celery_dq.keys`` only.
"""
