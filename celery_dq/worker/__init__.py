"""The part that runs in a Celery worker: boot steps, and the events of a task's life.

``bootsteps``                        the base class of the boot steps, and the first one
``task_events``                      the gates before the pool, the events of a task, and their subscribers
``lifecycle``                        what the events of a task mean for its message, and for the capacity
``ready_requests``                   requests of singleton queues that wait for the end of another one
``shutdown``                         what a warm, soft and cold shutdown do; stopping at once
``start_checks``                     checks at start: rights, ignored settings, a typo in ``-Q``
``discards``                         tasks that must not run: cancelled, expired, covered or dead
``singleton``                        singleton queues
``evictions``                        runs that have lost their dedup lock
``zookeeper_step``, ``commands``                   the ZooKeeper broker; remote control

``celery_dq.other_brokers`` has what only brokers without dedup and singleton queues need.
``celery_dq.wiring`` registers the steps with the app, and Celery starts and stops them.
"""
