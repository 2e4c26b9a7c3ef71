"""The path of a call, from ``apply_async`` and ``delay`` to the broker.

``pipeline``          ``app.send_task``: the call, its stages, and the last of them, which is Celery's own way
``dedup_stage``       the dedup key of a call, its request to the broker, and the caller's result
``buffer_stage``      chooses between the outbox, the buffer and the broker
``direct_stage``      calls that are not buffered: one deadline for all steps, and a circuit breaker
``template_stage``    sends a plain call from a template of its message
``message_template``  the message of a task as a template, and the parts in which calls differ
``task_apply_async``  may a call use a template? and a task's ``apply_async`` for plain calls
``amqp``              ``app.amqp``: checks tenant and priority on every publish
``async_methods``     ``adelay``, ``aapply_async`` and ``aget`` of tasks, signatures and results
``awaited_producer``  keeps the messages of an awaited call
``awaited_calls``     sends them from a coroutine
``awaited_results``   awaits results by PUB/SUB
``results``           the id of a call, what it prepares for its result, and the result that the caller gets

``celery_dq.wiring`` has the order of the stages. Calls reach ``celery_dq.producer`` or a transport from here.
"""
