"""Transactions that happen once, although the answer to one may be lost.

Whoever creates a sequential node and hears nothing cannot tell whether it is there: names as Curator spells
them have no room for a mark of one's own. So each transaction also writes a node that belongs to this
writer alone, on the condition that nobody has since the last one. After a silence the writer tries to write
that node again on the same condition: if it can, the transaction was not carried out and never will be;
if it cannot, the data says who did it, the transaction or an earlier try to find out. That also holds for a
request of a session that has expired meanwhile, and for one that is still on its way.

The nodes are persistent, because they have to outlive the session. A writer deletes its own when it is
closed; those of writers that crashed are deleted by others, a day later.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import BadVersionError, KazooException, NoNodeError

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import DQError, ZooKeeperUnreachable
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import (
    MAX_REQUEST,
    Refused,
    Step,
    ask_all,
    check_size,
    denied,
    set_data,
    size_of,
    transact,
)

__all__ = ["Journal"]

logger = logging.getLogger(__name__)

#: Steps that travel together at most; more do not make it faster.
MAX_STEPS = 500
#: Seconds for which one try waits, so that a connection that broke is used again soon after it is back.
TRY_S = 3.0
#: Seconds after which the node of a writer that crashed is deleted by others.
ABANDONED_S = 86_400.0
#: Nodes of others that are looked at when a writer starts.
LOOKED_AT = 20
#: Seconds that a clean-up may take; nothing depends on it.
CLEANUP_S = 2.0


class _Entry:
    """Steps of one caller, and what became of them."""

    def __init__(self, steps: Sequence[Step], size: int) -> None:
        self.steps = steps
        self.size = size
        self.answers: list[Any] | None = None
        self.error: BaseException | None = None
        self.done = False


class _Own:
    """What belongs to one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.waiting: deque[_Entry] = deque()
        self.path: str | None = None
        self.version = 0
        self.written = 0
        self.given_up = False


class Journal:
    """Commits transactions, each of them once. Thread-safe: what several threads commit travels together.

    :param session: the session to write with; the journal outlives its expiry.
    :param folder: where the node of this writer is made, beside those of others.
    :param abandoned_s: seconds after its last write that the node of another writer is deleted; default one
        day. A writer that is only slow makes another one.
    :param clock: times the deadlines.
    """

    def __init__(
        self,
        session: Session,
        folder: str,
        *,
        abandoned_s: float = ABANDONED_S,
        clock: Clock | None = None,
    ) -> None:
        self._session = session
        self._abandoned_s = abandoned_s
        self._folder = folder
        self._clock = clock or SystemClock()
        self._mine = _Own()

    def commit(self, steps: Sequence[Step], timeout_s: float) -> list[Any] | None:
        """Make all `steps` at once, once; survives lost answers, reconnects and expired sessions.

        :returns: their answers; None when they were made and the answer was lost.

        Raises:
            Refused: One of them could not be done; nothing was.
            ZooKeeperUnreachable: Nobody answered for `timeout_s` seconds; they may have been made.
            MessageTooLarge: Nothing was sent.
            AccessDenied: The session may not do this.
        """
        (entry,) = self._commit([steps], timeout_s)
        if entry.error is not None:
            raise entry.error
        return entry.answers

    def commit_each(
        self, transactions: Sequence[Sequence[Step]], timeout_s: float
    ) -> list[list[Any] | DQError | None]:
        """Commit several that do not depend on each other; they travel together where they can.

        :returns: for each its answers (None: lost), or the error that :meth:`commit` would raise for it.

        Raises:
            MessageTooLarge: Nothing was sent.
        """
        outcomes: list[list[Any] | DQError | None] = []
        for entry in self._commit(transactions, timeout_s):
            if isinstance(entry.error, DQError):
                outcomes.append(entry.error)
            elif entry.error is not None:
                raise entry.error
            else:
                outcomes.append(entry.answers)
        return outcomes

    def give_up(self) -> None:
        """Let all that is being committed raise ZooKeeperUnreachable soon, for good: before :meth:`close`."""
        self._own().given_up = True

    def close(self, timeout_s: float = CLEANUP_S) -> None:
        """Delete the node of this writer. It may be used again."""
        own = self._own()
        with own.lock:
            path, own.path = own.path, None
            if path is not None:
                try:
                    self._session.ask(lambda client: client.delete_async(path), timeout_s)
                except (ZooKeeperUnreachable, KazooException) as error:
                    logger.debug("The node %s stays for others to delete: %r", path, error)

    # -- inside

    def _commit(self, transactions: Sequence[Sequence[Step]], timeout_s: float) -> list[_Entry]:
        own = self._own()
        entries = []
        for steps in transactions:
            # Alone and with the own node, it must fit, or nobody can send it.
            check_size([*steps, set_data(f"{self._folder}/{'-' * 32}", b"-" * 20)], self._chroot())
            entries.append(_Entry(steps, size_of(steps)))
        deadline = self._clock.monotonic() + timeout_s
        own.waiting.extend(entries)
        with own.lock:
            # Whoever had the lock before may have sent these along.
            while not all(entry.done for entry in entries):
                self._send(own, self._batch(own), deadline)
        return entries

    def _own(self) -> _Own:
        own = self._mine
        if own.pid != os.getpid():
            own = self._mine = _Own()
        return own

    def _chroot(self) -> str:
        slash, chroot = self._session.hosts.partition("/")[1:]
        return slash + chroot

    def _batch(self, own: _Own) -> list[_Entry]:
        """The entries that travel together; the first one in any case."""
        batch = [own.waiting.popleft()]
        room = MAX_REQUEST - size_of([set_data("-" * 256, b"-" * 20)]) - batch[0].size
        count = len(batch[0].steps)
        chroot = len(self._chroot().encode())
        while own.waiting:
            following = own.waiting[0]
            size = following.size + chroot * len(following.steps)
            count += len(following.steps)
            if size > room - chroot * MAX_STEPS or count > MAX_STEPS:
                break
            room -= size
            batch.append(own.waiting.popleft())
        return batch

    def _send(self, own: _Own, batch: list[_Entry], deadline: float) -> None:
        try:
            answers = self._write(own, [step for entry in batch for step in entry.steps], deadline)
        except Refused as refusal:
            if len(batch) > 1:
                # One of them spoils the others: each on its own.
                for entry in batch:
                    self._send(own, [entry], deadline)
                return
            batch[0].error = refusal
            batch[0].done = True
            return
        except BaseException as error:
            if not isinstance(error, DQError):
                # Interrupted: nobody knows what the node holds now.
                own.path = None
            for entry in batch:
                entry.error, entry.done = error, True
            if not isinstance(error, Exception):
                raise
            return
        for entry in batch:
            if answers is not None:
                entry.answers, answers = answers[: len(entry.steps)], answers[len(entry.steps) :]
            entry.done = True

    def _write(self, own: _Own, steps: Sequence[Step], deadline: float) -> list[Any] | None:
        while True:
            path = own.path or self._begin(own, deadline)
            own.written += 1
            mark = b"%d" % own.written
            try:
                answers = transact(
                    self._session, [set_data(path, mark, own.version), *steps], self._try(deadline)
                )
            except ZooKeeperUnreachable:
                if self._was_written(own, path, mark, deadline):
                    return None
                continue
            except Refused as refusal:
                if refusal.index:
                    raise Refused.at(refusal.index - 1, refusal.step, refusal.error) from None
                # Somebody deleted or wrote the node, so nothing was done: start with another one.
                own.path = None
                self._left(deadline)
                continue
            own.version += 1
            return answers[1:]

    def _begin(self, own: _Own, deadline: float) -> str:
        """Make the node of this writer."""
        while True:
            path = f"{self._folder}/{uuid.uuid4().hex}"
            try:
                self._session.ask(self._birth(path), self._try(deadline))
            except ZooKeeperUnreachable:
                # It may be there: nobody will miss it.
                self._left(deadline)
                continue
            except KazooException as error:
                raise denied("create", path, error) from None
            own.path, own.version = path, 0
            self._collect(path)
            return path

    def _birth(self, path: str) -> Callable[[Any], Any]:
        return lambda client: client.create_async(path, b"0", makepath=True)

    def _was_written(self, own: _Own, path: str, mark: bytes, deadline: float) -> bool:
        """Find out whether the transaction that got no answer was carried out, and see that it never is."""
        try:
            while True:
                own.written += 1
                probe = b"%d" % own.written
                try:
                    transact(self._session, [set_data(path, probe, own.version)], self._try(deadline))
                except ZooKeeperUnreachable:
                    self._left(deadline)
                    continue
                except Refused as refusal:
                    if not isinstance(refusal.error, BadVersionError):
                        raise ZooKeeperUnreachable(
                            f"{path} is gone, so that nobody knows whether what was asked was done"
                        ) from None
                    data = self._read(path, deadline)
                    own.version += 1
                    return data == mark
                own.version += 1
                return False
        except ZooKeeperUnreachable:
            # In doubt for good: the node does not know what comes next.
            own.path = None
            raise

    def _read(self, path: str, deadline: float) -> bytes:
        while True:
            try:
                answer = ask_all(
                    self._session,
                    lambda client: [client.sync_async(path), client.get_async(path)],
                    self._try(deadline),
                )[1]
            except ZooKeeperUnreachable:
                self._left(deadline)
                continue
            if isinstance(answer, NoNodeError):
                raise ZooKeeperUnreachable(
                    f"{path} is gone, so that nobody knows whether what was asked was done"
                )
            if isinstance(answer, Exception):
                raise answer
            data: bytes = answer[0]
            return data

    def _collect(self, own_path: str) -> None:
        """Delete what crashed writers left a day ago; by the servers' clock."""
        try:
            names = self._session.ask(lambda client: client.get_children_async(self._folder), CLEANUP_S)
            paths = [own_path, *[f"{self._folder}/{name}" for name in names[:LOOKED_AT]]]
            stats = ask_all(
                self._session, lambda client: [client.exists_async(path) for path in paths], CLEANUP_S
            )
            old = [
                path
                for path, stat in zip(paths, stats, strict=True)
                if getattr(stat, "mtime", stats[0].ctime) < stats[0].ctime - self._abandoned_s * 1000
            ]
            ask_all(self._session, lambda client: [client.delete_async(path) for path in old], CLEANUP_S)
        except (ZooKeeperUnreachable, KazooException, AttributeError) as error:
            logger.debug("Old nodes stay in %s: %r", self._folder, error)

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock.monotonic()
        if left <= 0 or self._own().given_up:
            raise ZooKeeperUnreachable(
                f"ZooKeeper at {self._session.hosts} did not answer in time; what was asked may be done"
            )
        return left

    def _try(self, deadline: float) -> float:
        return min(TRY_S, max(0.001, deadline - self._clock.monotonic()))
