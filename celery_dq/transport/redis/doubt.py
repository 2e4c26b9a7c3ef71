"""Calls on their way, and claims whose answers never came.

A connection may break between a claim and its answer. The broker has then given
messages to this process that the process knows nothing of, and because its lease
is renewed they would stay with it. So every claim is noted when it is sent and
when it is answered, and after one that got no answer the keeper compares what the
broker says this process holds with what the process knows.

Called from the consuming thread and the keeper's; nothing here takes a lock. A
message is given back only when two looks, a heartbeat apart, agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

#: Heartbeats after a lost answer during which the keeper looks: the claim itself may arrive late.
LOOKS = 3
#: Answered claims that are remembered per partition.
REMEMBERED = 4096


class Doubts:
    """What one process has asked for and not heard of."""

    def __init__(self) -> None:
        # Counted by their length, because several threads count: appending and popping are atomic.
        self._claims: dict[str, deque[None]] = {}
        self._reports: dict[str, deque[None]] = {}
        self._answered: dict[str, dict[str, None]] = {}
        self._looks: dict[str, int] = {}
        self._strangers: dict[str, set[tuple[str, str]]] = {}
        self._waiting: dict[str, Callable[[], None]] = {}

    # -- on their way ----------------------------------------------------------

    def claims(self, partition: str) -> None:
        """A claim is about to be sent."""
        self._claims.setdefault(partition, deque()).append(None)

    def answered(self, partition: str, claims: Iterable[str]) -> None:
        """A claim was answered, and what came with it is in the ledger."""
        self._claims[partition].pop()
        known = self._answered.setdefault(partition, {})
        for claim in claims:
            known[claim] = None
        while len(known) > REMEMBERED:
            del known[next(iter(known))]

    def unanswered(self, partition: str) -> None:
        """The answer to a claim will not come, or not be listened to."""
        self._claims[partition].pop()
        self._looks[partition] = LOOKS

    def reports(self, partition: str, change: int) -> None:
        """A settle, finish or release was sent (+1), or answered or given up (-1)."""
        under_way = self._reports.setdefault(partition, deque())
        if change > 0:
            under_way.append(None)
        else:
            under_way.pop()
            if self._waiting and not under_way:
                answered = self._waiting.pop(partition, None)
                if answered is not None:
                    answered()

    def under_way(self, partition: str) -> bool:
        """Whether the broker may hear something yet, or know something that we do not."""
        return self.speaks(partition) or partition in self._looks

    def speaks(self, partition: str) -> bool:
        """Whether a call is on its way."""
        return bool(self._claims.get(partition) or self._reports.get(partition))

    def awaits_report(self, partition: str, answered: Callable[[], None]) -> bool:
        """Whether a settle, finish or release is on its way, or about to be; if so, *answered* is called."""
        # First: another thread may hear the answer just now.
        self._waiting[partition] = answered
        if self._reports.get(partition):
            return True
        self._waiting.pop(partition, None)
        return False

    # -- the keeper ------------------------------------------------------------

    def exists(self, partition: str) -> bool:
        """Whether the keeper should compare."""
        return partition in self._looks

    def compare(
        self, partition: str, held: Iterable[tuple[str, str]], is_ours: Callable[[str], object]
    ) -> list[tuple[str, str]]:
        """Return the (claim number, message id) of those that nobody here has heard of.

        Arguments:
            partition: where to look.
            held: (claim number, message id) of what the broker says we hold, read just now.
            is_ours: whether we hold what has this delivery tag.
        """
        known = self._answered.get(partition, {})
        strangers = {
            (claim, message_id)
            for claim, message_id in held
            if claim not in known and not is_ours(f"{claim}/{message_id}")
        }
        if self._claims.get(partition):
            return []  # theirs may be the answer that is on its way
        seen_before = self._strangers.pop(partition, set())
        confirmed = strangers & seen_before
        if strangers - confirmed:
            self._strangers[partition] = strangers - confirmed
        else:
            self._looks[partition] -= 1
            if not self._looks[partition]:
                del self._looks[partition]
        return sorted(confirmed)

    def forget(self, partition: str) -> None:
        """Nothing of the partition is held or consumed any more."""
        self._answered.pop(partition, None)
        self._looks.pop(partition, None)
        self._strangers.pop(partition, None)
        self._waiting.pop(partition, None)
