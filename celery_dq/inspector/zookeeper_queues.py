"""Snapshots of queues and messages on ``dq-zookeeper://``. Nothing is taken or locked.

The name of a node holds no task id, so a search reads the messages of the queue, in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NoAuthError, NoNodeError

from celery_dq.curator.framing import frame, unframe
from celery_dq.errors import CorruptRecord
from celery_dq.inspector.messages import MessageSnapshot
from celery_dq.inspector.queues import ZooKeeperQueueSnapshot
from celery_dq.inspector.redis_values import moment
from celery_dq.transport import envelope
from celery_dq.transport.zookeeper.queues import ANSWER_S, ZooKeeperQueues
from celery_dq.transport.zookeeper.record import ZooKeeperRecord, count_of
from celery_dq.znodes import due_ms_of, served_in_order
from celery_dq.zookeeper.multi_read import read_all
from celery_dq.zookeeper.transaction import ask_all, failure_of

__all__ = ["StoredItem", "delayed_items", "find_item", "queue_counts", "ready_items"]

#: Messages that are read together; each has up to 1 MB.
CHUNK = 100


class StoredItem(NamedTuple):
    """A stored message.

    Attributes:
        name: Name of its node.
        message: Its snapshot.
    """

    name: str
    message: MessageSnapshot


def queue_counts(queues: ZooKeeperQueues, queue: str) -> ZooKeeperQueueSnapshot:
    """Read the counts of a queue in one round trip."""
    nodes = queues.nodes(queue)
    folders = (nodes.ready, nodes.locks, nodes.delayed, nodes.dead, nodes.suspects, nodes.unreadable)
    stats = ask_all(queues.session, lambda client: [client.exists_async(path) for path in folders], ANSWER_S)
    for path, stat in zip(folders, stats, strict=True):
        if isinstance(stat, KazooException):
            raise failure_of("read", path, stat)
    ready, locks, delayed, dead, suspects, unreadable = (
        0 if stat is None else int(stat.numChildren) for stat in stats
    )
    return ZooKeeperQueueSnapshot(queue, max(ready - locks, 0), delayed, locks, dead, suspects, unreadable)


def ready_items(queues: ZooKeeperQueues, queue: str, *, claimed: bool = False) -> Iterator[StoredItem]:
    """Yield the waiting messages in the order of their service; with `claimed`, those in flight, too."""
    nodes = queues.nodes(queue)
    # The locks are read first: a message that is taken and finished in between has no node any more.
    locked = set(queues.children(nodes.locks))
    names = served_in_order(queues.children(nodes.ready))
    wanted = names if claimed else [name for name in names if name not in locked]
    for name, answer in _read(queues, nodes.ready, wanted):
        yield _item(queue, name, "claimed" if name in locked else "waiting", answer)


def delayed_items(queues: ZooKeeperQueues, queue: str) -> Iterator[StoredItem]:
    """Yield the messages that wait for their ETA, the earliest first."""
    nodes = queues.nodes(queue)
    due = {}
    for name in queues.children(nodes.delayed):
        with suppress(ValueError, IndexError):  # the node of another program
            due[name] = due_ms_of(name)
    for name, answer in _read(queues, nodes.delayed, sorted(due, key=lambda name: (due[name], name))):
        item = _item(queue, name, "delayed", answer)
        yield item._replace(message=replace(item.message, due=moment(due[name] * 1000)))


def find_item(queues: ZooKeeperQueues, queue: str, task_id: str) -> StoredItem | None:
    """Return the message of a task; None when it is not in the queue. Reads the queue in chunks."""
    nodes = queues.nodes(queue)
    for items in (ready_items(queues, queue, claimed=True), delayed_items(queues, queue)):
        for item in items:
            if item.message.id == task_id:
                return item
    path = nodes.dead_letter(task_id)
    folder, _, name = path.rpartition("/")
    for found, (data, stat) in _read(queues, folder, [name]):
        # A dead letter holds the message, and a description of its end.
        with suppress(CorruptRecord):
            data = frame(list(unframe(data))[:1])
        item = _item(queue, found, "dead", (data, stat))
        return item._replace(message=replace(item.message, id=task_id))
    return None


def _read(
    queues: ZooKeeperQueues, folder: str, names: Sequence[str]
) -> Iterator[tuple[str, tuple[bytes, Any]]]:
    """Yield name, data and stat of the nodes that still exist. A node that an ACL hides has no stat."""
    for start in range(0, len(names), CHUNK):
        chunk = names[start : start + CHUNK]
        answers = read_all(queues.session, [f"{folder}/{name}" for name in chunk], ANSWER_S)
        for name, answer in zip(chunk, answers, strict=True):
            if isinstance(answer, NoNodeError):
                continue
            if isinstance(answer, NoAuthError):
                yield name, (b"", None)
            elif isinstance(answer, KazooException):
                raise failure_of("read", f"{folder}/{name}", answer)
            else:
                yield name, answer


def _item(queue: str, name: str, state: str, answer: tuple[bytes, Any]) -> StoredItem:
    data, stat = answer
    message = MessageSnapshot(name, queue, state)
    if stat is None:
        return StoredItem(name, replace(message, args="denied by its ACL"))
    try:
        record = ZooKeeperRecord.unpack(data)
        headers: dict[str, Any] = envelope.unpack(record.envelope)[0]
    except CorruptRecord as exc:
        return StoredItem(name, replace(message, args=f"unreadable: {exc}"))
    count = count_of(stat)
    # A message that no consumer has was lost by every consumer that took it and did not requeue it.
    lost = count.deliveries if state == "claimed" else max(count.taken - stat.version, 0)
    message = replace(
        message,
        id=str(headers.get("id") or name),
        task=str(headers.get("task") or ""),
        priority=record.priority,
        due=moment(record.due_ms * 1000),
        expires=_time(headers.get("expires")),
        args=str(headers.get("argsrepr") or ""),
        kwargs=str(headers.get("kwargsrepr") or ""),
        deliveries=0 if state == "dead" else lost,
    )
    return StoredItem(name, message)


def _time(value: Any) -> datetime | None:
    if isinstance(value, str):
        with suppress(ValueError):
            return datetime.fromisoformat(value.replace("Z", "+00:00"))
    return None
