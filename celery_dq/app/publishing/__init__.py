"""The path of a call, from ``apply_async`` and ``delay`` to the broker.

``amqp``                ``app.amqp``: checks tenant and priority on every publish
``buffered_call``       ``app.send_task``: chooses between the buffer and the broker
``deadline``            unbuffered calls: one deadline for all steps, and a circuit breaker
``task_apply_async``    a task's ``apply_async`` for plain calls
``message_template``    the message of a task as a template that a call fills in
``template_publish``    publishes a filled-in template on a pooled connection
``recording_producer``  records one publish of Celery's, to make the template from
``dedup_call``          the dedup key of a call, its request to the broker, and the caller's result
``lazy_producer``       a pooled producer that is acquired when it is first used
``result_preparation``  what a call prepares for its result before it is sent

``celery_dq.wiring`` installs these stages. Calls reach ``celery_dq.producer`` or a transport from here.
"""
