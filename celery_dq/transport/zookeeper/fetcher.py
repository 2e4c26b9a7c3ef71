"""Takes items from the queues and sends acknowledgements, in the thread of a fetcher.

One round sends the queued acknowledgements and takes as many items as the prefetch counts allow; both
requests are sent before either is answered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

from kazoo.exceptions import NodeExistsError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import AccessDenied, ZooKeeperUnreachable
from celery_dq.shown import shown_logger
from celery_dq.transport.fetcher import Fetcher
from celery_dq.transport.zookeeper.in_flight import RETURNING, ClaimedItem, ItemOutcome, ZooKeeperInFlight
from celery_dq.transport.zookeeper.record import BATCH_BYTES
from celery_dq.transport.zookeeper.subscription import ZooKeeperSubscription
from celery_dq.zookeeper.item_locks import ItemLocks, PendingTransaction
from celery_dq.zookeeper.session import PinnedSession
from celery_dq.zookeeper.transaction import Step, create, delete, set_data, size_of

logger = shown_logger(__name__)

#: Seconds between two full looks at all subscriptions, in case a watch was lost.
LOOK_AROUND_S = 10.0
#: Seconds between two sweeps of abandoned transient queues.
SWEEP_S = 60.0
#: Maximum number of acknowledgements in one request.
MAX_OUTCOMES_PER_CALL = 100


class ZooKeeperFetcher(Fetcher[ZooKeeperSubscription]):
    """Takes items and sends acknowledgements for one connection.

    Args:
        session: The consuming session.
        locks: Its locks.
        in_flight: The in-flight messages and their queued acknowledgements.
        clock: Monotonic time for the pace of looks and sweeps.
        deliver: Called with a subscription whose inbox has a message; without one when the connection has
            failed.
        sweep: Deletes abandoned transient queues; called every `SWEEP_S` seconds.
    """

    name = "dq-zookeeper-fetcher"

    def __init__(
        self,
        session: PinnedSession,
        locks: ItemLocks,
        in_flight: ZooKeeperInFlight,
        clock: Clock,
        deliver: Callable[..., None],
        sweep: Callable[[], None],
    ) -> None:
        super().__init__(deliver)
        self._session = session
        self._locks = locks
        self._in_flight = in_flight
        self._clock = clock
        self._sweep = sweep
        self._swept_at = self._looked_at = clock.monotonic()
        #: The subscriptions of all calls for one message, by queue.
        self.visited: dict[str, ZooKeeperSubscription] = {}
        self._suspended_at: float | None = None

    # -- from other threads --------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._session.add_listener(self.wake)
        super().start()

    def take_one(self, subscription: ZooKeeperSubscription) -> list[ClaimedItem]:
        """Take one item from a subscription that is not consumed, in the thread of the caller."""
        subscription.take_turn(self._locks, 1)
        taken = list(subscription.inbox)
        subscription.inbox.clear()
        return taken

    def stop(self) -> None:
        """Send the queued acknowledgements and end the thread."""
        self.flush()
        self._session.remove_listener(self.wake)
        super().stop()

    # -- the thread ------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether ZooKeeper answers, as far as the client knows."""
        return self._session.is_connected

    @property
    def has_acks(self) -> bool:
        """Whether an acknowledgement is queued."""
        return self._in_flight.has_outcomes

    def has_unconfirmed_acks(self, queue: str) -> bool:
        """Whether a message of a queue has ended, and ZooKeeper has not confirmed it."""
        visited = self.visited.get(queue)
        subscriptions = [*self.subscriptions, *([visited] if visited is not None else [])]
        return any(
            self._in_flight.has_unconfirmed(each.nodes) for each in subscriptions if each.queue == queue
        )

    def run_round(self) -> float:
        """Send acknowledgements and take items; return the seconds until the next round is due."""
        try:
            if self._may_ask() and self._ask():
                return 0.0
        except ZooKeeperUnreachable as error:
            logger.info(
                "A round of fetching from ZooKeeper was interrupted and is tried again: %s.",
                error,
                extra={"event": "zookeeper_fetch_interrupted"},
            )
        if self._suspended_at is not None:
            return 0.1
        return min([LOOK_AROUND_S, *(each.next_look_s() for each in self.subscriptions)])

    def log_failure(self) -> None:
        """Log the present exception."""
        logger.exception(
            "The fetcher of ZooKeeper at %s failed; the connection ends, and its messages are served again.",
            self._session.hosts,
            extra={"event": "zookeeper_fetcher_failed"},
        )

    def _may_ask(self) -> bool:
        """Whether the session is connected; ends the connection when the session has expired."""
        now, why = self._clock.monotonic(), ""
        if self._session.is_over or self._locks.is_lost:
            why = f"The session with ZooKeeper at {self._session.hosts} has expired"
        elif self._session.is_connected:
            self._suspended_at = None
            return True
        elif self._suspended_at is None:
            self._suspended_at = now
        elif now - self._suspended_at > self._session.timeout_s:
            # No server can report it, but the session has expired, and other consumers have the messages.
            why = (
                f"ZooKeeper at {self._session.hosts} has been unreachable for a session timeout "
                f"({self._session.timeout_s:g} s)"
            )
        if why:
            self.fail(ZooKeeperUnreachable(f"{why}: its in-flight messages are served again"))
        return False

    def _ask(self) -> bool:
        """Send acknowledgements and take items; return whether more of either may be left."""
        now = self._clock.monotonic()
        if now - self._looked_at > LOOK_AROUND_S:
            self._looked_at = now
            for subscription in (*self.subscriptions, *self.visited.values()):
                subscription.look_around()
        if now - self._swept_at > SWEEP_S:
            self._swept_at = now
            self._sweep()
        rooms = self.rooms()
        returns = self._in_flight.has_returning
        outcomes, begun = self._begin_outcomes()
        if returns:
            # A requeued message keeps its place: no later one is taken before its lock is gone.
            self._end_outcomes(outcomes, begun)
            return True
        try:
            more = not self.claim_all(rooms)
        finally:
            self._end_outcomes(outcomes, begun)
        return more or self._in_flight.has_outcomes

    def claim(self, subscription: ZooKeeperSubscription, room: int) -> float:
        """Take items from a subscription; return 0 if more may be available now."""
        return 0.0 if subscription.take_turn(self._locks, room) else math.inf

    # -- acknowledgements --------------------------------------------------------------

    def _begin_outcomes(self) -> tuple[Sequence[tuple[ItemOutcome, ClaimedItem]], PendingTransaction | None]:
        outcomes = self._in_flight.take_outcomes(
            MAX_OUTCOMES_PER_CALL, BATCH_BYTES, lambda verb, held: size_of(_outcome_steps(verb, held))
        )
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
        for subscription in (*self.subscriptions, *self.visited.values()):
            if subscription.nodes in returned:
                subscription.item_returned()
            elif is_clear:
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
