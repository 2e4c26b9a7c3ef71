"""celery-dq in a Django project: ``INSTALLED_APPS += ["celery_dq.contrib.django"]``.

Settings carry the namespace that the project gave to Celery, so ``CELERY_DQ_LEASE`` with the usual
``namespace="CELERY"``. The project's Celery app is found by itself; see :mod:`.conf`.
"""
