"""Taking items under ephemeral locks: the holder of an item's lock consumes the item.

A lock is an ephemeral node with the name of the item. When its holder dies, the lock ends with the holder's
session, and the item is free again. An item is finished by deleting it and its lock in one transaction.

The name of a lock does not identify its holder. A late request of an expired session could delete the lock of
the next holder. Therefore each session also has an ephemeral node, its *presence*, and every transaction
checks it: as long as the presence exists, the session lives, and so do its locks.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError

from celery_dq.errors import AccessDenied, ZooKeeperUnreachable
from celery_dq.per_process import PerProcess
from celery_dq.zookeeper.multi_read import begin_reading, read_all, readings
from celery_dq.zookeeper.session import Session, SessionState
from celery_dq.zookeeper.transaction import (
    Step,
    TransactionRefused,
    ask_all,
    begin,
    check,
    create,
    delete,
    failure_of,
    transact,
    verdict,
)

__all__ = ["ItemLocks", "LockedItem", "FinishOutcome", "TakeResult", "WantedItem"]

logger = logging.getLogger(__name__)


class WantedItem(NamedTuple):
    """The paths of an item and its lock."""

    item: str
    lock: str


class LockedItem(NamedTuple):
    """A locked item: its data and stat, and the presence of the session that locked it."""

    item: str
    lock: str
    data: bytes
    stat: Any
    presence: str


class TakeResult(NamedTuple):
    """The result of an attempt to take items.

    Attributes:
        held: Items that were locked.
        locked: Items that other consumers have locked.
        gone: Items that do not exist any more.
        denied: Items that their ACL does not let this session read.
    """

    held: list[LockedItem]
    locked: list[WantedItem]
    gone: list[WantedItem]
    denied: list[WantedItem]


class FinishOutcome(Enum):
    """The result of finishing an item."""

    #: The item was deleted by this request.
    DONE = "done"
    #: The item was deleted before: by a peer without locks, or by a request whose answer was lost.
    GONE = "gone"
    #: The session had expired, and another consumer has locked the item: it is consumed again.
    LOST = "lost"


class _Presence:
    """The state of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: The session of the presence; None if there is no presence.
        self.session_id: int | None = None
        self.presence = ""


class ItemLocks:
    """Takes, finishes, requeues and releases items for one consumer. Thread-safe.

    Every call waits for ZooKeeper for at most `timeout_s` seconds, and then raises
    :exc:`~celery_dq.errors.ZooKeeperUnreachable`. A repeated call does nothing twice.

    Args:
        session: The session that owns the locks.
        presences: The folder of the presences; created if it is missing.
        timeout_s: Seconds to wait for ZooKeeper; default 10.
    """

    def __init__(self, session: Session, presences: str, *, timeout_s: float = 10.0) -> None:
        self._session = session
        self._presences = presences
        self._timeout_s = timeout_s
        self._state = PerProcess(_Presence)

    def take(self, wanted: Sequence[WantedItem]) -> TakeResult:
        """Lock and read those of `wanted` that are free, in one round trip if all are.

        The folder of the locks must exist. If the call raises, some items may be locked: :meth:`drop` them
        before the next attempt to take them.

        Raises:
            TransactionRefused: A lock could not be created, e.g. because the folder of the locks is missing.
            ZooKeeperUnreachable: ZooKeeper did not answer, or the session expired.
            AccessDenied: An ACL forbids to create the locks.
        """
        if not wanted:
            return TakeResult([], [], [], [])
        presence = self._presence()
        taken = TakeResult([], [], [], [])
        mine = list(wanted)
        steps = [check(presence), *[step for each in mine for step in lock_steps(each, presence)]]
        paths = [each.item for each in mine]
        # ZooKeeper answers the requests of a session in order: the items are locked before they are read.
        locking, *reading = ask_all(
            self._session,
            lambda client: [begin(client, steps), *begin_reading(client, paths)],
            self._timeout_s,
        )
        try:
            verdict(steps, locking)
        except (TransactionRefused, AccessDenied):
            mine = self._take_each(presence, mine, taken)
            answers = read_all(self._session, [each.item for each in mine], self._timeout_s)
        else:
            answers = readings(self._session, paths, reading, self._timeout_s)
        for each, answer in zip(mine, answers, strict=True):
            if isinstance(answer, NoNodeError):
                # A peer without locks has deleted the item in the meantime.
                self.drop([each])
                taken.gone.append(each)
            elif isinstance(answer, NoAuthError):
                # The ACL has changed since the item was locked.
                self.drop([each])
                taken.denied.append(each)
            elif isinstance(answer, KazooException):
                self.drop(mine)
                raise failure_of("read", each.item, answer) from None
            else:
                taken.held.append(LockedItem(each.item, each.lock, answer[0], answer[1], presence))
        return taken

    def finish(self, held: Sequence[LockedItem]) -> list[FinishOutcome]:
        """Delete the items and their locks: all at once, or each alone if that is refused.

        Returns:
            The outcome for each item, in order.
        """
        if not held:
            return []
        presence = self._presence()
        if all(each.presence == presence for each in held):
            steps = [check(presence)]
            for each in held:
                steps += [delete(each.item), delete(each.lock)]
            try:
                transact(self._session, steps, self._timeout_s)
            except TransactionRefused as refusal:
                logger.debug("Finishing %d items one by one: %s", len(held), refusal)
            else:
                return [FinishOutcome.DONE] * len(held)
        return [self._replace(each, [], presence) for each in held]

    def replace(self, held: LockedItem, steps: Sequence[Step]) -> FinishOutcome:
        """Delete the item and its lock and do `steps` in one transaction, for example to requeue the item.

        If the item is gone, or another consumer has locked it, `steps` are not done.

        Raises:
            TransactionRefused: One of `steps` was refused; the item is locked as before.
        """
        return self._replace(held, steps, self._presence())

    def holds(self, held: LockedItem) -> bool:
        """Whether this session still holds the item, as far as it knows; sends no request."""
        own = self._state.get()
        return own.session_id == self._session.id and held.presence == own.presence

    def release(self, held: Sequence[LockedItem]) -> None:
        """Release the items: delete those of their locks that this session still holds."""
        self.drop([WantedItem(each.item, each.lock) for each in held])

    def drop(self, wanted: Sequence[WantedItem]) -> None:
        """Delete those of the locks that this session holds."""
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
        """Delete the presence, so that this session can finish nothing more; a later call makes a new one."""
        own = self._state.get()
        with own.lock:
            session_id, own.session_id = own.session_id, None
            # Without a connection, the presence ends with its session; to wait for a connection is no faster.
            if session_id == self._session.id and self._session.state is SessionState.CONNECTED:
                try:
                    self._session.ask(lambda client: client.delete_async(own.presence), self._timeout_s)
                except (ZooKeeperUnreachable, KazooException) as error:
                    logger.debug("Presence %s stays until its session ends: %r", own.presence, error)

    # -- inside

    def _presence(self) -> str:
        """The path of this consumer's presence in the current session; created if it is missing."""
        own = self._state.get()
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
            raise failure_of("create", path, error) from None
        owner: int = stat.ephemeralOwner
        return owner

    def _disappear(self, presence: str) -> None:
        """Forget a presence that is gone with its session, or with the whole chroot."""
        own = self._state.get()
        with own.lock:
            if own.presence == presence:
                own.session_id = None

    def _take_each(self, presence: str, wanted: list[WantedItem], taken: TakeResult) -> list[WantedItem]:
        attempts = [[check(presence), *lock_steps(each, presence)] for each in wanted]
        answers = ask_all(
            self._session, lambda client: [begin(client, each) for each in attempts], self._timeout_s
        )
        mine = []
        for each, steps, answer in zip(wanted, attempts, answers, strict=True):
            try:
                verdict(steps, answer)
            except TransactionRefused as refusal:  # noqa: PERF203 - each has an answer of its own
                if refusal.index == 0:
                    self._disappear(presence)
                    raise ZooKeeperUnreachable(f"the session expired while it locked {each.item}") from None
                if refusal.index == 1:
                    taken.gone.append(each)
                elif isinstance(refusal.error, NodeExistsError):
                    taken.locked.append(each)
                else:
                    raise
            except AccessDenied as denial:
                if denial.path != each.item:
                    raise
                taken.denied.append(each)
            else:
                mine.append(each)
        return mine

    def _replace(self, held: LockedItem, steps: Sequence[Step], presence: str) -> FinishOutcome:
        if held.presence == presence:
            attempt = [check(presence), delete(held.item), *steps, delete(held.lock)]
            try:
                transact(self._session, attempt, self._timeout_s)
            except TransactionRefused as refusal:
                if refusal.index == 1:
                    # Otherwise the lock would stay until the session ends.
                    self.drop([WantedItem(held.item, held.lock)])
                    return FinishOutcome.GONE
                if 1 < refusal.index < len(attempt) - 1:
                    raise
            else:
                return FinishOutcome.DONE
        # The session is a new one, or the lock was deleted by hand: finish only if no consumer has the lock.
        attempt = [create(held.lock, ephemeral=True), delete(held.item), *steps, delete(held.lock)]
        try:
            transact(self._session, attempt, self._timeout_s)
        except TransactionRefused as refusal:
            if refusal.index == 0:
                return FinishOutcome.LOST
            if refusal.index == 1:
                return FinishOutcome.GONE
            raise
        return FinishOutcome.DONE


def lock_steps(wanted: WantedItem, presence: str) -> list[Step]:
    """Return the steps that lock an existing item and record the session's presence in the lock."""
    return [check(wanted.item), create(wanted.lock, presence.encode(), ephemeral=True)]
