"""Code that touches private names of Celery, kombu, billiard or kazoo.

Each module says which private names it uses, why, and against which versions it was read. Code outside of
this package is to use public interfaces only; places that do not yet are moved here one by one.

``stopping``      whether a worker stops, from the flags that Celery sets
``pool_deaths``   reports the death of a prefork child at once
``pool_flush``    keeps the tasks of a prefork pool alive over a lost connection
``pool_results``  reads the last results of a prefork pool promptly during shutdown

The boot steps in ``celery_dq.worker`` call these modules.
"""
