"""Holding items under ephemeral locks: whoever has the lock of an item consumes it.

A lock is an ephemeral node with the name of the item. When its holder dies, its session takes the lock along,
and the item is free again. An item is finished by deleting it and its lock in one transaction.

The name of a lock does not say who holds it: after its session has expired, a late answer could delete the
lock of the next holder. So each session also has an ephemeral node of its own, its *presence*, and every
transaction checks it: where the presence is, the session lives, and so do its locks.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.zookeeper.reading import begin_reading, read_all, readings
from celery_dq.zookeeper.session import Session, State
from celery_dq.zookeeper.transaction import (
    Refused,
    Step,
    ask_all,
    begin,
    check,
    create,
    delete,
    denied,
    transact,
    verdict,
)

__all__ = ["Custody", "Held", "Outcome", "Taken", "Wanted"]

logger = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """An item, and the lock that guards it; paths."""

    item: str
    lock: str


class Held(NamedTuple):
    """An item that is held: its data and stat, and the presence under which its lock was made."""

    item: str
    lock: str
    data: bytes
    stat: Any
    presence: str


class Taken(NamedTuple):
    """What came of an attempt to take items."""

    held: list[Held]
    #: Others hold them.
    locked: list[Wanted]
    #: They are there no more.
    gone: list[Wanted]


class Outcome(Enum):
    """What came of finishing an item."""

    #: It is deleted, by us.
    DONE = "done"
    #: It had been deleted already: by a peer without locks, or by us and the answer was lost.
    GONE = "gone"
    #: The session had expired, and somebody else holds it now: it is consumed again.
    LOST = "lost"


class _Own:
    """What belongs to one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        #: The session that the presence belongs to; None: there is none yet.
        self.session_id: int | None = None
        self.presence = ""


class Custody:
    """Takes, finishes, requeues and releases items for one consumer. Thread-safe.

    All calls wait `timeout_s` seconds for ZooKeeper at most, and raise
    :exc:`~celery_dq.errors.ZooKeeperUnreachable` then. They may be repeated: what was done is not done twice.

    :param session: the session that owns the locks.
    :param presences: the folder of the presences; made when it is missing.
    :param timeout_s: seconds.
    """

    def __init__(self, session: Session, presences: str, *, timeout_s: float = 10.0) -> None:
        self._session = session
        self._presences = presences
        self._timeout_s = timeout_s
        self._mine = _Own()

    def take(self, wanted: Sequence[Wanted]) -> Taken:
        """Lock as many of `wanted` as are free and read them, in one round trip if all are.

        The folder of the locks must exist. When this raises, some may be locked: :meth:`drop` them before
        they are wanted again.
        """
        if not wanted:
            return Taken([], [], [])
        presence = self._presence()
        taken = Taken([], [], [])
        mine = list(wanted)
        steps = [check(presence), *[step for each in mine for step in lock_steps(each, presence)]]
        paths = [each.item for each in mine]
        # The session's requests are answered in their order: what is read has been locked before.
        locking, *reading = ask_all(
            self._session,
            lambda client: [begin(client, steps), *begin_reading(client, paths)],
            self._timeout_s,
        )
        try:
            verdict(steps, locking)
        except Refused:
            mine = self._take_each(presence, mine, taken)
            answers = read_all(self._session, [each.item for each in mine], self._timeout_s)
        else:
            answers = readings(self._session, paths, reading, self._timeout_s)
        for each, answer in zip(mine, answers, strict=True):
            if isinstance(answer, NoNodeError):
                # Deleted since by somebody who asks for no lock.
                self.drop([each])
                taken.gone.append(each)
            elif isinstance(answer, KazooException):
                self.drop(mine)
                raise denied("read", each.item, answer) from None
            else:
                taken.held.append(Held(each.item, each.lock, answer[0], answer[1], presence))
        return taken

    def finish(self, held: Sequence[Held]) -> list[Outcome]:
        """Delete the items and their locks: all at once, or each on its own where that is refused."""
        if not held:
            return []
        presence = self._presence()
        if all(each.presence == presence for each in held):
            steps = [check(presence)]
            for each in held:
                steps += [delete(each.item), delete(each.lock)]
            try:
                transact(self._session, steps, self._timeout_s)
            except Refused as refusal:
                logger.debug("Finishing %d items one by one: %s", len(held), refusal)
            else:
                return [Outcome.DONE] * len(held)
        return [self._replace(each, [], presence) for each in held]

    def replace(self, held: Held, steps: Sequence[Step]) -> Outcome:
        """Delete the item and its lock and do `steps`, together: requeue it, or move it elsewhere.

        Where the item is gone, or somebody else's, `steps` are not done.

        Raises:
            Refused: One of `steps` could not be done; the item is held as before.
        """
        return self._replace(held, steps, self._presence())

    def holds(self, held: Held) -> bool:
        """Whether the item is still ours, as far as is known: no request is made."""
        own = self._own()
        return own.session_id == self._session.id and held.presence == own.presence

    def release(self, held: Sequence[Held]) -> None:
        """Give the items back: delete their locks, if they are ours still."""
        self.drop([Wanted(each.item, each.lock) for each in held])

    def drop(self, wanted: Sequence[Wanted]) -> None:
        """Delete the locks among these that are ours."""
        if not wanted:
            return
        presence = self._presence()
        answers = ask_all(
            self._session, lambda client: [client.get_async(each.lock) for each in wanted], self._timeout_s
        )
        attempts = [
            [check(presence), delete(each.lock)]
            for each, answer in zip(wanted, answers, strict=True)
            if not isinstance(answer, KazooException) and answer[0] == presence.encode()
        ]
        ask_all(self._session, lambda client: [begin(client, each) for each in attempts], self._timeout_s)

    def close(self) -> None:
        """Delete the presence: nothing can be finished in this session any more. It may be used again."""
        own = self._own()
        with own.lock:
            session_id, own.session_id = own.session_id, None
            # Without a connection it goes with its session, which takes no longer than waiting for one.
            if session_id == self._session.id and self._session.state is State.CONNECTED:
                try:
                    self._session.ask(lambda client: client.delete_async(own.presence), self._timeout_s)
                except (ZooKeeperUnreachable, KazooException) as error:
                    # It goes with its session.
                    logger.debug("The presence stays until its session ends: %r", error)

    # -- inside

    def _own(self) -> _Own:
        own = self._mine
        if own.pid != os.getpid():
            own = self._mine = _Own()
        return own

    def _presence(self) -> str:
        """The path of this consumer's presence in the session that lives now."""
        own = self._own()
        with own.lock:
            if own.session_id is None or own.session_id != self._session.id:
                own.session_id = None
                own.presence = f"{self._presences}/{uuid.uuid4().hex}"
                own.session_id = self._appear(own.presence)
            return own.presence

    def _appear(self, path: str) -> int:
        try:
            _path, stat = self._session.ask(
                lambda client: client.create_async(path, ephemeral=True, makepath=True, include_data=True),
                self._timeout_s,
            )
        except KazooException as error:
            raise denied("create", path, error) from None
        owner: int = stat.ephemeralOwner
        return owner

    def _take_each(self, presence: str, wanted: list[Wanted], taken: Taken) -> list[Wanted]:
        attempts = [[check(presence), *lock_steps(each, presence)] for each in wanted]
        answers = ask_all(
            self._session, lambda client: [begin(client, each) for each in attempts], self._timeout_s
        )
        mine = []
        for each, steps, answer in zip(wanted, attempts, answers, strict=True):
            try:
                verdict(steps, answer)
            except Refused as refusal:  # noqa: PERF203 - each has an answer of its own
                if refusal.index == 0:
                    raise ZooKeeperUnreachable(f"the session expired while it locked {each.item}") from None
                if refusal.index == 1:
                    taken.gone.append(each)
                elif isinstance(refusal.error, NodeExistsError):
                    taken.locked.append(each)
                else:
                    raise
            else:
                mine.append(each)
        return mine

    def _replace(self, held: Held, steps: Sequence[Step], presence: str) -> Outcome:
        if held.presence == presence:
            attempt = [check(presence), delete(held.item), *steps, delete(held.lock)]
            try:
                transact(self._session, attempt, self._timeout_s)
            except Refused as refusal:
                if refusal.index == 1:
                    # Or the lock would stay for as long as the session.
                    self.drop([Wanted(held.item, held.lock)])
                    return Outcome.GONE
                if 1 < refusal.index < len(attempt) - 1:
                    raise
            else:
                return Outcome.DONE
        # The session is another one, or the lock was deleted by hand: only if nobody has it now.
        attempt = [create(held.lock, ephemeral=True), delete(held.item), *steps, delete(held.lock)]
        try:
            transact(self._session, attempt, self._timeout_s)
        except Refused as refusal:
            if refusal.index == 0:
                return Outcome.LOST
            if refusal.index == 1:
                return Outcome.GONE
            raise
        return Outcome.DONE


def lock_steps(wanted: Wanted, presence: str) -> list[Step]:
    """What takes the lock of an item that is still there, and says whose it is."""
    return [check(wanted.item), create(wanted.lock, presence.encode(), ephemeral=True)]
