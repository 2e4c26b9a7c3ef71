"""A read-only view of a queue: nothing is taken or locked."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from difflib import get_close_matches

from kazoo.exceptions import KazooException, NoAuthError, NoNodeError

from celery_dq.curator.framing import unframe
from celery_dq.curator.names import DELAY, ID, PLAIN, PRIORITIES, PRIORITY, REQUEUED, SIMPLE, Grammar, id_of
from celery_dq.errors import ConfigurationError, CorruptRecord
from celery_dq.znodes import serial_distance
from celery_dq.zookeeper.multi_read import read_all
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import ask_all, failure_of

__all__ = ["KINDS", "NodeView", "look"]

#: Problems of a node.
DENIED, UNREADABLE = "denied by its ACL", "not in Curator's framing"
#: What to do about each problem.
REMEDIES = {
    "": "",
    DENIED: "The credentials of this client do not suffice; the command has those of the settings that name "
    "one of HOSTS: broker_url or dq_election. A consumer that the ACL denies, too, passes over the node: let "
    "it read the node and create and delete its children, with setAcl in zkCli.sh.",
    UNREADABLE: "No consumer can decode the node: check --kind and the program that wrote it, or delete it.",
}
GRAMMARS = {each.kind: each for each in (PLAIN, ID, PRIORITY, DELAY, SIMPLE)}
KINDS = tuple(GRAMMARS)


@dataclasses.dataclass(frozen=True)
class NodeView:
    """One node of a queue.

    Attributes:
        name: Name of the node.
        mark: Its id, priority or due time. None in a plain or simple queue, and for a node that a Curator
            consumer has requeued after a failure.
        items: Number of items in the node; None if the node cannot be read.
        size: Bytes of data.
        put_at: Time of creation.
        locked: Whether a consumer has locked the node; None without a `lock_path`.
        problem: Why no consumer can take the node, as far as this client can see; "" if no reason is known.
        remedy: What to do about the problem.
    """

    name: str
    mark: str | int | datetime | None
    items: int | None
    size: int
    put_at: datetime
    locked: bool | None
    problem: str
    remedy: str


def look(
    session: Session,
    path: str,
    kind: str,
    *,
    lock_path: str | None = None,
    limit: int = 50,
    timeout_s: float = 10.0,
) -> list[NodeView]:
    """Return the first nodes of a queue, in the order in which they are served.

    Args:
        session: The session that reads.
        path: The folder of the queue.
        kind: One of :data:`KINDS`; nodes of other kinds are left out.
        lock_path: The folder of the locks, if the consumers use locks.
        limit: Maximum number of nodes; default 50.
        timeout_s: Seconds to wait for each answer; default 10.

    Raises:
        ConfigurationError: `kind` is unknown, or there is no folder `path`.
        ZooKeeperUnreachable: ZooKeeper did not answer.
        AccessDenied: An ACL denies access to a folder.
    """
    grammar = grammar_of(kind)
    names = children(session, path, timeout_s)
    if names is None:
        raise ConfigurationError(f"ZooKeeper has no folder {path!r}.{_neighbours(session, path, timeout_s)}")
    # The first consumer creates the folder of the locks.
    locked = None if lock_path is None else set(children(session, lock_path, timeout_s) or ())
    places = [(place, name) for name in names if (place := grammar.place(name)) is not None]
    if not places:
        return []
    first = places[0][0].sequence
    places.sort(key=lambda each: (each[0].rank, serial_distance(each[0].sequence, first)))
    chosen = places[:limit]
    paths = [f"{path}/{name}" for _place, name in chosen]
    found = read_all(session, paths, timeout_s)
    # An ACL hides the data of a node, not its existence.
    stats = ask_all(session, lambda client: [client.exists_async(each) for each in paths], timeout_s)
    views = []
    for (place, name), answer, stat in zip(chosen, found, stats, strict=True):
        if isinstance(answer, NoNodeError) or stat is None:
            # Consumed in the meantime.
            continue
        if isinstance(answer, NoAuthError):
            items, problem = None, DENIED
        elif isinstance(answer, KazooException):
            raise failure_of("read", f"{path}/{name}", answer)
        else:
            items = count(grammar, answer[0])
            problem = UNREADABLE if items is None else ""
        views.append(
            NodeView(
                name=name,
                mark=mark_of(grammar, name, place.rank),
                items=items,
                size=stat.dataLength,
                put_at=moment(stat.ctime),
                locked=None if locked is None else name in locked,
                problem=problem,
                remedy=REMEDIES[problem],
            )
        )
    return views


def children(session: Session, path: str, timeout_s: float) -> list[str] | None:
    """Return the names in a folder; None if the folder does not exist."""
    try:
        names: list[str] | None = session.ask(lambda client: client.get_children_async(path), timeout_s)
    except NoNodeError:
        return None
    except KazooException as error:
        raise failure_of("read", path, error) from None
    return names


def _neighbours(session: Session, path: str, timeout_s: float) -> str:
    """Return a question with the nearest name beside a missing folder; "" if no name is close."""
    parent, name = path.rsplit("/", 1)
    close = get_close_matches(name, children(session, parent or "/", timeout_s) or (), 1)
    return f" Did you mean {f'{parent}/{close[0]}'!r}?" if close else ""


def grammar_of(kind: str) -> Grammar:
    """Return the grammar of the node names of a kind of queue."""
    if kind not in GRAMMARS:
        raise ConfigurationError(f"kind = {kind!r} is unknown: use one of {', '.join(KINDS)}")
    return GRAMMARS[kind]


def mark_of(grammar: Grammar, name: str, rank: int) -> str | int | datetime | None:
    """Return the id, priority or due time in the name of a node; None if it has none."""
    if grammar.kind == "id":
        return id_of(name)
    if rank == REQUEUED:
        return None
    if grammar.kind == "priority":
        # The leading digit is 1 for priorities from 0 on and 0 for negative ones.
        return rank - PRIORITIES
    return moment(rank) if grammar.delays else None


def count(grammar: Grammar, data: bytes) -> int | None:
    """Return the number of items in a node; None if the data cannot be read."""
    if grammar is SIMPLE:
        return 1
    try:
        return len(unframe(data))
    except CorruptRecord:
        return None


def moment(ms: int) -> datetime:
    """Convert milliseconds since 1970 to a datetime; the latest datetime if the time is out of range."""
    try:
        return datetime.fromtimestamp(ms / 1000, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return datetime.max.replace(tzinfo=timezone.utc)
