"""A part of the worker that takes part in the life of tasks, and the order of these parts."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["ORDER", "TaskSubscriber"]

#: The order in which a request passes the gates, and in which the subscribers get each event.
ORDER = (
    "zookeeper",  # counts a crash, before Celery requeues the message
    "lease",  # ends the message on a tenant broker
    "ready_requests",  # starts the next request, after the message of this one has ended
    "dedup_locks",  # releases the lock of the task, before its message is released
    "singleton_queues",  # starts the next message, after the lock of this one was released
    "tracing",  # records what the others have done
)


class TaskSubscriber:
    """A part of the worker that takes part in the life of tasks. A method that is not defined does nothing.

    Attributes:
        role: its place in :data:`ORDER`.
    """

    role: ClassVar[str]

    def follows(self, request: Any) -> bool:
        """Return whether the subscriber gets the events of this task; asked when the pool is offered it."""
        raise NotImplementedError

    def offered(self, request: Any) -> None:
        """Prepare a request for the pool, before Celery's own check of revoked tasks.

        Raises:
            TaskRevokedError: the pool must not get the request. Celery frees its slot.
        """

    def refused(self, request: Any) -> None:
        """Note that the pool does not get the request: it is revoked, invalid, or a subscriber refused it."""

    def failed_to_start(self, request: Any) -> None:
        """Note that Celery or the pool raised an error on the way to the pool."""

    def accepted(self, request: Any) -> None:
        """Note that the task starts, or has started in a child process.

        Raises:
            TaskRevokedError: a task of a thread or greenlet must not start.
        """

    def ending(self, request: Any, info: Any, crashed: bool) -> None:
        """Note the outcome, before Celery acknowledges or rejects the message.

        Args:
            request: the request.
            info: the ``ExceptionInfo`` of a task that has failed; None after a success.
            crashed: the process of the task was lost.
        """

    def ended(self, request: Any, info: Any) -> None:
        """Note the end of a task that was in the pool: once, after Celery's bookkeeping."""

    def forgotten(self, request: Any) -> None:
        """Note that the pool has dropped the task, which does not run."""

    def exhausted(self, message: Any, why: str) -> None:
        """Note that a message became a dead letter, because its deliveries have lost their workers."""
