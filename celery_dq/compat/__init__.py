"""Code that touches private names of Celery, kombu, billiard, py-amqp, redis-py or kazoo.

``guard``             the names, their purpose, the releases that were read, and the check of all at start-up
``celery_calls``      a call: the running task, the app, the task, the result
``kombu_messages``    a message: prepared publishes, errors, confirms, and whether its JSON is that of kombu
``redis_sockets``     the socket of a connection to Redis
``kazoo_connection``  the connection to ZooKeeper, and requests that kazoo does not know
``beat_sync``         the save and the order of a wrapped scheduler
``prefork_pool``      keeps its jobs over a flush, notices deaths at once, and reads last results promptly
``retry_records``     keeps a retry whose record fails
``task_ends``         which ends of a task are failures for good

All other packages call these modules. Code outside of this package uses public interfaces only, except for
the places that the architecture tests list.
"""
