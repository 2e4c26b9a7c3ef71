"""The Django app: ``INSTALLED_APPS += ["celery_dq.contrib.django"]``.

Settings carry the namespace that the project gave to Celery, e.g. ``CELERY_DQ_LEASE`` with the usual
``namespace="CELERY"``.

``apps``    finds the Celery app of the project, calls ``celery_dq.setup``, and registers the system checks
``views``   the metrics for Prometheus
``models``, ``outbox``   the calls in a transaction, and the relay that publishes them
``tasks``, ``task_backend``, ``task_tenant``   the backend of Django's own tasks

Django loads this package. No other package of celery-dq imports Django.
"""
