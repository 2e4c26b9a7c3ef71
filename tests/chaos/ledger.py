"""The ledger: the starts and finishes of all tasks, in a Redis that no fault touches."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Literal

import redis

KEY = "ledger"


@dataclass(frozen=True)
class Entry:
    """One line: a task started or finished."""

    event: Literal["start", "finish"]
    message: str
    #: Position in the order of publishing.
    number: int
    tenant: str
    #: Node name of the worker, unique per incarnation.
    worker: str
    #: The process that ran the task: the pool's child, or the worker itself.
    pid: int
    #: In seconds on CLOCK_MONOTONIC, which all processes of a machine share.
    monotonic: float
    wall: float
    #: The redelivery mark that the broker gave the delivery.
    redelivered: bool


class Ledger:
    """Append from any process, read from the driver."""

    def __init__(self, port: int) -> None:
        # No timeout, because a line that is sent again would be written twice.
        self._client = redis.Redis(port=port, socket_timeout=None)
        self._read = 0

    def write(
        self, event: str, message: str, number: int, tenant: str, worker: str, pid: int, redelivered: bool
    ) -> None:
        line = [event, message, number, tenant, worker, pid, time.monotonic(), time.time(), redelivered]
        self._client.rpush(KEY, json.dumps(line))

    def read_new(self, limit: int = 20_000) -> list[Entry]:
        """Return the lines since the last call, in the order of their arrival."""
        lines = self._client.lrange(KEY, self._read, self._read + limit - 1)
        self._read += len(lines)
        return [Entry(*json.loads(line)) for line in lines]

    def close(self) -> None:
        self._client.close()
