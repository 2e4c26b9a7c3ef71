"""Which message goes out next: lanes, linger, batches, limits. Pure.

A *lane* is what keeps its order: one destination, numbered by one producer, with one batch in flight. A batch
that failed is sent again as it was, for a broker that drops what it has seen. When the memory is full, or
older messages of the lane are on disk only, a message is *stored*: it is counted here, and loaded later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

__all__ = ["Buffer", "Lane", "Limits", "Message"]

#: Bytes of payload after which a batch is full, whatever its count.
BATCH_BYTES = 1_000_000
#: The age of the oldest message is known to so many seconds.
MARK_S = 0.01


class Message(NamedTuple):
    """One message on its way: its number in the lane, its task id, and what the broker gets."""

    sequence: int
    id: bytes
    payload: bytes


@dataclass(frozen=True)
class Limits:
    """How much is held, and how it is cut.

    :param batch_size: messages in a batch.
    :param linger_s: seconds that a message waits for company.
    :param max_messages: messages in memory, in all lanes together.
    :param max_bytes: bytes of their payloads and ids.
    """

    batch_size: int = 500
    linger_s: float = 0.005
    max_messages: int = 100_000
    max_bytes: int = 64 * 1024 * 1024


class Lane:
    """The messages of one producer for one destination, in order."""

    __slots__ = (
        "adopted",
        "done",
        "failures",
        "first_at",
        "in_flight",
        "key",
        "marks",
        "most",
        "next_sequence",
        "producer",
        "retry_at",
        "stored",
        "used_at",
        "waiting",
    )

    def __init__(self, key: str, producer: bytes, *, adopted: bool = False) -> None:
        self.key = key
        self.producer = producer
        self.adopted = adopted
        self.next_sequence = 1
        #: The last one that was delivered (or rejected).
        self.done = 0
        self.waiting: deque[Message] = deque()
        self.in_flight: list[Message] = []
        #: How many messages, later than those in memory, are on disk only.
        self.stored = 0
        self.first_at = 0.0
        self.retry_at = 0.0
        self.used_at = 0.0
        self.failures = 0
        #: Size of the next batch, while it is smaller than usual to find out who is refused; else 0.
        self.most = 0
        self.marks: deque[tuple[int, float]] = deque()

    @property
    def busy(self) -> bool:
        """Whether it holds anything, in memory or on disk."""
        return bool(self.waiting or self.in_flight or self.stored)

    @property
    def pending(self) -> int:
        """How many messages are not delivered yet."""
        return len(self.waiting) + len(self.in_flight) + self.stored


def size_of(message: Message) -> int:
    """The bytes that a message counts for."""
    return len(message.payload) + len(message.id)


class Buffer:
    """All lanes of a process. Not thread-safe; times are monotonic seconds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.messages = 0
        self.bytes = 0
        self.stored = 0
        #: Lanes that hold something, by producer, in the order in which they take turns.
        self.active: dict[bytes, Lane] = {}

    @property
    def pending(self) -> int:
        """Messages that are not delivered yet, in memory and on disk."""
        return self.messages + self.stored

    def admits(self, lane: Lane, size: int) -> bool:
        """Whether a message of `size` bytes may be held in memory: there is room, and no older one is not."""
        limits = self.limits
        return (
            not lane.stored and self.messages < limits.max_messages and self.bytes + size <= limits.max_bytes
        )

    def add(self, lane: Lane, message: Message, now: float) -> None:
        """Hold a message in memory."""
        if not lane.waiting:
            lane.first_at = now
            if not lane.in_flight:
                self._activate(lane)
        lane.waiting.append(message)
        self.messages += 1
        self.bytes += len(message.payload) + len(message.id)
        marks = lane.marks
        if not marks or now - marks[-1][1] > MARK_S:
            marks.append((message.sequence, now))

    def add_stored(self, lane: Lane, sequence: int, now: float) -> None:
        """Count a message that is on disk only."""
        self._activate(lane)
        lane.stored += 1
        self.stored += 1
        marks = lane.marks
        if not marks or now - marks[-1][1] > MARK_S:
            marks.append((sequence, now))

    def load(self, lane: Lane, messages: Iterable[Message], stored: int, now: float) -> None:
        """Hold messages in memory that were stored; `stored` of the count are settled by that."""
        messages = list(messages)
        if messages and not lane.waiting:
            lane.first_at = now - self.limits.linger_s  # they have lingered
        lane.waiting.extend(messages)
        self.messages += len(messages)
        self.bytes += sum(map(size_of, messages))
        stored = min(stored, lane.stored)
        lane.stored -= stored
        self.stored -= stored
        self._tidy(lane, now)

    def wants_loading(self) -> Lane | None:
        """A lane whose next batch is on disk; None when there is none."""
        for lane in self.active.values():
            if lane.stored and len(lane.waiting) < self.limits.batch_size:
                return lane
        return None

    def take(self, now: float, *, hurry: bool = False) -> Lane | None:
        """Put the next batch in flight (or the one that failed, again) and return its lane.

        :param hurry: let nothing linger.
        """
        ready = None
        for lane in self.active.values():
            if self._due(lane, hurry) <= now:
                if lane.adopted:  # what a dead process left comes first
                    ready = lane
                    break
                ready = ready or lane
        if ready is None:
            return None
        # To the end of the line.
        del self.active[ready.producer]
        self.active[ready.producer] = ready
        if not ready.in_flight:
            self._fill(ready, now)
        return ready

    def _fill(self, lane: Lane, now: float) -> None:
        most = lane.most or self.limits.batch_size
        lane.most = 0
        waiting, batch, size = lane.waiting, lane.in_flight, 0
        while waiting and len(batch) < most and size < BATCH_BYTES:
            message = waiting.popleft()
            batch.append(message)
            size += len(message.payload)
        lane.first_at = now

    def _due(self, lane: Lane, hurry: bool) -> float:
        """When the lane's next batch shall go; infinity while it has none in memory."""
        if lane.in_flight:
            return lane.retry_at
        if not lane.waiting:
            return float("inf")
        full = len(lane.waiting) >= self.limits.batch_size
        return max(
            lane.retry_at, lane.first_at + (0 if hurry or full or lane.stored else self.limits.linger_s)
        )

    def next_due(self, *, hurry: bool = False) -> float:
        """When :meth:`take` will have something; infinity when nothing waits."""
        return min((self._due(lane, hurry) for lane in self.active.values()), default=float("inf"))

    def done(self, lane: Lane, now: float) -> list[Message]:
        """The batch in flight is delivered: return it."""
        batch, lane.in_flight = lane.in_flight, []
        lane.failures = 0
        lane.retry_at = 0.0
        self.messages -= len(batch)
        self.bytes -= sum(map(size_of, batch))
        lane.used_at = now
        if batch:
            last = lane.done = batch[-1].sequence
            marks = lane.marks
            while len(marks) > 1 and marks[1][0] <= last + 1:
                marks.popleft()
        self._tidy(lane, now)
        return batch

    def done_in_part(self, lane: Lane, count: int, now: float) -> list[Message]:
        """Of the batch in flight the first `count` are delivered: return them; the others stay in flight."""
        rest = lane.in_flight[count:]
        del lane.in_flight[count:]
        batch = self.done(lane, now)
        lane.in_flight = rest
        if rest:
            self._activate(lane)
        return batch

    def failed(self, lane: Lane, retry_at: float) -> None:
        """The batch in flight was not delivered, or nobody knows: the same one goes again, at `retry_at`."""
        lane.failures += 1
        lane.retry_at = retry_at

    def split(self, lane: Lane) -> bool:
        """Somebody in the batch in flight is refused: halve it. False when it has one message only."""
        half = len(lane.in_flight) // 2
        if not half:
            return False
        lane.waiting.extendleft(reversed(lane.in_flight[half:]))
        # The neighbours go in small batches as well until the bad one is found.
        lane.most = half
        del lane.in_flight[half:]
        return True

    def oldest_s(self, now: float) -> float:
        """For how many seconds the oldest message has been here; 0 when there is none."""
        times = [lane.marks[0][1] for lane in self.active.values() if lane.marks]
        return now - min(times) if times else 0.0

    def clear(self) -> list[tuple[Lane, Message]]:
        """Give up what is in memory, and return it."""
        left = [
            (lane, message)
            for lane in self.active.values()
            for message in (*lane.in_flight, *islice(lane.waiting, None))
        ]
        self.active.clear()
        self.messages = self.bytes = self.stored = 0
        return left

    def _activate(self, lane: Lane) -> None:
        self.active.setdefault(lane.producer, lane)

    def _tidy(self, lane: Lane, now: float) -> None:
        if lane.busy:
            self._activate(lane)
        else:
            self.active.pop(lane.producer, None)
            lane.marks.clear()
            lane.used_at = now
