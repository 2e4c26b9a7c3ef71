"""Elections, and what a leader may trust.

``career``              a term, and until when it may be trusted; pure
``redis_election``      an election by a lease in Redis
``zookeeper_election``  an election by ZooKeeper's recipe
``elector``             what every election offers; stands for one, and keeps a career in its term
``runner``              careers of user programs, outside of Celery

The Lua scripts beside them are the lease of ``redis_election``. ``celery_dq.singleton`` and
``celery_dq.beat`` build on this package.
"""
