"""Transactions that are carried out once, even if an answer is lost.

A client that creates a sequential node and gets no answer cannot tell whether the node exists: the names of
Curator's nodes leave no place for a mark of the writer. Therefore each transaction also writes a node that
belongs to this writer alone, on the condition that its version is unchanged since the writer's last write.

After a lost answer, the writer sends the same transaction again on the same condition. If the condition is
refused, an earlier attempt was carried out. If another step is refused, the writer deletes its node on the
same condition, so that no attempt is ever carried out. This also holds for a request of a session that has
expired, and for a request that is still under way. The node and the expected version are the *stamp* of the
transaction. With the stamp, another writer, of another connection, can continue the attempts.

The nodes are persistent, because they must outlive the session. A writer deletes its node when it is closed.
Other writers delete the node of a crashed writer a day later.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import BadVersionError, KazooException, NoNodeError

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import AccessDenied, DQError, ZooKeeperUnreachable
from celery_dq.per_process import PerProcess
from celery_dq.shown import shown_logger
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import (
    MAX_REQUEST,
    Step,
    TransactionRefused,
    ask_all,
    check_size,
    delete,
    failure_of,
    set_data,
    size_of,
    transact,
)

__all__ = ["IdempotentWriter", "Stamp"]

logger = shown_logger(__name__)

#: Maximum number of steps that are sent together; more are not faster.
MAX_STEPS = 500
#: Seconds that one attempt waits; then the next attempt uses the connection that has come back.
TRY_S = 3.0
#: Seconds after which other writers delete the node of a crashed writer.
ABANDONED_S = 86_400.0
#: Number of other writers' nodes that are checked when a writer starts.
LOOKED_AT = 20
#: Maximum seconds for a clean-up, which is not needed for correctness.
CLEANUP_S = 2.0


class Stamp(NamedTuple):
    """Identifies one transaction of one writer: the writer's node and the version that it expects."""

    node: str
    version: int


class _PendingSteps:
    """The steps of one caller, its deadline, and their result."""

    def __init__(self, steps: Sequence[Step], size: int, deadline: float) -> None:
        self.steps = steps
        self.size = size
        self.deadline = deadline
        self.answers: list[Any] | None = None
        self.error: BaseException | None = None
        self.done = False

    def fail(self, error: BaseException) -> None:
        """End the wait of the caller, who gets the error."""
        self.error, self.done = error, True


class _Batch:
    """Steps of several callers in one transaction, and its stamp unless none of them was done."""

    def __init__(self, entries: Sequence[_PendingSteps]) -> None:
        self.entries = entries
        self.stamps: dict[str, Stamp] = {}


class _NoAnswerInTime(ZooKeeperUnreachable):
    """The deadline has passed; another attempt with the same stamp may still find out the outcome."""


class _WriterState:
    """The state of one process."""

    def __init__(self) -> None:
        #: Held by the thread that sends.
        self.lock = threading.Lock()
        self.waiting: deque[_PendingSteps] = deque()
        #: Transactions whose sender has given up before other callers have. The next sender continues them.
        self.unanswered: deque[_Batch] = deque()
        #: The stamp of the next transaction; None without a node, and while a transaction has the stamp.
        self.stamp: Stamp | None = None
        self.given_up = False


class IdempotentWriter:
    """Commits each transaction once. Thread-safe: transactions of several threads are sent together.

    Args:
        session: The session that sends the requests. The writer continues in the next session after an
            expiry.
        folder: The folder of the writers' nodes.
        abandoned_s: Seconds after the last write until other writers delete a writer's node; default one
            day. A writer that is only slow creates a new node.
        clock: Monotonic time for deadlines.
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
        self._state = PerProcess(_WriterState)

    def commit(self, steps: Sequence[Step], timeout_s: float) -> list[Any] | None:
        """Do all `steps` in one transaction, once, despite lost answers, reconnects and expired sessions.

        Args:
            steps: The steps of the transaction.
            timeout_s: Seconds to wait for an answer, over all attempts.

        Returns:
            The answers of the steps; None if the steps were done and the answer was lost.

        Raises:
            TransactionRefused: A step was refused, and none was done.
            ZooKeeperUnreachable: ZooKeeper did not answer within `timeout_s` seconds; the steps may have been
                done.
            MessageTooLarge: The request would be too large; nothing was sent.
            AccessDenied: An ACL forbids a step; none was done.
        """
        (entry,) = self._commit([steps], timeout_s)
        if entry.error is not None:
            raise entry.error
        return entry.answers

    def commit_stamped(
        self, steps: Sequence[Step], timeout_s: float, stamps: dict[str, Stamp], key: str, *, limit: int
    ) -> None:
        """Do all `steps` in one transaction, once, also if another writer continues the attempts.

        Args:
            steps: The steps of the transaction.
            timeout_s: Seconds to wait for an answer, over all attempts.
            stamps: Receives the stamp of the transaction, unless none of its steps was done.
            key: The key of the stamp in `stamps`. If there is one, the call repeats its transaction.
            limit: Maximum bytes of the request.

        Raises:
            TransactionRefused: A step was refused, and none was done.
            ZooKeeperUnreachable: ZooKeeper did not answer. A call with the same stamps does nothing twice.
            MessageTooLarge: The request would be larger than `limit`; nothing was sent.
            AccessDenied: An ACL forbids a step; only an earlier attempt without answer may have done any.
        """
        check_size([*steps, self._longest_write()], self._chroot(), limit=limit)
        own = self._state.get()
        deadline = self._clock.monotonic() + timeout_s
        if not own.lock.acquire(timeout=_wait_s(timeout_s)):
            raise self._no_answer()
        try:
            self._write(own, steps, deadline, stamps, key)
        finally:
            own.lock.release()

    def commit_each(
        self, transactions: Sequence[Sequence[Step]], timeout_s: float
    ) -> list[list[Any] | DQError | None]:
        """Commit several transactions that do not depend on each other; they are sent together if possible.

        Args:
            transactions: The steps of each transaction.
            timeout_s: Seconds to wait for an answer, over all attempts.

        Returns:
            For each transaction its answers (None if they were lost), or the error that :meth:`commit` would
            raise.

        Raises:
            MessageTooLarge: A request would be too large; nothing was sent.
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
        """Make every commit of this process raise ZooKeeperUnreachable soon; used before :meth:`close`."""
        self._state.get().given_up = True

    def close(self, timeout_s: float = CLEANUP_S) -> None:
        """Delete the node of this writer; a later commit creates a new one.

        If a commit is under way for longer than `timeout_s`, the node is left to other writers, and no
        attempt is repeated any more.
        """
        own = self._state.get()
        if not own.lock.acquire(timeout=timeout_s):
            own.given_up = True
            return
        try:
            stamp, own.stamp = own.stamp, None
            if stamp is not None:
                self._session.ask(lambda client: client.delete_async(stamp.node), timeout_s)
        except (ZooKeeperUnreachable, KazooException) as error:
            logger.debug("A node in %s was left to other writers to delete: %r", self._folder, error)
        finally:
            own.lock.release()

    # -- inside

    def _commit(self, transactions: Sequence[Sequence[Step]], timeout_s: float) -> list[_PendingSteps]:
        own = self._state.get()
        deadline = self._clock.monotonic() + timeout_s
        entries = []
        for steps in transactions:
            # Each transaction must fit into a request together with the write of this writer's node.
            check_size([*steps, self._longest_write()], self._chroot())
            entries.append(_PendingSteps(steps, size_of(steps), deadline))
        own.waiting.extend(entries)
        if own.lock.acquire(timeout=_wait_s(timeout_s)):
            try:
                # The thread that had the lock before may have sent these entries too.
                while not all(entry.done for entry in entries):
                    self._send(own, self._next_batch(own), deadline)
                    self._give_up_late(own, entries)
            finally:
                own.lock.release()
        for entry in entries:
            if not entry.done:
                entry.fail(self._no_answer())
        return entries

    def _give_up_late(self, own: _WriterState, entries: Sequence[_PendingSteps]) -> None:
        """End the waits whose deadline has passed. Entries that were not sent are not sent later."""
        now = self._clock.monotonic()
        for entry in entries:
            if not entry.done and (entry.deadline <= now or own.given_up):
                entry.fail(self._no_answer())

    def _longest_write(self) -> Step:
        return set_data(f"{self._folder}/{'-' * 32}", b"-" * 20)

    def _chroot(self) -> str:
        slash, chroot = self._session.hosts.partition("/")[1:]
        return slash + chroot

    def _next_batch(self, own: _WriterState) -> _Batch:
        while own.unanswered:
            batch = own.unanswered.popleft()
            if not all(entry.done for entry in batch.entries):
                return batch
        return self._batch(own)

    def _batch(self, own: _WriterState) -> _Batch:
        """Take the entries that are sent together: always the first, and those that fit behind it."""
        while own.waiting[0].done:
            own.waiting.popleft()
        batch = [own.waiting.popleft()]
        room = MAX_REQUEST - size_of([set_data("-" * 256, b"-" * 20)]) - batch[0].size
        count = len(batch[0].steps)
        chroot = len(self._chroot().encode())
        while own.waiting:
            following = own.waiting[0]
            if following.done:
                own.waiting.popleft()
                continue
            size = following.size + chroot * len(following.steps)
            count += len(following.steps)
            if size > room - chroot * MAX_STEPS or count > MAX_STEPS:
                break
            room -= size
            batch.append(own.waiting.popleft())
        return _Batch(batch)

    def _send(self, own: _WriterState, batch: _Batch, deadline: float) -> None:
        entries = batch.entries
        try:
            steps = [step for entry in entries for step in entry.steps]
            answers = self._write(own, steps, deadline, batch.stamps, "")
        except _NoAnswerInTime:
            self._give_up_late(own, entries)
            if not all(entry.done for entry in entries):
                own.unanswered.append(batch)
            return
        except BaseException as error:
            # Without a stamp, no step was done.
            is_refused = isinstance(error, (TransactionRefused, AccessDenied)) and not batch.stamps
            if is_refused and len(entries) > 1:
                # One of them was refused and the others with it: send each alone.
                for entry in entries:
                    if not entry.done:
                        self._send(own, _Batch([entry]), deadline)
                return
            for entry in entries:
                entry.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        for entry in entries:
            if answers is not None:
                entry.answers, answers = answers[: len(entry.steps)], answers[len(entry.steps) :]
            entry.done = True

    def _write(
        self, own: _WriterState, steps: Sequence[Step], deadline: float, stamps: dict[str, Stamp], key: str
    ) -> list[Any] | None:
        is_repeat = key in stamps
        stamp = stamps[key] if is_repeat else self._stamp(own, deadline)
        is_own = stamp == own.stamp
        while True:
            attempt = [set_data(stamp.node, b"", stamp.version), *steps]
            if is_own:
                # No other transaction gets this stamp until the outcome is known, also if the call is
                # interrupted.
                own.stamp = None
            stamps[key] = stamp
            try:
                answers: list[Any] | None = transact(self._session, attempt, self._try(deadline))[1:]
            except ZooKeeperUnreachable:
                is_repeat = True
                self._left(own, deadline)
                continue
            except AccessDenied:
                if not is_repeat:
                    del stamps[key]
                    own.stamp = stamp
                raise
            except TransactionRefused as refusal:
                if refusal.index:
                    if not is_repeat:
                        del stamps[key]
                        own.stamp = stamp
                    elif self._rule_out(own, stamps, key, deadline):
                        return None
                    raise TransactionRefused.at(refusal.index - 1, refusal.step, refusal.error) from None
                if not is_repeat:
                    # Another client has deleted or written the node, so nothing was done: use a new node.
                    del stamps[key]
                    self._left(own, deadline)
                    stamp = self._stamp(own, deadline)
                    continue
                if not isinstance(refusal.error, BadVersionError):
                    del stamps[key]
                    raise ZooKeeperUnreachable(
                        f"{stamp.node} was deleted: the unanswered request may have been carried out"
                    ) from None
                # An earlier attempt was carried out, and its answer was lost.
                answers = None
            if is_own:
                own.stamp = Stamp(stamp.node, stamp.version + 1)
            return answers

    def _stamp(self, own: _WriterState, deadline: float) -> Stamp:
        """Return the stamp of the next transaction; create the node of this writer if there is none."""
        while own.stamp is None:
            path = f"{self._folder}/{uuid.uuid4().hex}"
            try:
                self._session.ask(_creation(path), self._try(deadline))
            except (ZooKeeperUnreachable, NoNodeError):
                # The node may exist: another writer deletes it later. Or the chroot was deleted a moment ago:
                # the next request creates it again.
                self._left(own, deadline)
            except KazooException as error:
                raise failure_of("create", path, error) from None
            else:
                own.stamp = Stamp(path, 0)
                self._collect(path)
        return own.stamp

    def _rule_out(self, own: _WriterState, stamps: dict[str, Stamp], key: str, deadline: float) -> bool:
        """Make sure that an unanswered attempt is never carried out; return whether it was already.

        A deletion may be repeated, because it leaves the version as it was.
        """
        stamp = stamps[key]
        while True:
            try:
                transact(self._session, [delete(stamp.node, stamp.version)], self._try(deadline))
            except ZooKeeperUnreachable:
                self._left(own, deadline)
                continue
            except TransactionRefused as refusal:
                if isinstance(refusal.error, BadVersionError):
                    return True
            del stamps[key]
            return False

    def _collect(self, own_path: str) -> None:
        """Delete nodes of writers that crashed long ago, by the clock of the servers."""
        try:
            names = self._session.ask(lambda client: client.get_children_async(self._folder), CLEANUP_S)
            # ZooKeeper returns the names in the same order each time.
            some = random.sample(names, min(LOOKED_AT, len(names)))
            paths = [own_path, *[f"{self._folder}/{name}" for name in some]]
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
            logger.debug("Nodes of crashed writers stay in %s: %r", self._folder, error)

    def _left(self, own: _WriterState, deadline: float) -> None:
        if self._clock.monotonic() >= deadline or own.given_up:
            raise self._no_answer()

    def _no_answer(self) -> ZooKeeperUnreachable:
        return _NoAnswerInTime(
            f"ZooKeeper at {self._session.hosts} did not answer in time; the request may "
            "have been carried out"
        )

    def _try(self, deadline: float) -> float:
        return min(TRY_S, max(0.001, deadline - self._clock.monotonic()))


def _wait_s(timeout_s: float) -> float:
    """Return the seconds to wait for a lock."""
    return -1 if timeout_s > threading.TIMEOUT_MAX else max(timeout_s, 0)


def _creation(path: str) -> Callable[[Any], Any]:
    return lambda client: client.create_async(path, b"", makepath=True)
