"""What a Celery app gains: ``app.dq``, tenants on every publish, a revoke that lasts.

Mirrors the modules of ``celery.app`` (``amqp``, ``control``). ``celery_dq.wiring`` puts it together.
"""
