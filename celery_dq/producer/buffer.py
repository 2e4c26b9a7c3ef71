"""The order of buffered messages: lanes, linger, batches, limits. Pure.

A *lane* keeps the order of the messages for one destination. One producer sequence numbers them, and one
batch is in flight. A failed batch is sent again unchanged, so that the broker can recognise it. When the
memory is full, or older messages of the lane are on disk only, a message is *stored*: the buffer counts it,
and loads it later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["MessageBuffer", "Lane", "Limits", "BufferedMessage"]

#: Bytes of payload after which a batch is full, even with fewer messages than `batch_size`.
BATCH_BYTES = 1_000_000
#: Resolution in seconds of the age of the oldest message.
MARK_S = 0.01


class BufferedMessage(NamedTuple):
    """One buffered message.

    Attributes:
        sequence: Number of the message in its lane.
        id: The task id.
        payload: Packed message, which the sender unpacks.
    """

    sequence: int
    id: bytes
    payload: bytes


@dataclass(frozen=True)
class Limits:
    """Limits of memory and of batches.

    Attributes:
        batch_size: Messages in a batch, at most.
        linger_s: Seconds that a message waits for further messages of its batch.
        max_messages: Messages in memory, in all lanes together.
        max_bytes: Bytes of payloads and ids in memory, in all lanes together.
    """

    batch_size: int = 500
    linger_s: float = 0.005
    max_messages: int = 100_000
    max_bytes: int = 64 * 1024 * 1024


class Lane:
    """The messages of one producer sequence for one destination, in order.

    Args:
        key: Name of the destination.
        producer: Producer sequence, 16 bytes.
        adopted: Whether the messages come from a dead process.

    Attributes:
        done: Sequence of the last message that was delivered or rejected.
        flush_to: Sequence up to which messages do not linger.
        stored: Number of messages, after those in memory, that are on disk only. An adopted lane counts
            files.
        most: Size of the next batch while a refused message is searched for; else 0.
        marks: Sequences with the times of their arrival, for the age of the oldest message.
    """

    __slots__ = (
        "adopted",
        "done",
        "failures",
        "first_at",
        "flush_to",
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
        self.done = 0
        self.flush_to = 0
        self.waiting: deque[BufferedMessage] = deque()
        self.in_flight: list[BufferedMessage] = []
        self.stored = 0
        self.first_at = 0.0
        self.retry_at = 0.0
        self.used_at = 0.0
        self.failures = 0
        self.most = 0
        self.marks: deque[tuple[int, float]] = deque()

    @property
    def busy(self) -> bool:
        """Whether the lane holds messages, in memory or on disk."""
        return bool(self.waiting or self.in_flight or self.stored)

    @property
    def pending(self) -> int:
        """Count of the messages that are not delivered yet."""
        return len(self.waiting) + len(self.in_flight) + self.stored


def size_of(message: BufferedMessage) -> int:
    """Return the bytes that a message counts towards `Limits.max_bytes`."""
    return len(message.payload) + len(message.id)


class MessageBuffer:
    """All lanes of a process. Not thread-safe; times are monotonic seconds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.messages = 0
        self.bytes = 0
        self.stored = 0
        #: Lanes that hold messages, by producer sequence, in the order of their turns.
        self.active: dict[bytes, Lane] = {}

    @property
    def pending(self) -> int:
        """Count of the messages that are not delivered yet, in memory and on disk."""
        return self.messages + self.stored

    def admits(self, lane: Lane, size: int) -> bool:
        """Return whether a message of `size` bytes fits in memory, and no older one is on disk only."""
        limits = self.limits
        return (
            not lane.stored and self.messages < limits.max_messages and self.bytes + size <= limits.max_bytes
        )

    def add(self, lane: Lane, message: BufferedMessage, now: float) -> None:
        """Add a message to the memory."""
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

    def load(self, lane: Lane, messages: Iterable[BufferedMessage], stored: int, now: float) -> None:
        """Add messages to the memory that were stored.

        Args:
            lane: Their lane.
            messages: The messages, in order.
            stored: By how much the count of stored messages drops.
            now: Monotonic time in seconds.
        """
        messages = list(messages)
        if messages and not lane.waiting:
            lane.first_at = now - self.limits.linger_s  # stored messages do not linger
        lane.waiting.extend(messages)
        self.messages += len(messages)
        self.bytes += sum(map(size_of, messages))
        stored = min(stored, lane.stored)
        lane.stored -= stored
        self.stored -= stored
        self._tidy(lane, now)

    def wants_loading(self) -> Lane | None:
        """Return a lane whose next batch is on disk; None when there is none."""
        for lane in self.active.values():
            if lane.stored and len(lane.waiting) < self.limits.batch_size:
                return lane
        return None

    def flush_soon(self) -> None:
        """Let no message that is in the buffer now linger."""
        for lane in self.active.values():
            lane.flush_to = lane.next_sequence - 1

    def take(self, now: float) -> Lane | None:
        """Put the next batch in flight, or the failed one again.

        Args:
            now: Monotonic time in seconds.

        Returns:
            The lane of the batch; None when no batch is due.
        """
        ready = None
        for lane in self.active.values():
            if self._due(lane) <= now:
                # Messages of a dead process go first, unless their part of the broker does not take them.
                if lane.adopted and not lane.failures:
                    ready = lane
                    break
                ready = ready or lane
        if ready is None:
            return None
        # Move the lane to the end, so that lanes take turns.
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

    def _due(self, lane: Lane) -> float:
        """Return when the next batch of a lane is due; infinity while none is in memory."""
        if lane.in_flight:
            return lane.retry_at
        if not lane.waiting:
            return float("inf")
        full = len(lane.waiting) >= self.limits.batch_size
        at_once = full or lane.stored or lane.waiting[0].sequence <= lane.flush_to
        return max(lane.retry_at, lane.first_at + (0 if at_once else self.limits.linger_s))

    def next_due(self) -> float:
        """Return when the next batch of any lane is due; infinity when none is in memory."""
        return min(map(self._due, self.active.values()), default=float("inf"))

    def done(self, lane: Lane, now: float) -> list[BufferedMessage]:
        """Remove the delivered batch in flight, and return it."""
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

    def done_in_part(self, lane: Lane, count: int, now: float) -> list[BufferedMessage]:
        """Remove and return the first `count` messages of the batch in flight. The rest stays in flight."""
        rest = lane.in_flight[count:]
        del lane.in_flight[count:]
        batch = self.done(lane, now)
        lane.in_flight = rest
        if rest:
            self._activate(lane)
        return batch

    def failed(self, lane: Lane, retry_at: float, others_from: float = 0.0) -> None:
        """Send the batch in flight again at `retry_at`, because it may not have been delivered.

        Args:
            lane: The lane of the batch.
            retry_at: Monotonic time in seconds.
            others_from: Time before which no lane is tried again that has failed.
        """
        lane.failures += 1
        lane.retry_at = retry_at
        for each in self.active.values():
            if each.failures:
                each.retry_at = max(each.retry_at, others_from)

    def split(self, lane: Lane) -> bool:
        """Halve the batch in flight to find the refused message. Return False when it has only one."""
        half = len(lane.in_flight) // 2
        if not half:
            return False
        lane.waiting.extendleft(reversed(lane.in_flight[half:]))
        # The second half stays in small batches too, because the refused message may be in it.
        lane.most = half
        del lane.in_flight[half:]
        return True

    def oldest_s(self, now: float) -> float:
        """Return the age of the oldest message in seconds; 0 when there is none."""
        times = [lane.marks[0][1] for lane in self.active.values() if lane.marks]
        return now - min(times) if times else 0.0

    def _activate(self, lane: Lane) -> None:
        self.active.setdefault(lane.producer, lane)

    def _tidy(self, lane: Lane, now: float) -> None:
        if lane.busy:
            self._activate(lane)
        else:
            self.active.pop(lane.producer, None)
            lane.marks.clear()
            lane.used_at = now
