"""Messages that were given up on: one node each, under ``dead/`` of their queue.

A node holds two items in Curator's framing: the message as it was, and what is known of its end, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import NoNodeError

from celery_dq.clock import Clock
from celery_dq.curator.framing import frame, unframe
from celery_dq.errors import CorruptRecord
from celery_dq.transport.zookeeper.hand import Held
from celery_dq.transport.zookeeper.queues import ANSWER_S, Queues
from celery_dq.transport.zookeeper.record import Record
from celery_dq.zookeeper.reading import read_all
from celery_dq.zookeeper.transaction import Refused, create, delete, transact

#: Characters of an id that name a dead letter.
LONGEST_ID = 200
#: Characters of a task's name that its dead letter repeats.
LONGEST_NAME = 200


class Buried(NamedTuple):
    """One dead letter.

    Attributes:
        id: the task id; made unique where a dead letter of that id lay there already.
        record: the message; None when nobody can read it.
        at_us: when it was given up on, microseconds since the epoch.
        about: ``reason``, ``worker``, ``deliveries`` and ``task``.
    """

    id: str
    record: Record | None
    at_us: float
    about: Mapping[str, Any]


def letter_of(held: Held, headers: Mapping[str, Any], reason: str, now_s: float) -> tuple[str, bytes]:
    """Name and data of the dead letter that `held` becomes."""
    message_id, task = headers.get("id"), headers.get("task")
    about = {
        "reason": reason,
        "worker": held.worker,
        "at": round(now_s * 1e6),
        "deliveries": held.deliveries,
        "task": task[:LONGEST_NAME] if isinstance(task, str) else "",
    }
    known = isinstance(message_id, str) and 0 < len(message_id) <= LONGEST_ID
    name = str(message_id) if known else held.name
    return name, frame([*unframe(held.data), json.dumps(about).encode()])


class Graveyard:
    """The dead letters of one queue.

    Arguments:
        queues: asks ZooKeeper.
        queue: its name.
        clock: tells what is due.
    """

    def __init__(self, queues: Queues, queue: str, clock: Clock) -> None:
        self._queues = queues
        self._queue = queue
        self._nodes = queues.nodes(queue)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._queues.children(self._nodes.dead))

    def list(self) -> Sequence[Buried]:
        """All dead letters, the latest first."""
        ids = [self._nodes.dead_id(name) for name in self._queues.children(self._nodes.dead)]
        found = [(message_id, self._read(message_id)) for message_id in ids]
        letters = [_buried(message_id, data) for message_id, data in found if data is not None]
        return sorted(letters, key=lambda letter: -letter.at_us)

    def _read(self, message_id: str) -> bytes | None:
        (answer,) = read_all(self._queues.session, [self._nodes.dead_letter(message_id)], ANSWER_S)
        if isinstance(answer, NoNodeError):
            return None
        if isinstance(answer, Exception):
            raise answer
        data: bytes = answer[0]
        return data

    def replay(self, message_id: str, change: Callable[[Record], Record] | None = None) -> bool:
        """Send a dead letter to the end of its queue; whether there was one.

        Arguments:
            message_id: which one.
            change: makes another record of it. Default: it stays as it was.

        Raises:
            CorruptRecord: Nobody can read it.
            ZooKeeperUnreachable: No answer; it lies in one of both places.
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
        except Refused as refusal:
            if refusal.index == 0:
                # Somebody was faster.
                return False
            raise refusal.error from None
        return True

    def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Delete these dead letters, or all, for good; returns how many."""
        if message_ids is None:
            message_ids = [self._nodes.dead_id(name) for name in self._queues.children(self._nodes.dead)]
        return self._queues.remove([self._nodes.dead_letter(message_id) for message_id in message_ids])


def _record(data: bytes) -> Record:
    items = unframe(data)
    if len(items) != 2:
        raise CorruptRecord(f"a dead letter is two items, and there are {len(items)} in its node")
    return Record.unpack(frame(items[:1]))


def _buried(message_id: str, data: bytes) -> Buried:
    try:
        about = json.loads(unframe(data)[1])
        record: Record | None = _record(data)
    except (CorruptRecord, ValueError, IndexError):
        return Buried(message_id, None, 0.0, {"reason": "unreadable"})
    return Buried(message_id, record, float(about.get("at", 0)), about)
