"""The parts that a Celery app gains from ``celery_dq.setup(app)``.

``timeouts``     connections to publish on, whose steps all have a deadline
``senders``      the way of a buffered message to its broker
``api``          ``app.dq``: queues, quotas, dead letters, dedup locks, the buffer
``mixins``       mixes behaviour into classes that a Celery app uses, and attributes into its requests
``throttling``   the part of ``Throttled`` in the process of the task
``publishing``   the path of a call, from ``apply_async`` to the broker
``checks``       ``celery dq doctor``

``celery_dq.wiring`` puts these parts into an app. Imports go down this list in the order ``checks``,
``publishing``, ``api``, and then the modules above them.
"""
