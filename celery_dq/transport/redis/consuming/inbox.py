"""Holds claimed messages in fair order until their delivery.

Each claim takes messages in the order of the tenants' turns, but messages of earlier claims came first. The
inbox of a busy consumer may be full of messages of one tenant when a claim brings the single message of
another tenant. So the queues take turns here, and within a queue the tenants, one message each. The turn of a
queue lasts :data:`TURN_S`, or one message: acks of one queue travel together, so each switch costs a call.
Within a tenant, and in a singleton queue, the order is that of the claims. Discards of a queue come after all
of its messages.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator

from celery_dq.transport.in_flight.message import Message

#: Seconds for which a queue keeps its turn. Messages may wait for many times as long after their claim.
TURN_S = 0.002


class Inbox:
    """The messages that one channel has claimed and not yet delivered.

    One thread adds and takes messages. The consumer thread may release all of them at the same time. It
    empties the deques, and removes no entry of the dictionaries.
    """

    def __init__(self) -> None:
        #: Messages by queue, then by tenant (None for discards). The first entry has the next turn. Deques
        #: that the consumer thread has emptied still count, because this is looked at many times per message.
        self.waiting: dict[str, dict[str | None, deque[Message]]] = {}
        #: By queue, the tenant that had the last turn and has more messages. It moves to the end when the
        #: next message is taken, behind all tenants that were added since.
        self._served: dict[str, str | None] = {}
        #: The queue whose turn it is, and the monotonic time at which its turn began.
        self._turn: tuple[str, float] = ("", 0.0)

    def __len__(self) -> int:
        return sum(len(line) for lines in tuple(self.waiting.values()) for line in tuple(lines.values()))

    @property
    def has_messages(self) -> bool:
        """Whether the inbox holds a message that is not a discard."""
        for lines in tuple(self.waiting.values()):
            for name, line in tuple(lines.items()):
                if line and name is not None:
                    return True
        return False

    @property
    def message_count(self) -> int:
        """The number of messages in the inbox, without the discards."""
        count = 0
        for lines in tuple(self.waiting.values()):
            for name, line in tuple(lines.items()):
                if name is not None:
                    count += len(line)
        return count

    def queues(self) -> tuple[str, ...]:
        """Return the names of the queues of which the inbox holds messages."""
        return tuple(name for name, lines in tuple(self.waiting.items()) if any(tuple(lines.values())))

    def add(self, message: Message) -> None:
        """Append *message* to those of its tenant or singleton queue, or to the discards of its queue."""
        tenant = message.record.tenant if message.permit is None else ""
        name = None if message.discard else tenant
        lines = self.waiting.get(message.queue)
        if lines is None:
            lines = self.waiting[message.queue] = {}
        line = lines.get(name)
        if line is None:
            line = lines[name] = deque()
        line.append(message)

    def take_next(self, now: float) -> Message | None:
        """Remove and return the oldest message of the next tenant of the next queue; None when empty.

        Args:
            now: Monotonic time.
        """
        while self.waiting:
            queue, lines = next(iter(self.waiting.items()))
            if queue == self._turn[0] and now >= self._turn[1] + TURN_S and len(self.waiting) > 1:
                self.waiting[queue] = self.waiting.pop(queue)  # to the end
                queue, lines = next(iter(self.waiting.items()))
            served = self._served.pop(queue, None) if len(lines) > 1 else None
            if served is not None:
                lines[served] = lines.pop(served)
            while lines:
                tenant, line = next(iter(lines.items()))
                if tenant is None and len(lines) > 1:
                    lines[None] = lines.pop(None)
                    continue
                try:
                    message = line.popleft()
                except IndexError:  # the consumer thread has released it
                    self._served.pop(queue, None)
                    del lines[tenant]
                    continue
                if queue != self._turn[0]:
                    self._turn = (queue, now)
                if line:
                    self._served[queue] = tenant
                else:
                    self._served.pop(queue, None)
                    del lines[tenant]
                    if not lines:
                        self._remove(queue)
                return message
            self._remove(queue)
        return None

    def _remove(self, queue: str) -> None:
        """Remove a queue without messages, whose turn is over."""
        del self.waiting[queue]
        if queue == self._turn[0]:
            self._turn = ("", 0.0)

    def take_partitions(self, prefixes: Collection[str]) -> Iterator[Message]:
        """Remove and yield the messages of some partitions; per tenant, the youngest first.

        Args:
            prefixes: The prefixes of the keys of the partitions.
        """
        for lines in tuple(self.waiting.values()):
            for line in tuple(lines.values()):
                for message in reversed(tuple(line)):
                    if message.prefix in prefixes:
                        # The consumer thread may take it, or change the deque meanwhile.
                        with contextlib.suppress(ValueError, IndexError):
                            line.remove(message)
                            yield message

    def take_all(self, queue: str | None = None) -> Iterator[Message]:
        """Remove and yield all messages, or those of one queue; per tenant, the youngest first."""
        for name in self.queues() if queue is None else (queue,):
            for line in tuple(self.waiting.get(name, {}).values()):
                while line:
                    with contextlib.suppress(IndexError):  # the consuming thread was faster
                        yield line.pop()
