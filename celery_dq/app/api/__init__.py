"""``app.dq``: the interface for programs that look at queues and change them.

``api``                      ``DQ``, the object behind ``app.dq``, and ``dq_of(app)``
``broker``                   the app's connection to the Redis of its queues
``by_queue_name``            the queues and their dead letters by name, in the broker that the app uses
``pauses``                   pause a tenant or a whole queue
``progress``                 progress of calls that change many messages
``audit``                    who changed queues and quotas
``queues``, ``move``         look at queues, cancel messages, move them to another queue
``cancel``                   cancel tasks in all partitions of queues
``migration``                move messages here from kombu's Redis transport
``return_migration``         move them back
``map_change``               change the number of partitions of a queue, or the spread of a tenant
``tenant_moves``             bring messages to the new partitions of their tenants
``tenant_settings``          quotas and pauses follow their tenants
``leaders``                  the leaders of singleton queues and of other elections
``quotas``                   what a tenant may take
``redis_dead_letters``       look at messages that were given up on, replay or delete them
``task_body``                read the arguments in a stored message, and replace them
``zookeeper_queues``         queues and dead letters where the broker is ZooKeeper, without tenants
``dedup``                    the dedup locks of a queue
``buffer``                   the buffered producer of the app
``durable_revoke``           ``app.control`` with a revoke that new workers learn of too

User programs, the command line and the Django integration call this package.
"""
