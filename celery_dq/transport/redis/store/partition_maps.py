"""The partitions of each queue, as one process knows them from the broker."""

from __future__ import annotations

from celery_dq.transport.redis.store.partition_map import PartitionMap

#: How often a map is asked for before the partitions of its queue count as changing all the time.
ROUTINGS = 4
#: Producer sequences whose last push was not answered that are remembered.
MOST_UNANSWERED = 1000


class PartitionMaps:
    """Remembers the maps, and that one of them may be out of date.

    The consuming threads write the maps. Any thread may doubt one. A channel that consumes compares
    :attr:`changes` with the value that it has seen, which costs no look-up by name.

    Attributes:
        changes: Grows when a known map has changed, or is in doubt.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._maps: dict[str, PartitionMap] = {}
        self._doubted: set[str] = set()
        self._unanswered: dict[tuple[str, str], PartitionMap] = {}

    def get(self, queue: str) -> PartitionMap | None:
        """Return the map of a queue; None before the first look."""
        return self._maps.get(queue)

    def learn(self, queue: str, stored: PartitionMap) -> None:
        """Note the map that partition 0 of a queue has stored."""
        known = self._maps.get(queue)
        if known != stored:
            self._maps[queue] = stored
            self.changes += known is not None

    def doubt(self, queue: str) -> None:
        """Note that a partition of a queue has stored another map, so that partition 0 must be asked."""
        self._doubted.add(queue)
        self.changes += 1

    def take_doubts(self) -> set[str]:
        """Return the queues whose maps are in doubt, each once."""
        doubted = set()
        while self._doubted:
            doubted.add(self._doubted.pop())
        return doubted

    def note_unanswered(self, queue: str, sequence: str, used: PartitionMap) -> None:
        """Note that a push of a producer sequence was not answered, and by which map it was sent."""
        self._unanswered[queue, sequence] = used
        while len(self._unanswered) > MOST_UNANSWERED:
            self._unanswered.pop(next(iter(self._unanswered)), None)

    def take_unanswered(self, queue: str, sequence: str) -> PartitionMap | None:
        """Return the map of the last push of a producer sequence that was not answered, once."""
        return self._unanswered.pop((queue, sequence), None)
