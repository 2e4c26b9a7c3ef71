"""Takes items from the queues and sends acknowledgements, in its own thread (or greenlet).

The fetcher's thread waits for ZooKeeper, so that a worker's event loop never does. One round sends the queued
acknowledgements and takes as many items as the prefetch counts allow; both requests are sent before either is
answered.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import NodeExistsError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import AccessDenied, ZooKeeperUnreachable
from celery_dq.shown import shown_logger
from celery_dq.transport.zookeeper.in_flight import RETURNING, ClaimedItem, ItemOutcome, ZooKeeperInFlight
from celery_dq.transport.zookeeper.record import BATCH_BYTES
from celery_dq.transport.zookeeper.subscription import ZooKeeperSubscription
from celery_dq.wake_flag import WakeFlag
from celery_dq.zookeeper.item_locks import ItemLocks, PendingTransaction
from celery_dq.zookeeper.session import PinnedSession, SessionState
from celery_dq.zookeeper.transaction import Step, create, delete, set_data

logger = shown_logger(__name__)

#: Seconds between two full looks at all subscriptions, in case a watch was lost.
LOOK_AROUND_S = 10.0
#: Seconds between two sweeps of abandoned transient queues.
SWEEP_S = 60.0
#: Maximum number of acknowledgements in one request.
MAX_OUTCOMES_PER_CALL = 100
#: Maximum seconds that closing waits for the confirmation of all acknowledgements.
FLUSH_S = 5.0


class TakeOne(NamedTuple):
    """A waiting call that takes one message from a queue without a consumer."""

    subscription: ZooKeeperSubscription
    done: WakeFlag


class ZooKeeperFetcher:
    """Takes items and sends acknowledgements for one connection.

    Args:
        session: The consuming session.
        locks: Its locks.
        in_flight: The in-flight messages and their queued acknowledgements.
        clock: Monotonic time for the pace of looks and sweeps.
        room: Returns how many messages a subscription may take now.
        deliver: Called with a subscription whose inbox has a message; without one when the connection has
            failed.
        sweep: Deletes abandoned transient queues; called every `SWEEP_S` seconds.
    """

    def __init__(
        self,
        session: PinnedSession,
        locks: ItemLocks,
        in_flight: ZooKeeperInFlight,
        clock: Clock,
        room: Callable[[ZooKeeperSubscription], int],
        deliver: Callable[..., None],
        sweep: Callable[[], None],
    ) -> None:
        self._session = session
        self._locks = locks
        self._in_flight = in_flight
        self._clock = clock
        self._room = room
        self._deliver = deliver
        self._sweep = sweep
        self._swept_at = clock.monotonic()
        self._subscriptions: list[ZooKeeperSubscription] = []
        self._requests_for_one: deque[TakeOne] = deque()
        #: The subscriptions of all calls for one message.
        self._visited: set[ZooKeeperSubscription] = set()
        self._waker = WakeFlag()
        #: One flag for each waiting :meth:`flush`.
        self._flushes: deque[WakeFlag] = deque()
        self._stopping = False
        #: The subscription that has got messages last. The one behind it has the next turn.
        self._served: ZooKeeperSubscription | None = None
        self._suspended_at: float | None = None
        self._looked_at = clock.monotonic()
        #: The error that ended the connection.
        self.failure: Exception | None = None
        self._thread: Any = None

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        if self._thread is None:
            self._session.add_listener(self._state_changed)
            self._thread = self._session.client.handler.spawn(self._run)

    # -- from other threads --------------------------------------------------------

    def wake(self) -> None:
        """Wake the fetcher's thread; callable from signal handlers."""
        self._waker.set()

    def add(self, subscription: ZooKeeperSubscription) -> None:
        """Start to consume a subscription."""
        self._subscriptions = [*self._subscriptions, subscription]
        self.wake()

    def remove(self, subscription: ZooKeeperSubscription) -> None:
        """Stop to consume a subscription."""
        self._subscriptions = [each for each in self._subscriptions if each is not subscription]

    def take_now(self, subscription: ZooKeeperSubscription) -> list[ClaimedItem]:
        """Take one item from a subscription that is not consumed; waits for the fetcher's thread.

        Raises:
            ZooKeeperUnreachable: The connection has failed, or ZooKeeper did not answer in time.
        """
        errand = TakeOne(subscription, WakeFlag())
        self._visited.add(subscription)
        self._requests_for_one.append(errand)
        self.wake()
        is_done = errand.done.wait(2 * self._locks.timeout_s)
        errand.done.close()
        if self.failure is not None or not is_done:
            raise ZooKeeperUnreachable("No message could be taken: ZooKeeper did not answer")
        taken = list(subscription.inbox)
        subscription.inbox.clear()
        return taken

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until all acknowledgements are confirmed, or the broker is unreachable."""
        if self._thread is None or self.failure is not None or not self._session.is_connected:
            return
        if self._in_flight.has_outcomes or not self._idle:
            flushed = WakeFlag()
            self._flushes.append(flushed)
            self.wake()
            flushed.wait(timeout_s)
            flushed.close()

    def stop(self) -> None:
        """Send the queued acknowledgements and end the thread."""
        if self._thread is None:
            return
        self.flush()
        self._stopping = True
        self._session.remove_listener(self._state_changed)
        self.wake()

    def _state_changed(self, state: SessionState) -> None:
        self.wake()

    # -- the thread ------------------------------------------------------------------

    _idle = True

    def _run(self) -> None:
        while not self._stopping and self.failure is None:
            self._waker.clear()
            # Counted before the round, which may not send the acks of a flush that begins later.
            flushes, self._idle = len(self._flushes), False
            try:
                more = self._is_connected() and self._run_once()
            except ZooKeeperUnreachable as error:
                logger.info(
                    "A round of fetching from ZooKeeper was interrupted and is tried again: %s.",
                    error,
                    extra={"event": "zookeeper_fetch_interrupted"},
                )
                more = False
            except Exception as error:
                # The worker must be notified of any error, or it would wait for messages forever.
                logger.exception(
                    "The fetcher of ZooKeeper at %s failed; the connection ends, and its messages are served "
                    "again.",
                    self._session.hosts,
                    extra={"event": "zookeeper_fetcher_failed"},
                )
                self._fail(error)
                break
            self._idle = True
            if not self._in_flight.has_outcomes:
                self._end_flushes(flushes)
            if not more and not self._stopping:
                self._waker.wait(self._answer_timeout_s())
        self._end_flushes(len(self._flushes))
        self._waker.close()

    def _end_flushes(self, count: int) -> None:
        for _ in range(count):
            self._flushes.popleft().set()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._in_flight.forget_all()
        self._deliver()

    def _is_connected(self) -> bool:
        if self._session.is_over or self._locks.is_lost:
            self._fail(
                ZooKeeperUnreachable(
                    f"The session with ZooKeeper at {self._session.hosts} has expired: its in-flight "
                    "messages are served again"
                )
            )
            return False
        if self._session.is_connected:
            self._suspended_at = None
            return True
        now = self._clock.monotonic()
        if self._suspended_at is None:
            self._suspended_at = now
        elif now - self._suspended_at > self._session.timeout_s:
            # No server can report it, but the session has expired, and other consumers have the messages.
            self._fail(
                ZooKeeperUnreachable(
                    f"ZooKeeper at {self._session.hosts} has been unreachable for a session timeout "
                    f"({self._session.timeout_s:g} s): its in-flight messages are served again"
                )
            )
        return False

    def _answer_timeout_s(self) -> float:
        if self._suspended_at is not None:
            return 0.1
        looks = [each.next_look_s() for each in self._subscriptions]
        return min([LOOK_AROUND_S, *(look_s for look_s in looks if look_s is not None)])

    def _run_once(self) -> bool:
        now = self._clock.monotonic()
        if now - self._looked_at > LOOK_AROUND_S:
            self._looked_at = now
            for subscription in self._subscriptions:
                subscription.look_around()
        if now - self._swept_at > SWEEP_S:
            self._swept_at = now
            self._sweep()
        subscriptions = self._subscriptions
        # Counted before the outcomes are taken: a message that is requeued from now on makes no room for a
        # later one before it is available itself.
        rooms = [self._room(subscription) for subscription in subscriptions]
        returns = self._in_flight.has_returning
        outcomes, begun = self._begin_outcomes()
        if returns:
            # A requeued message keeps its place: no later one is taken before its lock is gone.
            self._end_outcomes(outcomes, begun)
            return True
        more = False
        try:
            while self._requests_for_one and not self._in_flight.has_returning:
                errand = self._requests_for_one[0]
                errand.subscription.take_turn(self._locks, 1)
                self._requests_for_one.popleft()
                errand.done.set()
            first = subscriptions.index(self._served) + 1 if self._served in subscriptions else 0
            turns = list(zip(subscriptions, rooms, strict=True))
            for subscription, room in [*turns[first:], *turns[:first]]:
                undelivered = len(subscription.inbox)
                more |= subscription.take_turn(self._locks, min(room, self._room(subscription)))
                if len(subscription.inbox) > undelivered:
                    self._served = subscription
                if subscription.inbox:
                    self._deliver(subscription)
        finally:
            self._end_outcomes(outcomes, begun)
        return more or self._in_flight.has_outcomes

    # -- acknowledgements --------------------------------------------------------------

    def _begin_outcomes(self) -> tuple[Sequence[tuple[ItemOutcome, ClaimedItem]], PendingTransaction | None]:
        outcomes = self._in_flight.take_outcomes(MAX_OUTCOMES_PER_CALL, BATCH_BYTES)
        if not outcomes or outcomes[0][1].doubtful:
            return outcomes, None
        return outcomes, self._locks.begin(
            [step for verb, held in outcomes for step in _outcome_steps(verb, held)]
        )

    def _end_outcomes(
        self, outcomes: Sequence[tuple[ItemOutcome, ClaimedItem]], begun: PendingTransaction | None
    ) -> None:
        if not outcomes:
            return
        rest = list(outcomes)
        try:
            with contextlib.suppress(AccessDenied):  # each is sent alone below
                if begun is not None and self._locks.refused(begun) is None:
                    self._confirm_outcomes(rest)
                    return
            while rest:
                self._send_outcome(*rest[0])
                self._confirm_outcomes([rest.pop(0)])
        except ZooKeeperUnreachable:
            self._in_flight.restore(rest)
            raise

    def _confirm_outcomes(self, outcomes: Sequence[tuple[ItemOutcome, ClaimedItem]]) -> None:
        had_suspect = self._in_flight.has_suspect
        for _, held in outcomes:
            self._in_flight.confirm(held)
        # Messages that were passed over because of a suspect may be taken now.
        is_clear = had_suspect and not self._in_flight.has_suspect
        returned = {held.nodes for verb, held in outcomes if verb in RETURNING}
        for subscription in (*self._subscriptions, *self._visited):
            if is_clear or subscription.nodes in returned:
                # No watch fires for the locks of this connection.
                subscription.look_again()

    def _send_outcome(self, verb: ItemOutcome, held: ClaimedItem) -> None:
        """Send the end of one message that is in doubt, or whose request with others was refused."""
        locks = self._locks
        if not locks.mine([held]):
            # An earlier request was carried out; a lock that exists now belongs to another consumer.
            return
        try:
            refusal = locks.refused(locks.begin(_outcome_steps(verb, held)))
        except AccessDenied as denial:
            if verb is not ItemOutcome.REQUEUE or denial.path != held.item:
                raise
            # The ACL allows taking and not writing: the item is unlocked, and the return is not counted.
            self._send_outcome(ItemOutcome.CRASHED, held)
            return
        if refusal is None:
            return
        if verb is ItemOutcome.GIVE_UP and isinstance(refusal.error, NodeExistsError):
            # A dead letter of that id exists: add the item's name, which is never used twice.
            message_id, letter = held.letter
            held.letter = f"{message_id}~{held.name[-10:]}", letter
            self._send_outcome(verb, held)
            return
        if verb is ItemOutcome.DEAD_LETTER and isinstance(refusal.error, NodeExistsError):
            # The item was moved by an earlier request.
            self._send_outcome(ItemOutcome.ACK, held)
            return
        if not isinstance(refusal.error, NoNodeError):
            raise refusal.error
        if refusal.step.kind == "create":
            locks.ensure(refusal.step.path.rpartition("/")[0])
            self._send_outcome(verb, held)
            return
        if held.marked and refusal.step.path == held.nodes.suspect(held.name):
            # Another client has deleted the record of the last consumer.
            held.marked = False
            self._send_outcome(verb, held)
            return
        # A peer that uses no locks has taken the item, so it counts as done. The lock must not stay.
        locks.drop([held])
        if held.marked:
            locks.refused(locks.begin([delete(held.nodes.suspect(held.name))]))


def _outcome_steps(verb: ItemOutcome, held: ClaimedItem) -> list[Step]:
    unlock = delete(held.lock)
    if verb is ItemOutcome.REQUEUE:
        # Write the same data: the node's version counts the returns in good order.
        return [set_data(held.item, held.data), unlock]
    if verb is ItemOutcome.CRASHED:
        return [unlock]
    away = [delete(held.item), unlock]
    if held.marked:
        away.append(delete(held.nodes.suspect(held.name)))
    if verb is ItemOutcome.GIVE_UP:
        message_id, letter = held.letter
        return [create(held.nodes.dead_letter(message_id), letter), *away]
    if verb is ItemOutcome.DEAD_LETTER:
        return [create(f"{held.nodes.unreadable}/{held.name}", held.data), *away]
    return away
