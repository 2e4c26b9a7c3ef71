"""The dead letters of a queue: one node each, under ``dead/`` of the queue.

A node holds two items in Curator's framing: the unchanged message, and a JSON object about its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import NoNodeError

from celery_dq.clock import Clock
from celery_dq.curator.framing import frame, unframe
from celery_dq.errors import CorruptRecord
from celery_dq.transport.zookeeper.in_flight import ClaimedItem
from celery_dq.transport.zookeeper.queues import ANSWER_S, ZooKeeperQueues
from celery_dq.transport.zookeeper.record import ZooKeeperRecord
from celery_dq.zookeeper.multi_read import read_all
from celery_dq.zookeeper.transaction import TransactionRefused, create, delete, transact

#: Maximum characters of a task id that names a dead letter.
LONGEST_ID = 200
#: Maximum characters of the task name in a dead letter.
LONGEST_NAME = 200


class DeadLetterNode(NamedTuple):
    """One dead letter.

    Attributes:
        id: The task id, with a suffix if a dead letter of that id existed already.
        record: The message; None if it cannot be decoded.
        at_us: Time of the dead-lettering in microseconds since the epoch.
        about: ``reason``, ``worker``, ``deliveries`` and ``task``.
    """

    id: str
    record: ZooKeeperRecord | None
    at_us: float
    about: Mapping[str, Any]


def dead_letter_record(
    held: ClaimedItem, headers: Mapping[str, Any], reason: str, now_s: float
) -> tuple[str, bytes]:
    """Make the name and data of the dead letter for an in-flight message.

    Args:
        held: The message.
        headers: Its headers; ``id`` and ``task`` are used.
        reason: Why the message is dead-lettered, for example ``max_deliveries``.
        now_s: Seconds since the epoch.
    """
    message_id, task = headers.get("id"), headers.get("task")
    about = {
        "reason": reason,
        "worker": held.worker,
        "at": round(now_s * 1e6),
        "deliveries": held.deliveries,
        "task": task[:LONGEST_NAME] if isinstance(task, str) else "",
    }
    name = str(message_id) if _names_node(message_id) else held.name
    return name, frame([*unframe(held.data), json.dumps(about).encode()])


class ZooKeeperDeadLetters:
    """The dead letters of one queue.

    Args:
        queues: Access to the nodes of queues.
        queue: Name of the queue.
        clock: Wall time, to decide whether a replayed message is due.
    """

    def __init__(self, queues: ZooKeeperQueues, queue: str, clock: Clock) -> None:
        self._queues = queues
        self._queue = queue
        self._nodes = queues.nodes(queue)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._queues.children(self._nodes.dead))

    def list(self) -> Sequence[DeadLetterNode]:
        """Return all dead letters, the latest first."""
        ids = [self._nodes.dead_id(name) for name in self._queues.children(self._nodes.dead)]
        letters = [letter for letter in map(self.find, ids) if letter is not None]
        return sorted(letters, key=lambda letter: -letter.at_us)

    def find(self, message_id: str) -> DeadLetterNode | None:
        """Return the dead letter with this id; None when there is none."""
        data = self._read(message_id)
        return None if data is None else _dead_letter_node(message_id, data)

    def _read(self, message_id: str) -> bytes | None:
        (answer,) = read_all(self._queues.session, [self._nodes.dead_letter(message_id)], ANSWER_S)
        if isinstance(answer, NoNodeError):
            return None
        if isinstance(answer, Exception):
            raise answer
        data: bytes = answer[0]
        return data

    def replay(
        self, message_id: str, change: Callable[[ZooKeeperRecord], ZooKeeperRecord] | None = None
    ) -> bool:
        """Move a dead letter to the end of its queue.

        Args:
            message_id: The id of the dead letter.
            change: Makes the record to publish from the stored record. Default: the record is unchanged.

        Returns:
            Whether there was a dead letter of that id.

        Raises:
            CorruptRecord: The dead letter cannot be decoded.
            ZooKeeperUnreachable: ZooKeeper did not answer. The message is in the queue, or still a dead
                letter.
        """
        data = self._read(message_id)
        if data is None:
            return False
        record = _record(data)
        record = change(record) if change is not None else record
        self._queues.declare(self._queue)
        prefix = self._nodes.ready_prefix(record.priority)
        if record.due_ms > self._clock.wall() * 1000:
            prefix = self._nodes.delayed_prefix(record.due_ms)
        steps = [
            delete(self._nodes.dead_letter(message_id)),
            create(prefix, record.pack(), sequence=True),
        ]
        try:
            transact(self._queues.session, steps, ANSWER_S)
        except TransactionRefused as refusal:
            if refusal.index == 0:
                # Another client has replayed or deleted it.
                return False
            raise refusal.error from None
        return True

    def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Delete these dead letters, or all if `message_ids` is None; return how many were deleted."""
        if message_ids is None:
            message_ids = [self._nodes.dead_id(name) for name in self._queues.children(self._nodes.dead)]
        return self._queues.remove([self._nodes.dead_letter(message_id) for message_id in message_ids])


def _names_node(message_id: Any) -> bool:
    """Return whether a message's own id, which may be anything, can be the name of its dead letter."""
    if not isinstance(message_id, str) or not 0 < len(message_id) <= LONGEST_ID:
        return False
    return message_id.encode("utf-8", "ignore").decode() == message_id


def _record(data: bytes) -> ZooKeeperRecord:
    items = unframe(data)
    if len(items) != 2:
        raise CorruptRecord(f"a dead letter is two items, but its node holds {len(items)}")
    return ZooKeeperRecord.unpack(frame(items[:1]))


def _dead_letter_node(message_id: str, data: bytes) -> DeadLetterNode:
    try:
        about = json.loads(unframe(data)[1])
        about["deliveries"] = int(about.get("deliveries", 0))
        return DeadLetterNode(message_id, _record(data), float(about.get("at", 0)), about)
    except Exception:  # another program may have written anything
        return DeadLetterNode(message_id, None, 0.0, {"reason": "unreadable"})
