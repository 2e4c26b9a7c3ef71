"""The effects of a warm, a soft and a cold shutdown, and the boot step that begins one at once.

A *warm* shutdown (``SIGTERM``) goes through these places, in this order:

1. :class:`PromptStopStep` wakes the worker.
2. The boot steps close: ``singleton`` begins to hand over, and ``allocation`` leaves. Then they stop:
   ``dedup_locks`` withdraws the calls that wait for a dedup lock, ``singleton_sequencer`` ceases to consume
   and requeues the messages that it holds, and ``ready_requests`` releases the requests that wait for their
   turn.
3. ``transport/redis/consuming/delivery.py`` cancels its consumers. It releases the messages that were
   claimed and not delivered (``release.lua``), so that other workers may take them at once.
4. The pool ends its tasks, and each task has its usual events. ``compat/prefork_pool.py`` keeps the jobs that
   a child has begun; ``task_events`` reports the others, and the jobs that a pool of threads cancels, as
   forgotten. The consumer thread sends the acks, and keeps the lease until the last task has ended.
5. The boot steps shut down. ``singleton`` gives leaderships up, ``bootsteps`` notes that no task runs, and
   ``transport/redis/transport.py`` closes. The consumer thread then gives the lease back (``resign.lua``).

``celery control shutdown``, and a lost connection that Celery does not retry, begin at step 2, without a
signal.

A *soft* shutdown (``worker_soft_shutdown_timeout``) waits for tasks in Celery's signal handler, while the
event loop stands still, and then continues as a cold one. :class:`SoftShutdownStep` closes the boot steps
before the wait. A *cold* shutdown (``SIGQUIT``) cancels the tasks in step 4: Celery terminates a child
process, and leaves the redelivery to the broker; ``TaskInPool.cancel`` does the same for a task of a solo or
green pool, which Celery would take for finished. A killed process does none of this: its messages are reaped
when its lease expires.

The handlers of Celery's signals set a flag for the event loop, and do not wake it: Python resumes the wait
that the signal has interrupted. The loop of a stock worker on Redis wakes every second, to poll its broker.
On a tenant broker the loop sleeps until there is an event or a timer is due, for up to five seconds. During
that time an embedded beat would continue, and singleton queues would not be handed over.

A pool of greenlets has no such loop. There Celery waits for messages two seconds at a time, and waits once
more after it has read the flag. The wait on a tenant broker can be interrupted, and is not repeated then.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps, signals

from celery_dq.native import start_thread
from celery_dq.waker import Waker
from celery_dq.worker.bootsteps import ContextStep


class PromptStopStep(bootsteps.StartStopStep):
    """Wakes the event loop of a worker that is to stop, or its transport where there is no loop."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        # Waking the loop is enough: the loop reads the flag.
        self._waker = Waker()
        self._transport: Any = None

    def start(self, consumer: Any) -> None:
        """Register the reader again: the loop forgets its readers at every reconnect."""
        signals.worker_shutting_down.connect(self._wake)
        if consumer.hub is None:
            self._transport = consumer.connection.transport
        else:
            self._waker.attach(consumer.hub)

    def shutdown(self, consumer: Any) -> None:
        """Disconnect the signal and close the sockets: the worker ends."""
        signals.worker_shutting_down.disconnect(self._wake)
        self._waker.close()

    def _wake(self, **_: Any) -> None:
        getattr(self._transport, "interrupt", self._waker.wake)()


class SoftShutdownStep(bootsteps.Step):
    """Ends claims, and hands over, when a soft shutdown begins.

    Otherwise the worker would keep its singleton queues and partitions, and serve them no more.
    """

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._worker = worker
        self._wait, worker.wait_for_soft_shutdown = worker.wait_for_soft_shutdown, self._close_then_wait
        #: See :func:`celery_dq.worker.task_events.stops`. Celery's own flags must not be set before the wait.
        worker.dq_stops_softly = False

    def _close_then_wait(self) -> None:
        consumer = self._worker.consumer
        # Celery cannot wait in the loop of a green pool, so that its cold shutdown begins at once.
        if not consumer.pool.is_green:
            self._worker.dq_stops_softly = True
            # A signal handler must not wait for a lock, because it may have interrupted the holder.
            start_thread(_close_steps, consumer)
        self._wait()


def _close_steps(consumer: Any) -> None:
    for step in consumer.steps:
        if isinstance(step, ContextStep):
            step.close(consumer)
