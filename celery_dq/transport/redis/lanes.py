"""Queues that one leader consumes: fetched only in its term, and worked on one message after the other.

::

    closed ──term begins──▶ open ──term ends──▶ closing ──nothing held, all told──▶ closed

A *lane* stands between the claims of such a queue and the inbox. Claims bring batches, as for every
queue; the lane lets one message at a time go on, when the one before is over, and only while the term is
*firm* (:class:`celery_dq.hooks.Terms`). Where the worker itself lets a message begin only when the one before
is over, for good, it is given as many as are done in a moment; those that may not begin come back. What waits
in the lane is held, and is given back

* when the term ends;
* when the message before it comes back, by a requeue, a crash or a retry: it goes first.

A retry is claimed at once, in the place of the message that it repeats, and blocks the lane until it is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import redis

from celery_dq.hooks import Permit, Terms
from celery_dq.transport.redis.ledger import Held
from celery_dq.transport.redis.process import Process
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.source import Source

if TYPE_CHECKING:
    from celery_dq.transport.redis.fetcher import Fetcher
    from celery_dq.transport.redis.message import Message
    from celery_dq.transport.redis.teller import Teller

#: Messages that a lane holds at most while one of them is worked on.
MOST_WAITING = 64


class Lane:
    """One led queue on one channel.

    Attributes:
        base: the queue as it is outside of a term.
        queue: the queue of the present or ending term; None when closed.
        waiting: claimed, not yet delivered.
        under_way: delivered and not over, in order; more than one only where the pool runs them in turn.
    """

    def __init__(self, base: Queue) -> None:
        self.base = base
        self.queue: Queue | None = None
        self.key = ""
        self.permit: Permit | None = None
        self.source: Source | None = None
        self.waiting: deque[Message] = deque()
        self.under_way: deque[Held] = deque()
        #: Something has come back: so will what is under way behind it, and nothing is delivered before that.
        self.broken = False
        self.since = 0.0
        self.service_s: float | None = None
        #: How many may be under way; one after something came back, for it takes all that is behind along.
        self.window = 1
        #: One that is acknowledged late is over, and the broker has not said that it knows.
        self.untold = False
        #: Something has come that may be delivered beside what is under way.
        self.fresh = False
        #: Claims are on their way that left before a message came back: what they bring is out of order.
        self.spills = False

    def is_firm(self) -> bool:
        """Whether it is in the midst of its term."""
        return self.queue is not None and self.permit is not None and self.permit.firm

    def moves(self) -> bool:
        """Whether something has come or is over since it was looked at last, or nothing is under way."""
        return self.fresh or not self.under_way or self.under_way[0].gone


class Lanes:
    """The led queues that one channel consumes. Used by the thread that fetches.

    Arguments:
        process: consumer identity and ledger.
        terms: says which queues are led, and when.
        fetcher: returns the fetcher of the channel.
        clients: what makes clients for the keeper.
        deliver: takes a message whose turn it is.
        give_back: takes a message that is not worked on after all.
        claim_ahead_s: how much service time may be claimed ahead, in seconds.
        in_turn: returns how many messages of a lane the worker takes at most, to run one after the other.
    """

    def __init__(
        self,
        process: Process,
        terms: Terms,
        fetcher: Callable[[], Fetcher],
        clients: Callable[[], Callable[[], redis.Redis]],
        deliver: Callable[[Message], None],
        give_back: Callable[[Message], None],
        claim_ahead_s: float,
        in_turn: Callable[[], int],
    ) -> None:
        self._process = process
        self._terms = terms
        self._fetcher = fetcher
        self._clients = clients
        self._deliver = deliver
        self._give_back = give_back
        self._claim_ahead_s = claim_ahead_s
        self._in_turn = in_turn
        self._lanes: dict[str, Lane] = {}
        #: Delivery tags of what is over; what waits for one of them may begin.
        self.over: list[str] = []
        #: A queue is closed, so that nobody looks what is over.
        self.is_blind = False
        # What runs is asked after when the channel is long gone.
        self._bases: dict[str, Queue] = {}

    def add(self, queue: Queue) -> None:
        """Consume *queue* whenever this process leads it."""
        self._lanes[queue.name] = Lane(queue)
        self._bases[queue.name] = queue
        self._terms.attach(queue.name, self)
        self.follow()

    def remove(self, name: str) -> None:
        """Consume it no more."""
        lane = self._lanes.get(name)
        if lane is not None:
            self._close(lane)
            del self._lanes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._lanes

    def close(self) -> None:
        """Give back what waits."""
        for name in list(self._lanes):
            self.remove(name)

    def busy(self, name: str, token: int) -> bool:
        """Whether something of that term is held, or not told yet. From any thread."""
        process, key = self._process, replace(self._bases[name], token=token).key
        ledger = process.ledger
        if ledger.outbox(key) and (name not in self._lanes or not ledger.has_listener):
            # No loop turns any more, or no connection is left, and the next heartbeat is seconds away.
            process.keeper.ring()
        # What a claim without an answer has taken, the fence of the next term takes back.
        return bool(ledger.outbox(key) or ledger.holds_of(key) or process.doubts.speaks(key))

    def cut_off(self, name: str, token: int) -> bool:
        """Whether the broker has been silent for a whole lease. From any thread."""
        process, key = self._process, replace(self._bases[name], token=token).key
        return process.ledger.silence(key, process.clock.monotonic()) > process.lease_s

    # -- the loop calls these --------------------------------------------------

    def follow(self) -> None:
        """Open and close the lanes with their terms, and let the next messages go. Called often."""
        doubts = self._process.doubts
        for name, lane in self._lanes.items():
            queue = lane.queue
            if queue is not None and lane.is_firm() and not doubts.exists(lane.key):
                # Most of the time; so nobody else is asked which term it is.
                if lane.moves():
                    self._advance(lane, queue)
                continue
            token = self._terms.term(name)
            if lane.queue is not None and lane.queue.token != token:
                self._close(lane)
            queue = lane.queue
            if queue is None and token:
                queue = replace(lane.base, token=token)
            if queue is not None and doubts.exists(queue.key):
                # A claim got no answer. What it has taken goes before all that is claimed now, and only
                # the fence of a new term brings it back at once.
                self._terms.doubt(name, queue.token)
                self._close(lane)
            elif queue is not None:
                if lane.queue is None:
                    self._open(lane, queue)
                self._advance(lane, queue)
            if lane.queue is None:
                self.is_blind = True

    def put(self, message: Message) -> None:
        """Take a claimed message in."""
        lane = self._lanes.get(message.queue)
        if lane is None or lane.queue is None or lane.permit is None or lane.spills:
            self._give_back(message)
        else:
            message.lead(lane.queue.token, lane.permit)
            lane.waiting.append(message)
            lane.fresh = True

    # -- inside ----------------------------------------------------------------

    def _open(self, lane: Lane, queue: Queue) -> None:
        lane.queue, lane.key = queue, queue.key
        lane.permit = self._terms.permit(queue.name, queue.token)
        ledger = self._process.ledger
        # What was begun before a lost connection goes on. A claim has one number, and its messages an order.
        lane.under_way = deque(sorted(ledger.held_of(queue.key), key=lambda held: int(held.claim)))
        # What has ended meanwhile may not be told yet.
        lane.broken, lane.window, lane.untold = False, 1, True
        lane.since = self._process.clock.monotonic()
        self._process.keeper.use(queue, self._clients)
        lane.source = self._fetcher().consume(queue, lambda: self._limit(lane), lambda: self._claimed(lane))

    def _close(self, lane: Lane) -> None:
        queue, lane.queue = lane.queue, None
        if queue is not None:
            self._spill(lane)
            lane.spills = False
            self._fetcher().cancel(queue.name)
            self._process.keeper.leave(queue)

    def _limit(self, lane: Lane) -> int:
        """How many messages to claim: what fits the claim-ahead time, and at least the next one."""
        if lane.queue is None or lane.spills or lane.permit is None or not lane.permit.firm:
            return 0
        if self._process.ledger.returning(lane.queue.key):
            return 0  # it goes before whatever a claim would bring now
        most = self._pace(lane)
        # Half of it at a time, so that a call is worth it.
        return most - len(lane.waiting) if len(lane.waiting) * 2 <= most else 0

    def _pace(self, lane: Lane) -> int:
        """How many messages fit the claim-ahead time, at the pace seen so far."""
        ahead = 0 if not lane.service_s else int(self._claim_ahead_s / max(lane.service_s, 1e-6))
        return min(max(ahead, 1), MOST_WAITING)

    def _claimed(self, lane: Lane) -> None:
        """A claim was answered, and its messages were put."""
        if lane.spills:
            lane.spills, lane.fresh = False, True
            self._fetcher().teller.send_untold(self._process.clock.monotonic())

    def _advance(self, lane: Lane, queue: Queue) -> None:
        lane.fresh = False
        self._sweep(lane)
        under_way = lane.under_way
        if lane.broken:
            if under_way:
                return
            # What came back goes before all that was claimed after it.
            lane.broken = False
            self._spill(lane)
            lane.spills = self._fetcher().teller.claims(queue)
            # On the wire before the next claim.
            self._fetcher().teller.send_untold(self._process.clock.monotonic())
        if lane.spills or not lane.waiting or lane.permit is None or not lane.permit.firm:
            return
        if lane.untold:
            # Answered before the next one starts: else both would run again, the first after the second, when
            # the worker is killed in between, or what was sent does not arrive.
            teller = self._fetcher().teller
            teller.send_untold(self._process.clock.monotonic(), urgent=queue.key)
            lane.untold = self._is_untold(queue, teller)
            if lane.untold:
                return
        most = min(self._in_turn(), lane.window, self._pace(lane))
        waiting, ledger = lane.waiting, self._process.ledger
        while waiting and len(under_way) < most:
            if waiting[0].record.due_us and self._waits(lane, waiting[0]):
                return
            message = waiting.popleft()
            held = ledger.get(message.delivery_tag)
            if held is None:
                continue
            if under_way:
                held.after = under_way[-1]
            else:
                lane.since = self._process.clock.monotonic()
            under_way.append(held)
            self._deliver(message)

    def _sweep(self, lane: Lane) -> None:
        """See which of those under way are over."""
        over = 0
        while lane.under_way and lane.under_way[0].gone:
            held = lane.under_way.popleft()
            self.over.append(held.tag)
            lane.broken = held.comes_back or lane.broken
            lane.untold = held.late or lane.untold
            over += 1
        if over:
            now = self._process.clock.monotonic()
            seen, lane.since = (now - lane.since) / over, now
            # As if each had been seen for itself: one long message must not count for many batches.
            past = 0.0 if lane.service_s is None else 0.8**over
            lane.service_s = past * (lane.service_s or 0.0) + (1 - past) * seen
            lane.window = 1 if lane.broken or lane.untold else min(lane.window + over, MOST_WAITING)

    def _is_untold(self, queue: Queue, teller: Teller) -> bool:
        """Whether the broker may not know yet of a message that is over."""
        process = self._process
        box = process.ledger.outbox(queue.key)
        if box.finishes or box.burials or teller.ends(queue):
            return True
        # The keeper may be telling it, and puts back what gets no answer.
        awaited = process.doubts.awaits_report(queue.key, process.ledger.heard)
        return awaited or bool(box.finishes or box.burials)

    def _waits(self, lane: Lane, message: Message) -> bool:
        """Whether the next message is a retry that is not due yet: it keeps its place, all others wait."""
        left_s = message.record.due_us / 1e6 - self._process.clock.wall()
        if left_s > 0 and lane.source is not None:
            lane.source.look_at = self._process.clock.monotonic() + left_s
        return left_s > 0

    def _spill(self, lane: Lane) -> None:
        while lane.waiting:
            self._give_back(lane.waiting.popleft())
