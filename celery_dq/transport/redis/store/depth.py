"""The number of messages that wait in a partition, read without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_dq.keys import PartitionKeys
from celery_dq.transport.redis.store.full_server import read_together


@dataclass(frozen=True)
class DepthCall:
    """Commands that count the waiting messages of one partition, all of the same moment.

    Messages in flight, delayed or cancelled do not count.
    """

    keys: PartitionKeys

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """The commands, whose answers :meth:`parse` takes."""
        keys = self.keys
        return (
            ("HLEN", keys.messages),
            ("ZCARD", keys.delayed),
            ("ZCARD", keys.discards),
            ("HGET", keys.state, "held"),
        )

    def parse(self, answers: Sequence[Any]) -> int:
        """Return the number from the answers to the commands."""
        stored, delayed, discards, held = (int(each or 0) for each in answers)
        return max(stored - delayed - discards - held, 0)

    def run(self, client: Any) -> int:
        """Send the commands on a client, and return the number."""
        return self.parse(read_together(client, self.commands))
