"""The part that runs in a Celery worker: boot steps, and the events of a task's life.

``bootsteps``                        the boot steps on a tenant broker
``lifecycle``                        what the events of a task mean for its message
``capacity``, ``ready_requests``     how much the worker can take
``warm_shutdown``                    stopping at once, and what is released by whom
``rights_step``, ``unenforced``      checks at start
``failed_tasks``                   tasks that were given up on
``singleton``, ``singleton_sequencer``, ``singleton_message``, ``term_reporter``   singleton queues
``dedup_locks_step``, ``dedup_locks``, ``dedup_requests``, ``unanswered_calls``, ``outside_prefetch``
                                     verdicts where the broker gives none
``followers``, ``declined_calls``, ``evictions``   calls that another call covers
``zookeeper_step``, ``commands``, ``broker``       the ZooKeeper broker; remote control; clients

``celery_dq.wiring`` registers the steps with the app, and Celery starts and stops them.
"""
