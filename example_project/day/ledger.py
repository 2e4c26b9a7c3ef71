"""The ledger: records of all published and all received notices, in a separate Redis.

The shop records the notices that it published, and the merchants' endpoints record their requests. Broker and
workers do not write to the ledger, so it can judge both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import redis


@dataclass(frozen=True)
class Published:
    """A notice that the broker accepted; ``at`` is the time just before its publish (Unix time)."""

    id: str
    merchant: int
    kind: str
    at: float


@dataclass(frozen=True)
class Arrival:
    """A request at a merchant's endpoint; ``status`` 0 means that the endpoint never answered."""

    id: str
    attempt: int
    worker: int
    at: float
    status: int


@dataclass(frozen=True)
class Count:
    """The progress of the day."""

    published: int
    settled: int
    finished: bool


class Ledger:
    """The ledger of one day.

    Args:
        url: URL of the ledger's Redis.
        day: Name of the day, a prefix of its keys.
    """

    def __init__(self, url: str, day: str) -> None:
        # No timeout, because a row that is sent again would be written twice.
        self._client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=None)
        self.keys = Keys(day)

    def publish(self, rows: Iterable[Published]) -> None:
        """Record a published notice."""
        self._client.rpush(self.keys.published, *[json.dumps(asdict(row)) for row in rows])

    def begin(self, at: float) -> None:
        """Record when the replay began (Unix time)."""
        self._client.set(self.keys.began, repr(at))

    def finish(self) -> None:
        """Record that all notices have been published."""
        self._client.set(self.keys.finished, 1)

    def began(self) -> float | None:
        """Return when the replay began; None before that."""
        value: Any = self._client.get(self.keys.began)
        return float(value) if value is not None else None

    def count(self) -> Count:
        """Return the numbers for the progress display."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.llen(self.keys.published)
            pipe.scard(self.keys.settled)
            pipe.exists(self.keys.finished)
            published, settled, finished = pipe.execute()
        return Count(published, settled, bool(finished))

    def arrived(self) -> int:
        """Return the number of requests at all endpoints so far."""
        count: Any = self._client.llen(self.keys.arrivals)
        return int(count)

    def read(self) -> tuple[list[Published], list[Arrival]]:
        """Return all records."""
        published: Any = self._client.lrange(self.keys.published, 0, -1)
        arrivals: Any = self._client.lrange(self.keys.arrivals, 0, -1)
        return [Published(**json.loads(row)) for row in published], [
            Arrival(**json.loads(row)) for row in arrivals
        ]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class Keys:
    """The keys of one day."""

    def __init__(self, day: str) -> None:
        self.published = f"{day}:published"
        self.arrivals = f"{day}:arrivals"
        self.settled = f"{day}:settled"
        self.began = f"{day}:began"
        self.finished = f"{day}:finished"
