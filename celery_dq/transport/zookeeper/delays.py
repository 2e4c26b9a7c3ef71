"""The delayed items of one queue: the due time of each item, and the move of due items to ``ready/``.

Each consumer of a queue does this; each item is moved once. Everything except the watch callback runs in the
fetcher's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import NoAuthError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import CorruptRecord
from celery_dq.shown import shown_logger
from celery_dq.transport.zookeeper.record import BATCH_BYTES, ZooKeeperRecord
from celery_dq.znodes import QueueNodes, due_ms_of
from celery_dq.zookeeper.item_locks import ItemLocks
from celery_dq.zookeeper.transaction import Step, create, delete

logger = shown_logger(__name__)

#: A changed queue is listed again after this multiple of the time that its last listing took. Urgent items
#: are found soon, and listing a long queue does not use up the time for messages.
LISTING_SHARE = 5.0
#: Maximum number of delayed items in one move.
LARGEST_MOVE = 100


class Delays:
    """The delayed items of one queue.

    Args:
        nodes: The nodes of the queue.
        clock: Wall time for due times, monotonic time for the pace of listings.
        wake: Wakes the fetcher; called from any thread.
        pass_over: Called with the path of an item that its ACL does not let this session read.
    """

    def __init__(
        self, nodes: QueueNodes, clock: Clock, wake: Callable[[], None], pass_over: Callable[[str], None]
    ) -> None:
        self._nodes = nodes
        self._clock = clock
        self._wake = wake
        self._pass_over = pass_over
        #: Due time in milliseconds and name, the earliest first.
        self._waiting: list[tuple[int, str]] = []
        self._changed = True
        self._listed_at = 0.0
        self._listing_s = 0.0

    def next_look_s(self) -> float | None:
        """Seconds until an item is due or the next listing may run; None when neither is pending."""
        waits = []
        if self._waiting:
            waits.append(self._waiting[0][0] / 1000 - self._clock.wall())
        if self._changed:
            waits.append(self._listed_at + LISTING_SHARE * self._listing_s - self._clock.monotonic())
        return max(min(waits), 0.0) if waits else None

    def move_due(self, locks: ItemLocks) -> bool:
        """Move up to `LARGEST_MOVE` items that are due.

        Args:
            locks: The locks of the consuming session.

        Returns:
            Whether any item was due.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer.
        """
        if self._changed and self._clock.monotonic() - self._listed_at >= LISTING_SHARE * self._listing_s:
            self._list(locks)
        now_ms = self._clock.wall() * 1000
        due = 0
        while due < min(len(self._waiting), LARGEST_MOVE) and self._waiting[due][0] <= now_ms:
            due += 1
        if due:
            self._move(locks, [name for _, name in self._waiting[:due]])
            del self._waiting[:due]
        return due > 0

    def look_again(self, event: Any = None) -> None:
        """List the delayed items again at the next round; callable from any thread, and as a watch."""
        self._changed = True
        self._wake()

    def _list(self, locks: ItemLocks) -> None:
        began = self._clock.monotonic()
        self._changed = False
        try:
            names = locks.ask(
                lambda client: client.get_children_async(self._nodes.delayed, watch=self.look_again)
            )
        except NoNodeError:
            self._changed = True
            restore(locks, self._nodes)
            return
        except BaseException:
            self._changed = True
            raise
        self._waiting = sorted(_due(names))
        self._listed_at = self._clock.monotonic()
        self._listing_s = self._listed_at - began

    def _move(self, locks: ItemLocks, names: Sequence[str]) -> None:
        paths = [f"{self._nodes.delayed}/{name}" for name in names]
        waiting: list[tuple[str, bytes]] = []
        for path, found in zip(paths, locks.read(paths), strict=True):
            if isinstance(found, NoAuthError):
                self._pass_over(path)
            elif isinstance(found, tuple):
                waiting.append((path, found[0]))
            elif not isinstance(found, NoNodeError):
                raise found
        while waiting:
            batch: list[tuple[str, bytes]] = []
            size = 0
            while waiting and (not batch or size + len(waiting[0][1]) < BATCH_BYTES):
                size += len(waiting[0][1])
                batch.append(waiting.pop(0))
            if locks.refused(locks.begin(_moving(self._nodes, batch))) is not None:
                # Another consumer has moved one of these items: move each in its own transaction.
                for begun in [locks.begin(_moving(self._nodes, [each])) for each in batch]:
                    locks.refused(begun)


def restore(locks: ItemLocks, nodes: QueueNodes) -> None:
    """Create the folders of a queue that was deleted."""
    for folder in nodes.folders:
        locks.ensure(folder)


def _due(names: Sequence[str]) -> list[tuple[int, str]]:
    found = []
    for name in names:
        try:
            found.append((due_ms_of(name), name))
        except (ValueError, IndexError):  # noqa: PERF203 - one bad name must not hide the others
            logger.warning(
                "A node named %r is not a delayed item; it is ignored. Delete it if it is not needed.",
                name,
                extra={"event": "zookeeper_delayed_name_invalid"},
            )
    return found


def _moving(nodes: QueueNodes, batch: Sequence[tuple[str, bytes]]) -> list[Step]:
    steps = []
    for path, data in batch:
        try:
            priority = ZooKeeperRecord.unpack(data).priority
        except CorruptRecord:
            # The consumer that takes the item moves it to the unreadable items.
            priority = 0
        steps += [delete(path), create(nodes.ready_prefix(priority), data, sequence=True)]
    return steps
