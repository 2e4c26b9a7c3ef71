"""Integrations with other frameworks.

Each package below this one is loaded only by its own framework, so that celery-dq needs none of them.

``django``  the Django app ``celery_dq.contrib.django``

Nothing else in celery-dq imports from here, except ``celery dq web``.
"""
