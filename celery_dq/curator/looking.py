"""Looking at a queue from outside: nothing is taken or locked."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone

from kazoo.exceptions import KazooException, NoNodeError

from celery_dq.curator.framing import unframe
from celery_dq.curator.names import DELAY, ID, PLAIN, PRIORITIES, PRIORITY, SIMPLE, Grammar, id_of
from celery_dq.errors import ConfigurationError, CorruptRecord
from celery_dq.znodes import serial_distance
from celery_dq.zookeeper.reading import read_all
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import denied

__all__ = ["KINDS", "NodeView", "look"]

KINDS = ("plain", "id", "priority", "delay", "simple")


@dataclasses.dataclass(frozen=True)
class NodeView:
    """One node of a queue."""

    name: str
    #: Its id, its priority or its due time; None in a plain or simple queue.
    mark: str | int | datetime | None
    #: How many items it holds; None: it cannot be read.
    items: int | None
    size: int
    put_at: datetime
    #: Whether a consumer holds it; None: unknown, without a path of locks.
    locked: bool | None


def look(
    session: Session,
    path: str,
    kind: str,
    *,
    lock_path: str | None = None,
    limit: int = 50,
    timeout_s: float = 10.0,
) -> list[NodeView]:
    """The first `limit` nodes of the queue at `path`, in the order in which they are served.

    :param kind: one of :data:`KINDS`; names of other kinds are passed over.
    """
    grammar = grammar_of(kind)
    names = children(session, path, timeout_s)
    locked = None if lock_path is None else set(children(session, lock_path, timeout_s))
    places = [(place, name) for name in names if (place := grammar.place(name)) is not None]
    if not places:
        return []
    first = places[0][0].sequence
    places.sort(key=lambda each: (each[0].rank, serial_distance(each[0].sequence, first)))
    chosen = places[:limit]
    found = read_all(session, [f"{path}/{name}" for _place, name in chosen], timeout_s)
    views = []
    for (place, name), answer in zip(chosen, found, strict=True):
        if isinstance(answer, NoNodeError):
            # Consumed since.
            continue
        if isinstance(answer, KazooException):
            raise denied("read", f"{path}/{name}", answer)
        data, stat = answer
        views.append(
            NodeView(
                name=name,
                mark=mark_of(grammar, name, place.rank),
                items=count(grammar, data),
                size=len(data),
                put_at=moment(stat.ctime),
                locked=None if locked is None else name in locked,
            )
        )
    return views


def children(session: Session, path: str, timeout_s: float) -> list[str]:
    """The names in a folder; none where there is no folder."""
    try:
        names: list[str] = session.ask(lambda client: client.get_children_async(path), timeout_s)
    except NoNodeError:
        return []
    except KazooException as error:
        raise denied("read", path, error) from None
    return names


def grammar_of(kind: str) -> Grammar:
    """The names of a kind of queue."""
    for grammar in (PLAIN, ID, PRIORITY, DELAY, SIMPLE):
        if grammar.kind == kind:
            return grammar
    raise ConfigurationError(f"kind = {kind!r} is unknown: one of {', '.join(KINDS)}")


def mark_of(grammar: Grammar, name: str, rank: int) -> str | int | datetime | None:
    """The id, priority or due time in a name."""
    if grammar.kind == "id":
        return id_of(name)
    if grammar.kind == "priority":
        # The ninth digit is the sign: 1 for those from 0 on.
        return rank - PRIORITIES
    return moment(rank) if grammar.delays else None


def count(grammar: Grammar, data: bytes) -> int | None:
    """How many items a node holds; None if it cannot be read."""
    if grammar is SIMPLE:
        return 1
    try:
        return len(unframe(data))
    except CorruptRecord:
        return None


def moment(ms: int) -> datetime:
    """A time in milliseconds since 1970; the last one that Python has for what is beyond."""
    try:
        return datetime.fromtimestamp(ms / 1000, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return datetime.max.replace(tzinfo=timezone.utc)
