"""Messages that were claimed and wait for their delivery, in fair order.

A claim takes them in the order of the tenants' turns, but what an earlier claim has taken was claimed first.
A consumer that is busy has its prefetch count full of a loud tenant's messages, and the next claim brings the
one message of a quiet tenant. So the queues take turns here, and in a queue the tenants that have something
here, one message each. Within a tenant, and in a led queue, the order is that of the claims.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from celery_dq.transport.redis.message import Message


class Inbox:
    """What one channel has claimed and not yet delivered.

    One thread puts in and takes out. Another one, the keeper's, may meanwhile give everything back; it
    empties what it finds, and removes nothing.
    """

    def __init__(self) -> None:
        #: By queue, then by tenant. Whose turn is next is first.
        self._lines: dict[str, dict[str, deque[Message]]] = {}
        #: By queue, who had the last turn and has more: to the end when the next message is taken, behind
        #: all who have come meanwhile.
        self._served: dict[str, str] = {}

    def __len__(self) -> int:
        return sum(len(line) for lines in tuple(self._lines.values()) for line in tuple(lines.values()))

    def __bool__(self) -> bool:
        # Asked several times for each message. What the keeper has emptied counts until the next is taken.
        return any(self._lines.values())

    def queues(self) -> tuple[str, ...]:
        """The queues from which something was claimed."""
        return tuple(self._lines)

    def put(self, message: Message) -> None:
        """To the end of its tenant's line, or of the queue's if one leader consumes it."""
        tenant = message.record.tenant if message.permit is None else ""
        lines = self._lines.get(message.queue)
        if lines is None:
            lines = self._lines[message.queue] = {}
        line = lines.get(tenant)
        if line is None:
            line = lines[tenant] = deque()
        line.append(message)

    def take(self) -> Message | None:
        """Take the oldest message of the tenant whose turn it is, of the queue whose turn it is."""
        for queue in tuple(self._lines):
            lines = self._lines[queue]
            if len(self._lines) > 1:
                self._lines[queue] = self._lines.pop(queue)  # to the end
            served = self._served.pop(queue, None) if len(lines) > 1 else None
            if served is not None:
                lines[served] = lines.pop(served)
            while lines:
                tenant, line = next(iter(lines.items()))
                try:
                    message = line.popleft()
                except IndexError:  # the keeper has given it back
                    self._served.pop(queue, None)
                    del lines[tenant]
                    continue
                if line:
                    self._served[queue] = tenant
                else:
                    self._served.pop(queue, None)
                    del lines[tenant]
                return message
        return None

    def take_back(self, queue: str | None = None) -> Iterator[Message]:
        """Take what lies here, the youngest of each tenant first; of one queue, or all."""
        for name in self.queues() if queue is None else (queue,):
            for line in tuple(self._lines.get(name, {}).values()):
                while line:
                    with contextlib.suppress(IndexError):  # the consuming thread was faster
                        yield line.pop()
