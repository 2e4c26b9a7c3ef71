"""The checks of ``celery dq doctor`` and of Django's system checks.

``finding``           one result: a severity, a text and a remedy
``settings_checks``   faults that can be found without a connection
``server_checks``     faults that only the servers can answer for
``queue_checks``      queues that are probably typos; faults of queues with several partitions
``doctor``            runs all and returns the findings in order; warns about the state of the queues

``celery_dq.cli`` and ``celery_dq.contrib.django`` call ``doctor``. A check changes nothing.
"""
