"""Code that touches private names of Celery, kombu, billiard, py-amqp, redis-py or kazoo.

``table``             the names, their purpose, and the releases that were read
``guard``             checks at start-up that the names exist as they were read
``celery_calls``      a call: the running task, the app, the task, the result
``kombu_publishing``  a message: prepared publishes, errors, serializers, publisher confirms
``redis_sockets``     the socket of a connection to Redis
``kazoo_connection``  the connection to ZooKeeper, and requests that kazoo does not know
``beat_sync``         the save of a wrapped scheduler
``stopping``          whether a worker stops, from the flags that Celery sets
``pools``             the inner pool of a prefork pool
``pool_deaths``       reports the death of a prefork child at once
``pool_flush``        keeps the tasks of a prefork pool alive over a lost connection
``pool_results``      reads the last results of a prefork pool promptly during shutdown

All other packages call these modules. Code outside of this package uses public interfaces only, except for
the places that the architecture tests list.
"""
