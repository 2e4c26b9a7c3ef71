"""The part that runs in a Celery worker: boot steps, and the events of a task's life.

``bootsteps``                        the boot steps on a tenant broker
``task_events``                      the gates before the pool, and the events of a task, in one order
``task_subscriber``                  a part of the worker that gets these events
``lifecycle``                        what the events of a task mean for its message on a tenant broker
``capacity``, ``ready_requests``     how much the worker can take
``shutdown``                         what a warm, soft and cold shutdown do; stopping at once
``rights_step``, ``new_queues``, ``unenforced``   checks at start
``discards``                         tasks that must not run: cancelled, expired, covered or dead
``singleton``, ``singleton_sequencer``, ``singleton_message``, ``term_reporter``   singleton queues
``dedup_locks_step``, ``dedup_locks``, ``dedup_requests``, ``unanswered_calls``, ``outside_prefetch``
                                     verdicts where the broker gives none
``followers``, ``declined_calls``, ``evictions``   calls that another call covers
``zookeeper_step``, ``commands``, ``broker``       the ZooKeeper broker; remote control; clients

``celery_dq.wiring`` registers the steps with the app, and Celery starts and stops them.
"""
