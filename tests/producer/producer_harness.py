"""Buffered producers with a sender that stores messages and can simulate an outage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from celery_dq.clock import ManualClock
from celery_dq.producer.buffer import BufferedMessage, Limits
from celery_dq.producer.buffered_producer import BufferedProducer, Persistence
from celery_dq.producer.flusher import DeliveryCallbacks, Flusher
from celery_dq.producer.message_store import MessageStore
from celery_dq.producer.segment_index import SegmentIndex
from celery_dq.producer.sender import Addressed, BrokerUnreachable, PublishRefused, Refusal
from celery_dq.producer.spill_log import SpillLog


class RecordingSender:
    """A sender that stores messages, like a broker that recognises resent ones."""

    def __init__(self) -> None:
        self.down = False
        self.got: dict[str, list[bytes]] = {}
        self.batches: list[int] = []
        self.seen: dict[str, int] = {}

    def __call__(self) -> RecordingSender:
        return self

    def address(self, message: Any, exchange: str, routing_key: str, declare: Any) -> Addressed:
        return Addressed(routing_key, b"", str(message["body"]).encode())

    def send(self, lane: str, producer: str, messages: Sequence[BufferedMessage]) -> Sequence[Refusal]:
        if self.down:
            raise BrokerUnreachable("set to be down")
        if any(b"refused" in message.payload for message in messages):
            raise PublishRefused("one of them")
        self.batches.append(len(messages))
        for message in messages:
            if message.sequence > self.seen.get(producer, 0):
                self.seen[producer] = message.sequence
                self.got.setdefault(lane, []).append(message.payload)
        return ()

    def close(self) -> None: ...


class Bench:
    """A flusher without its thread; the test calls each step."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.shelf = RecordingSender()
        self.message_store = MessageStore(
            Limits(linger_s=0.5, batch_size=10), SegmentIndex(SpillLog(folder), 1 << 24), self.clock
        )
        self.flusher = Flusher(self.message_store, self.shelf, DeliveryCallbacks())

    def put(self, number: int) -> None:
        assert self.message_store.put("a", b"", b"%d" % number)

    @property
    def got(self) -> list[int]:
        return [int(payload) for payload in self.shelf.got.get("a", [])]


class ProducerHarness:
    """Producers with one shared sender, which are closed at the end of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shelf = RecordingSender()
        self.made: list[BufferedProducer] = []

    def producer(
        self, *, memory: bool = False, limits: Limits | None = None, **kept: Any
    ) -> BufferedProducer:
        persistence = Persistence(None if memory else self.folder, **kept)
        made = BufferedProducer(
            self.shelf, limits=limits or Limits(linger_s=0.001), persistence=persistence, max_block_s=0.05
        )
        self.made.append(made)
        return made


def put(producer: BufferedProducer, *numbers: int, lane: str = "a", size: int = 10) -> None:
    for number in numbers:
        producer.put(Addressed(lane, b"%d" % number, b"%d " % number + b"x" * size))


def close_at_once(producer: BufferedProducer) -> int:
    """Close a producer with its messages, and wait for its thread without a limit."""
    assert producer._own is not None
    assert producer._own.flusher.stop(30)
    return producer.close(0)


def arrived(harness: ProducerHarness, lane: str = "a") -> list[int]:
    return [int(payload.split()[0]) for payload in harness.shelf.got.get(lane, [])]


def message_store(producer: BufferedProducer) -> Any:
    assert producer._own is not None
    return producer._own.message_store


def open_file(box: Any) -> Any:
    """Return the file that the only lane of a message store appends to."""
    with box.lock:
        (files,) = box.segment_index._lanes.values()
        assert files.open is not None
        return files.open


def refuse_new_files(box: Any) -> Callable[[], None]:
    """Let the spill log create no file from now on; return a function that ends this."""
    log = box.segment_index.log
    # Without the lock, the flusher could be in the middle of its check, and replace the folder.
    with box.lock:
        lock, folder, root = log._lock, log._lock.path, log.root
        log.intact = lambda: True
        lock.path = log.root = Path("/proc/nowhere")

    def end() -> None:
        with box.lock:
            lock.path, log.root = folder, root

    return end
