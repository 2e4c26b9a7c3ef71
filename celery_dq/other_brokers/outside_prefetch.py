"""Requests that wait outside the prefetch of their worker, so that the broker delivers other messages."""

from __future__ import annotations

from typing import Any

from celery.utils.quorum_queues import detect_quorum_queues

__all__ = ["OutsidePrefetch"]

#: Limit of the requests outside. Further ones count, so that a worker never fetches a whole queue into
#: memory.
MOST_OUTSIDE = 10_000


class OutsidePrefetch:
    """Widens the prefetch of a consumer by one for each waiting request.

    Where RabbitMQ counts by consumer (quorum queues, and all queues since 4.0), it does not change the
    prefetch of an existing consumer. There the worker makes a new consumer. Messages of the old consumer do
    not count for the new one, and stay unacknowledged in the channel.

    Args:
        consumer: Celery's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._outside: set[int] = set()
        #: Number of requests that wait and count for the present consumer.
        self._counted = 0

    def add(self, request: Any) -> None:
        """Make a request wait outside the prefetch. Idempotent."""
        if len(self._outside) >= MOST_OUTSIDE or id(request) in self._outside:
            return
        self._outside.add(id(request))
        if not self._by_consumer:
            self._consumer.qos.increment_eventually()
            if self._consumer.hub is not None:
                # Celery's loop checks for a change before it waits, and may get a message after the check.
                self._consumer.timer.call_after(0, self._update)
            return
        self._counted += 1
        # Half of the prefetch count: each new consumer lets the worker get that many messages more.
        if self._counted == max(self._consumer.initial_prefetch_count // 2, 1):
            self._consumer.timer.call_after(0, self._consume_again)

    def remove(self, request: Any) -> None:
        """Note that a request does not wait any longer."""
        if id(request) in self._outside:
            self._outside.discard(id(request))
            if not self._by_consumer:
                self._consumer.qos.decrement_eventually()

    def clear(self) -> None:
        """Forget all requests: the connection was lost, and the prefetch count with it."""
        self._outside.clear()
        self._counted = 0

    @property
    def _by_consumer(self) -> bool:
        """Whether the broker counts unacknowledged messages by consumer.

        Celery decides by the same function, but keeps its answer only since 5.7.
        """
        app, transport = self._consumer.app, self._consumer.connection.transport
        return bool(
            app.conf.worker_detect_quorum_queues and detect_quorum_queues(app, transport.driver_type)[0]
        )

    def _update(self) -> None:
        qos = self._consumer.qos
        if qos.prev != qos.value:
            qos.update()

    def _consume_again(self) -> None:
        if self._counted:
            self._counted = 0
            self._consumer.task_consumer.cancel()
            self._consumer.task_consumer.consume()
