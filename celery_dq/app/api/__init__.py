"""``app.dq``: the interface for programs that look at queues and change them.

``api``                      ``DQ``, the object behind ``app.dq``; ``dq_of(app)``; queues by name; the workers
``broker``                   the app's connection to the Redis of its queues
``pauses``                   pause a tenant or a whole queue
``audit``                    who changed queues and quotas; progress of calls that change many messages
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
``message_edits``            read and replace the arguments of a stored message, its time and its priority
``zookeeper_queues``         queues and dead letters where the broker is ZooKeeper, without tenants
``dedup``                    the dedup locks of a queue
``buffer``                   the buffered producer of the app, and its messages on disk
``history``                  rates and waiting times of a queue over the last hour

User programs, the command line and the Django integration call this package.
"""
