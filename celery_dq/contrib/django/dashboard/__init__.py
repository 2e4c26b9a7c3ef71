"""The dashboard: pages about queues, tenants, messages, dead letters, dedup locks, leaders and workers.

Every page is HTML, or JSON with ``?format=json``. Names of queues and tenants are in the query string,
because they may hold any character.

``access``        permissions, read-only operation, and the user of ``celery dq web``
``broker_reads``  reads with a deadline, shared by all viewers for a second
``failures``      errors of the broker and of requests as pages with a remedy
``links``, ``numbers``   addresses of pages, and numbers in forms
``views``         the base of pages and of changes: permission, CSRF, headers, formats, confirmation
``queues``, ``tenants``, ``messages``, ``dead_letters``, ``dedup_locks``, ``processes``, ``audit``   the pages
``quotas``, ``pauses``, ``message_edits``, ``letter_edits``, ``replays``   changes
``sampler``, ``plots``   the history of queues
``letter_filter``, ``times``   the dead letters that are meant, and times in forms
``assets``        style, script and icon
``standalone``    the web server of ``celery dq web``

Templates are in ``templates/celery_dq``. All data come from ``app.dq``; nothing here talks to Redis.
"""
