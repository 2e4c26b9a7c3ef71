"""Singleton queues: one elected worker consumes each of them.

``elections``    from the setting ``dq_election`` to candidates
``leaderships``  the queues that this worker leads, as the transport sees them, and their balance
``guard``        ends a process whose term is no longer confirmed while it runs a message

``celery_dq.worker.singleton`` makes these objects in a worker. The transport asks them through the protocol
``Leaderships`` in ``celery_dq.protocols``, and does not import this package.
"""
