"""Requests of a singleton queue that are ready for the pool, and wait for the end of their predecessor.

Claiming a message and making its request takes a while. In a prefork pool the only child would be idle for
that time between two messages. So the requests are made ahead, and wait in the worker's main process. A
request goes to the pool in the callback that reports the end of its predecessor, if that end is final. No
child ever has a message whose predecessor may still run, may run again, or died without a report. A waiting
request can be released as if its message had not been delivered.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from celery_dq.transport.in_flight import InFlightMessage, Message
from celery_dq.worker.task_events import TaskEvents, TaskSubscriber, stops


class ReadyRequests(TaskSubscriber):
    """Orders requests between Celery's consumer and the pool. Used in the thread of the event loop only.

    Args:
        consumer: Celery's consumer.
        events: the events of its tasks.
    """

    role = "ready_requests"

    def __init__(self, consumer: Any, events: TaskEvents) -> None:
        self._consumer = consumer
        self._run = events.add_gate(self.role, self.add)
        events.subscribe(self)
        self._passing = (*consumer.connection_errors, *consumer.conninfo.channel_errors)
        # Delivery tag of the predecessor to the predecessor and the waiting request.
        self._waiting: dict[str, tuple[InFlightMessage, Any]] = {}
        self._over: deque[str] = deque()
        self._lets = False

    def add(self, request: Any) -> Any:
        """Run a request, at once or when its predecessor is over."""
        message = request.message
        before = message.predecessor() if isinstance(message, Message) else None
        if before is None or before.has_returned or not message.may_deliver():
            # The pool refuses it if its predecessor will return, or the term is over.
            return self._run(request)
        self._waiting[before.tag] = (before, request)
        return None

    def follows(self, request: Any) -> bool:
        """See :class:`TaskSubscriber`."""
        return isinstance(request.message, Message)

    def refused(self, request: Any) -> None:
        """Start the successor of a message that the pool does not get."""
        self.end(request.message.delivery_tag)

    def ended(self, request: Any, info: Any) -> None:
        """Start the successor of a message whose task has ended."""
        self.end(request.message.delivery_tag)

    def end(self, tag: str) -> None:
        """Start the successor of a message that is over, or that will return."""
        self._over.append(tag)
        if self._lets:
            return  # the pool has refused a request: the outer call continues, so that the stack stays flat
        self._lets = True
        try:
            while self._over and not stops(self._consumer):
                waiting = self._waiting.pop(self._over.popleft(), None)
                if waiting is not None:
                    self._start(waiting[1])
        finally:
            self._lets = False
            self._over.clear()

    def _start(self, request: Any) -> None:
        try:
            self.add(request)
        except self._passing:
            request.message.release("unstarted")
            raise

    def awaits_end_of(self, tag: str) -> bool:
        """Whether a request waits for the message with this delivery tag."""
        return tag in self._waiting

    @property
    def has_startable(self) -> bool:
        """Whether a request waits for a message that ended without the pool: revoked, expired or released."""
        return any(before.done for before, _ in self._waiting.values())

    def start_ready(self) -> None:
        """Start the requests whose predecessor ended without the pool."""
        for tag in [tag for tag, (before, _) in self._waiting.items() if before.done]:
            self.end(tag)

    def release_all(self) -> None:
        """Release all waiting requests: the connection is lost, or the worker stops and hands over."""
        waiting = [request.message for _, request in self._waiting.values()]
        self._waiting.clear()
        for message in reversed(waiting):
            message.release("unstarted")
