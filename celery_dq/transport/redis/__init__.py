"""The tenant broker: ``dq-redis://``, ``dq-rediss://``, ``dq-sentinel://``, ``dq-rediscluster://``.

``transport``, ``sentinel``, ``cluster``  the kombu transports
``connection_context``       what all channels of one connection share
``channel``, ``consuming_channel``  the kombu channel, and its part that consumes
``declared_ahead``           the queues of a worker, declared together
``consuming``                how messages get from Redis to a consumer
``in_flight``                calls in doubt, lost data, the name of a process
``store``                    the data in Redis: partitions, records, replies, publishing
``lua``                      one script per action, with ``lua/include``

Imports go down this list. kombu calls ``transport`` and ``channel``; every change in Redis is one script.
"""
