"""The tenant broker: ``dq-redis://``, ``dq-rediss://``, ``dq-sentinel://``, ``dq-rediscluster://``.

``transport``, ``sentinel``, ``cluster``  the kombu transports and their channels
``connection_context``       what all channels of one connection share
``consuming``                how messages get from Redis to a consumer
``consumer_identity``        one process as a consumer: its name, calls in doubt, lost data
``store``                    the data in Redis: partitions, records, replies, publishing
``lua``                      one script per action, with ``lua/include``

Imports go down this list. kombu calls ``transport``; every change in Redis is one script.
"""
