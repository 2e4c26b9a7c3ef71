"""Buffered producers with a sender that keeps what it gets and can be told to be down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery_dq.producer.buffer import Limits, Message
from celery_dq.producer.buffered_producer import BufferedProducer, Persistence
from celery_dq.producer.sender import Addressed, Refused, Unreachable


class Shelf:
    """A sender that keeps messages, as a broker that knows its producers."""

    def __init__(self) -> None:
        self.down = False
        self.got: dict[str, list[bytes]] = {}
        self.batches: list[int] = []
        self.seen: dict[str, int] = {}

    def __call__(self) -> Shelf:
        return self

    def address(self, message: Any, exchange: str, routing_key: str, declare: Any) -> Addressed:
        return Addressed(routing_key, b"", str(message["body"]).encode())

    def send(self, lane: str, producer: str, messages: Sequence[Message]) -> None:
        if self.down:
            raise Unreachable("told to be down")
        if any(b"refused" in message.payload for message in messages):
            raise Refused("one of them")
        self.batches.append(len(messages))
        for message in messages:
            if message.sequence > self.seen.get(producer, 0):
                self.seen[producer] = message.sequence
                self.got.setdefault(lane, []).append(message.payload)

    def close(self) -> None: ...


class Desk:
    """Producers on one shelf, closed at the end of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shelf = Shelf()
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
    """Close it with what it has; its thread may take as long to end as the machine likes."""
    assert producer._own is not None
    assert producer._own.flusher.stop(30)
    return producer.close(0)


def arrived(desk: Desk, lane: str = "a") -> list[int]:
    return [int(payload.split()[0]) for payload in desk.shelf.got.get(lane, [])]


def outbox(producer: BufferedProducer) -> Any:
    assert producer._own is not None
    return producer._own.outbox
