"""The dashboard: pages about queues, tenants, messages, dead letters, dedup locks, leaders and workers.

Every page is HTML, or JSON with ``?format=json``. Names of queues and tenants are in the query string,
because they may hold any character.

``access``        permissions, read-only operation, and the user of ``celery dq web``
``broker_reads``  reads with a deadline, shared by all viewers for a second; errors as pages with a remedy
``links``         addresses of pages; style, script and icon
``forms``         numbers and times in forms
``views``         the base of pages and of changes: permission, CSRF, headers, formats, confirmation
``queues``, ``messages``, ``dead_letters``   the pages, with the changes of tasks and dead letters
``status``        the pages of leaders, workers, dedup locks and the audit trail
``quotas``        changes of quotas and pauses
``history``       samples of queues, and plots of them
``standalone``    the web server of ``celery dq web``

Templates are in ``templates/celery_dq``. All data come from ``app.dq``; nothing here talks to Redis.
"""
