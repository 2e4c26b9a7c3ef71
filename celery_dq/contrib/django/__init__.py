"""The Django app: ``INSTALLED_APPS += ["celery_dq.contrib.django"]``.

Settings carry the namespace that the project gave to Celery, e.g. ``CELERY_DQ_LEASE`` with the usual
``namespace="CELERY"``.

``conf``    finds the Celery app of the project
``apps``    calls ``celery_dq.setup`` when the project is ready
``checks``  system checks; with ``manage.py check --deploy`` also those that ask the servers
``views``   the metrics for Prometheus
``tasks``, ``task_backend``   the backend of Django's own tasks

Django loads this package. No other package of celery-dq imports Django.
"""
