"""Taking items under ephemeral locks: the holder of an item's lock consumes the item.

A lock is an ephemeral node with the name of the item. When its holder dies, the lock ends with the holder's
session, and the item is free again. An item is finished by deleting it and its lock in one transaction.

The name of a lock does not identify its holder. A late request of an expired session could delete the lock of
the next holder. Therefore each session also has an ephemeral node, its *presence*, and every transaction
checks it: as long as the presence exists, the session lives, and so do its locks.

A lock that was deleted by hand is not recognised after another consumer has locked the item: both finish it,
with ``DONE`` or ``GONE``. A read of each lock before its deletion would cost three quarters of a finish.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError

from celery_dq.errors import AccessDenied, ZooKeeperUnreachable
from celery_dq.per_process import PerProcess
from celery_dq.shown import shown_logger
from celery_dq.zookeeper.multi_read import begin_reading, read_all, readings
from celery_dq.zookeeper.session import Session, SessionState
from celery_dq.zookeeper.transaction import (
    Step,
    TransactionRefused,
    answer_of,
    ask_all,
    begin,
    check,
    create,
    delete,
    failure_of,
    verdict,
)

__all__ = ["FinishOutcome", "ItemLocks", "LockedItem", "PendingTransaction", "TakeResult", "WantedItem"]

logger = shown_logger(__name__)


class Lockable(Protocol):
    """An item with the path of its lock."""

    @property
    def lock(self) -> str:
        """The path of the lock."""


Item = TypeVar("Item", bound=Lockable)


class WantedItem(NamedTuple):
    """The paths of an item and its lock."""

    item: str
    lock: str

    @property
    def name(self) -> str:
        """The name of the item; an id in a name never contains a slash."""
        return self.item.rpartition("/")[2]


class LockedItem(NamedTuple):
    """A locked item: its data and stat, and the presence of the session that locked it."""

    item: str
    lock: str
    data: bytes
    stat: Any
    presence: str

    @property
    def name(self) -> str:
        """The name of the item."""
        return self.item.rpartition("/")[2]


class TakeResult(NamedTuple):
    """The result of an attempt to take items.

    Attributes:
        held: Items that were locked.
        locked: Items that other consumers have locked.
        gone: Items that do not exist any more.
        denied: Items that their ACL does not let this session read or lock.
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


class PendingTransaction(NamedTuple):
    """A transaction that was sent and not answered yet."""

    steps: Sequence[Step]
    client: Any
    pending: Any


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
        taking: Returns further steps of the transaction that locks an item, from the path of the item.
            Default: no steps.
    """

    def __init__(
        self,
        session: Session,
        presences: str,
        *,
        timeout_s: float = 10.0,
        taking: Callable[[str], list[Step]] = lambda _item: [],
    ) -> None:
        self._session = session
        self._presences = presences
        self.timeout_s = timeout_s
        self._taking = taking
        self._state = PerProcess(_Presence)

    # -- locking

    def take(self, wanted: Sequence[WantedItem]) -> TakeResult:
        """Lock and read those of `wanted` that are free, in one round trip if all are.

        The folder of the locks is created if it is missing. If the call raises, some items may be locked:
        :meth:`drop` or :meth:`recover` them before the next attempt to take them.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer, or the session expired.
            AccessDenied: An ACL forbids to create the locks.
        """
        if not wanted:
            return TakeResult([], [], [], [])
        presence = self._presence()
        paths = [each.item for each in wanted]
        # ZooKeeper answers the requests of a session in order: the items are locked before they are read.
        locking = self._begin(presence, [step for each in wanted for step in self._locking(each, presence)])
        reading = begin_reading(locking.client, paths)
        refusals = [self._refusal(locking)]
        if refusals == [None]:
            refusals *= len(wanted)
            answers = [answer_of(self._session, locking.client, each, self.timeout_s) for each in reading]
            found = readings(self._session, paths, answers, self.timeout_s)
        else:
            if len(wanted) > 1:
                begun = [self._begin(presence, self._locking(each, presence)) for each in wanted]
                refusals = [self._refusal(each) for each in begun]
            mine = [path for path, refusal in zip(paths, refusals, strict=True) if refusal is None]
            found = self.read(mine)
        return self._sorted(presence, wanted, refusals, found)

    def recover(self, wanted: Sequence[WantedItem]) -> list[LockedItem]:
        """Read those of `wanted` that this consumer has locked, after a :meth:`take` that raised."""
        presence = self._presence()
        mine = self._mine(presence, wanted)
        found = self.read([each.item for each in mine])
        return self._sorted(presence, mine, [None] * len(mine), found).held

    def mine(self, wanted: Sequence[Item]) -> list[Item]:
        """Ask for the locks; return those of `wanted` that this consumer has locked."""
        return self._mine(self._presence(), wanted)

    def holds(self, held: LockedItem) -> bool:
        """Whether this session still holds the item, as far as it knows; sends no request."""
        own = self._state.get()
        return own.session_id == self._session.id and held.presence == own.presence

    def drop(self, wanted: Sequence[Lockable]) -> None:
        """Delete those of the locks that this consumer holds: their items are free again."""
        if not wanted:
            return
        presence = self._presence()
        attempts = [[check(presence), delete(each.lock)] for each in self._mine(presence, wanted)]
        self.ask_all(lambda client: [begin(client, each) for each in attempts])

    def watch(self, wanted: Sequence[Item], wake: Callable[[Item], None]) -> list[Item]:
        """Call `wake` with each of `wanted` when its lock or the connection ends; return the free ones."""

        def watching(each: Item) -> Callable[[Any], None]:
            return lambda _event: wake(each)

        def folder_changed(_event: Any) -> None:
            for each in hidden:
                wake(each)

        free, hidden = list[Item](), list[Item]()
        # A read of a missing node leaves no watch behind; an existence check would.
        answers = self.ask_all(
            lambda client: [client.get_async(each.lock, watch=watching(each)) for each in wanted]
        )
        for each, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, NoNodeError):
                free.append(each)
            elif isinstance(answer, NoAuthError):
                hidden.append(each)
            elif isinstance(answer, KazooException):
                raise failure_of("read", each.lock, answer)
        if hidden:
            # A lock that may not be read cannot be watched, but its folder can.
            folder = hidden[0].lock.rpartition("/")[0]
            names = self.ask(lambda client: client.get_children_async(folder, watch=folder_changed))
            free += [each for each in hidden if each.lock.rpartition("/")[2] not in names]
        return free

    # -- requests and transactions

    def ask(self, request: Callable[[Any], Any]) -> Any:
        """Send one request; see :meth:`Session.ask`."""
        return self._session.ask(request, self.timeout_s)

    def ensure(self, folder: str) -> None:
        """Create a folder if it is missing."""
        self.ask(lambda client: client.ensure_path_async(folder))

    def ask_all(self, send: Callable[[Any], Sequence[Any]]) -> list[Any]:
        """Send several requests at once; see :func:`~celery_dq.zookeeper.transaction.ask_all`."""
        return ask_all(self._session, send, self.timeout_s)

    def read(self, paths: Sequence[str]) -> list[Any]:
        """Read nodes; see :func:`~celery_dq.zookeeper.multi_read.read_all`."""
        return read_all(self._session, paths, self.timeout_s)

    @property
    def is_lost(self) -> bool:
        """Whether the presence was deleted: with its session, with the whole chroot, or by hand."""
        own = self._state.get()
        return bool(own.presence) and own.session_id is None

    def begin(self, steps: Sequence[Step]) -> PendingTransaction:
        """Send a transaction that is carried out only if the session has not ended."""
        return self._begin(self._presence(), steps)

    def refused(self, begun: PendingTransaction) -> TransactionRefused | None:
        """Wait for the answer to a transaction.

        Returns:
            None when the transaction was carried out. Otherwise the refusal, with the index of the refused
            step from 0.

        Raises:
            ZooKeeperUnreachable: No answer came, or the session has ended.
            AccessDenied: An ACL forbids one of the steps.
        """
        try:
            verdict(begun.steps, answer_of(self._session, begun.client, begun.pending, self.timeout_s))
        except TransactionRefused as refusal:
            if refusal.index == 0:
                self._disappear(refusal.step.path)
                raise ZooKeeperUnreachable(
                    f"The session with ZooKeeper at {self._session.hosts} has ended"
                ) from None
            return TransactionRefused.at(refusal.index - 1, refusal.step, refusal.error)
        return None

    def finish(self, held: Sequence[LockedItem]) -> list[FinishOutcome]:
        """Delete the items and their locks: all at once, or each alone if that is refused.

        Returns:
            The outcome for each item, in order.
        """
        if not held:
            return []
        presence = self._presence()
        if all(each.presence == presence for each in held):
            steps = [delete(path) for each in held for path in (each.item, each.lock)]
            refusal = self._transact(presence, steps)
            if refusal is None:
                return [FinishOutcome.DONE] * len(held)
            logger.debug("Finishing %d items one by one: %s", len(held), refusal)
        return [self.replace(each, []) for each in held]

    def replace(self, held: LockedItem, steps: Sequence[Step]) -> FinishOutcome:
        """Delete the item and its lock and do `steps` in one transaction, for example to requeue the item.

        If the item is gone, or another consumer has locked it, `steps` are not done.

        Raises:
            TransactionRefused: One of `steps` was refused; the item is locked as before.
        """
        presence = self._presence()
        if held.presence == presence:
            refusal = self._transact(presence, [delete(held.item), *steps, delete(held.lock)])
            if refusal is None:
                return FinishOutcome.DONE
            if refusal.index == 0:
                # Otherwise the lock would stay until the session ends.
                self.drop([held])
                return FinishOutcome.GONE
            if refusal.index <= len(steps):
                raise refusal
        # The session is a new one, or the lock was deleted by hand: finish only if no consumer has the lock.
        lock = create(held.lock, ephemeral=True)
        refusal = self._transact(presence, [lock, delete(held.item), *steps, delete(held.lock)])
        if refusal is None:
            return FinishOutcome.DONE
        if refusal.index > 1:
            raise refusal
        return FinishOutcome.GONE if refusal.index else FinishOutcome.LOST

    def close(self) -> None:
        """Delete the presence, so that this session can finish nothing more; a later call makes a new one."""
        own = self._state.get()
        with own.lock:
            session_id, own.session_id = own.session_id, None
            # Without a connection, the presence ends with its session, and waiting is not faster.
            if session_id == self._session.id and self._session.state is SessionState.CONNECTED:
                try:
                    self._session.ask(lambda client: client.delete_async(own.presence), self.timeout_s)
                except (ZooKeeperUnreachable, KazooException) as error:
                    logger.debug("Presence %s stays until its session ends: %r", own.presence, error)

    # -- inside

    def _presence(self) -> str:
        """The path of this consumer's presence in the current session; created if it is missing."""
        own = self._state.get()
        with own.lock:
            if own.session_id is None or own.session_id != self._session.id:
                presence = f"{self._presences}/{uuid.uuid4().hex}"
                # Set only now, the session first: a presence without a session counts as lost.
                own.session_id = self._appear(presence)
                own.presence = presence
            return own.presence

    def _appear(self, path: str) -> int:
        try:
            _path, stat = self._session.ask(
                lambda client: client.create_async(path, ephemeral=True, makepath=True, include_data=True),
                self.timeout_s,
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

    def _begin(self, presence: str, steps: Sequence[Step]) -> PendingTransaction:
        checked = [check(presence), *steps]
        client = self._session.open(self.timeout_s)
        return PendingTransaction(checked, client, begin(client, checked))

    def _transact(self, presence: str, steps: Sequence[Step]) -> TransactionRefused | None:
        return self.refused(self._begin(presence, steps))

    def _refusal(self, begun: PendingTransaction) -> TransactionRefused | AccessDenied | None:
        try:
            return self.refused(begun)
        except AccessDenied as denial:
            return denial

    def _mine(self, presence: str, wanted: Sequence[Item]) -> list[Item]:
        answers = self.ask_all(lambda client: [client.get_async(each.lock) for each in wanted])
        return [
            each
            for each, answer in zip(wanted, answers, strict=True)
            if not isinstance(answer, KazooException) and answer[0] == presence.encode()
        ]

    def _locking(self, wanted: WantedItem, presence: str) -> list[Step]:
        lock = create(wanted.lock, presence.encode(), ephemeral=True)
        return [check(wanted.item), lock, *self._taking(wanted.item)]

    def _sorted(
        self,
        presence: str,
        wanted: Sequence[WantedItem],
        refusals: Sequence[TransactionRefused | AccessDenied | None],
        found: Sequence[Any],
    ) -> TakeResult:
        """Sort the items by the refusals of their locks, and by the answers for those that are locked."""
        taken = TakeResult([], [], [], [])
        stale, homeless = list[WantedItem](), list[WantedItem]()
        answers = iter(found)
        for each, refusal in zip(wanted, refusals, strict=True):
            if isinstance(refusal, AccessDenied):
                if not refusal.path.startswith(each.item):
                    raise refusal
                taken.denied.append(each)
            elif refusal is not None:
                if isinstance(refusal.error, NodeExistsError):
                    taken.locked.append(each)
                elif not isinstance(refusal.error, NoNodeError):
                    raise refusal
                else:
                    (homeless if refusal.step.path == each.lock else taken.gone).append(each)
            elif isinstance(answer := next(answers), (NoNodeError, NoAuthError)):
                # A peer without locks has deleted the item in the meantime, or its ACL has changed.
                stale.append(each)
                (taken.gone if isinstance(answer, NoNodeError) else taken.denied).append(each)
            elif isinstance(answer, KazooException):
                raise failure_of("read", each.item, answer) from None
            else:
                taken.held.append(LockedItem(each.item, each.lock, answer[0], answer[1], presence))
        self.drop(stale)
        if homeless:
            # The folder was never created, or was an empty container that the server has deleted.
            self.ensure(homeless[0].lock.rpartition("/")[0])
            held, locked, gone, denied = self.take(homeless)
            taken = TakeResult(
                taken.held + held, taken.locked + locked, taken.gone + gone, taken.denied + denied
            )
        return taken
