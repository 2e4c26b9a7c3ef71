"""The consuming half of a channel: who consumes what, how much fits, and delivery.

Claimed messages lie in the *inbox* until they are delivered: at once with an event
loop, one per ``drain_events`` without. What lies there is held under the lease of
the process and counted against the prefetch count. A consumer that stops asking
loses its inbox to others after half a lease.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from celery_dq.errors import CorruptRecord
from celery_dq.hooks import Terms, WorkerGate
from celery_dq.transport.redis.fetcher import Fetcher
from celery_dq.transport.redis.inbox import Inbox
from celery_dq.transport.redis.lanes import Lanes
from celery_dq.transport.redis.message import Message
from celery_dq.transport.redis.process import Process
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.record import Record
from celery_dq.transport.redis.replies import ClaimedEntry
from celery_dq.transport.redis.source import Source
from celery_dq.transport.redis.watchdog import Watchdog

if TYPE_CHECKING:
    from celery_dq.transport.redis.channel import Channel

logger = logging.getLogger(__name__)

#: Messages that a consumer without a prefetch count gets ahead at most.
MOST_AHEAD = 64
#: Seconds that a message takes, from which on a claim between two of them costs next to nothing.
LONG_SERVICE_S = 0.0005
#: Messages that one claim takes at most, so that a script stays short.
LARGEST_BATCH = 200


class Intake:
    """What one channel consumes.

    Arguments:
        channel: whose prefetch count, gate and client are used.
        process: consumer identity and ledger.
        claim_ahead_s: how much service time may be claimed ahead, in seconds.
        watchdog_s: idle time beside a backlog after which the connection is suspected; 0 = never.
    """

    def __init__(self, channel: Channel, process: Process, claim_ahead_s: float, watchdog_s: float) -> None:
        self._channel = channel
        self._process = process
        self._claim_ahead_s = claim_ahead_s
        self.watchdog = Watchdog(process, watchdog_s)
        self._fetcher: Fetcher | None = None
        self._inbox = Inbox()
        self._consumers: dict[str, deque[tuple[str, Callable[[Any], Any], bool]]] = {}
        self._delivered_at = process.clock.monotonic()
        self._timing = False
        self._service_s: float | None = None
        self._gate: WorkerGate | None = None
        self._watching = False
        #: The queues that one leader consumes; None while there are none.
        self.lanes: Lanes | None = None

    # -- consumers -------------------------------------------------------------

    def start(self, queue: Queue, tag: str, callback: Callable[[Any], Any], no_ack: bool) -> None:
        """Consume *queue*; several consumers of one queue take turns."""
        # It is there before anything is consumed, and looking it up costs a system call.
        self._gate = self._channel.gate
        first = queue.name not in self._consumers
        self._consumers.setdefault(queue.name, deque()).append((tag, callback, no_ack))
        terms = self._channel.session.terms
        if first and terms is not None and terms.governs(queue.name):
            self._lanes_of(terms).add(queue)
        elif first:
            self._process.keeper.use(queue, self._channel.keeper_clients)
            self.fetcher.consume(queue)
        if not self._watching:
            self._watching = True
            self._process.keeper.watch(self._check)

    def stop(self, queue_name: str, tag: str) -> None:
        """End one consumer; the last one of a queue gives back what was not delivered."""
        consumers = self._consumers.get(queue_name)
        if consumers is None:
            return
        kept = deque(consumer for consumer in consumers if consumer[0] != tag)
        if kept:
            self._consumers[queue_name] = kept
            return
        del self._consumers[queue_name]
        if self.lanes is not None and queue_name in self.lanes:
            self.lanes.remove(queue_name)
            source = None
        else:
            source = self.fetcher.cancel(queue_name)
        self._channel.hear_out()
        self._give_back(queue_name)
        self._channel.speak_out()
        if source is not None:
            self._process.keeper.leave(source.queue)
        if not self._consumers:
            self._watching = False
            self._process.keeper.unwatch(self._check)

    def _lanes_of(self, terms: Terms) -> Lanes:
        if self.lanes is None:
            self.lanes = Lanes(
                self._process,
                terms,
                fetcher=lambda: self.fetcher,
                clients=self._channel.keeper_clients,
                deliver=self._put,
                give_back=self._release,
                claim_ahead_s=self._claim_ahead_s,
                in_turn=self._in_turn,
            )
            self._process.on_fenced = lambda queue: terms.refused(queue.name, queue.token)
            terms.listen(self._channel.poller.wake)
        return self.lanes

    @property
    def fetcher(self) -> Fetcher:
        """Made when something is first consumed."""
        if self._fetcher is None:
            self._fetcher = Fetcher(
                self._process,
                self._channel.async_pool,
                room=self.room,
                keeps_appointments=self._keeps_appointments,
                deliver=self._claimed,
            )
        return self._fetcher

    @property
    def live_fetcher(self) -> Fetcher | None:
        """The fetcher, if anything was ever consumed."""
        return self._fetcher

    # -- how much fits ---------------------------------------------------------

    def room(self) -> tuple[int, int]:
        """Return how many messages to claim, and how many of them fit free pool slots.

        Raises:
            redis.ConnectionError: the watchdog has found that the connection is deaf.
        """
        self.watchdog.decide(may_stop=self._gate is not None)
        return self._room()

    def _room(self) -> tuple[int, int]:
        qos = self._channel.qos
        # Called every time: worker_disable_prefetch replaces the method on the instance.
        if self._channel.closed or not qos.can_consume():
            return 0, 0
        allowed = qos.can_consume_max_estimate()
        gate = self._gate
        if gate is None:
            want = self._pace() if allowed is None else allowed
            return min(want, LARGEST_BATCH), min(want, LARGEST_BATCH)
        slots = gate.room()
        free = LARGEST_BATCH if slots is None else max(slots, 0)
        # Half the prefetch count at a time: while that half is worked on, the broker prepares
        # the other, and a call is worth it. Unless somebody idles.
        half = (qos.prefetch_count + 1) // 2
        if allowed is not None and free <= 0 and allowed < half:
            return 0, 0
        want = min(free + gate.ahead(), LARGEST_BATCH)
        if allowed is not None:
            want = min(want, allowed, max(half, free))
        return want, min(free, want)

    def _pace(self) -> int:
        """Without a prefetch count: what fits the claim-ahead time, at the pace seen so far."""
        ahead = 1 if self._service_s is None else int(self._claim_ahead_s / max(self._service_s, 1e-6))
        return max(min(max(ahead, 1), MOST_AHEAD) - len(self._inbox), 0)

    def _in_turn(self) -> int:
        """How many messages of a led queue may be delivered at a time."""
        most = 1 if self._gate is None else self._gate.in_turn
        limit = self._channel.qos.prefetch_count
        return min(most, limit) if limit else most

    def _keeps_appointments(self) -> bool | None:
        if self._blocks:
            # Between two messages only: what is asked for now is answered while we work.
            return None if self._inbox else False
        return True

    @property
    def _blocks(self) -> bool:
        # Plain kombu runs its callbacks in the loop, as the solo pool does.
        return self._gate is None or self._gate.blocking

    # -- one at a time -------------------------------------------------------

    def claim_one(self, target: Queue) -> list[tuple[ClaimedEntry, str]]:
        """Claim a message now and return it with its tag, if there is one; the caller has it then.

        Raises:
            redis.RedisError: no answer; what was claimed nevertheless comes back.
        """
        process, key = self._process, target.key
        sent_at = process.clock.monotonic()
        process.doubts.claims(key)
        try:
            claimed = target.partition.claim(
                target.consumer(process.consumer),
                lease_ms=process.lease_ms,
                want=1,
                hold=None,
                max_deliveries=target.max_deliveries,
            ).run(self._channel.client)
        except BaseException:
            process.doubts.unanswered(key)
            raise
        if not claimed.alive:
            process.lease_was_lost(key)
        process.ledger.renewed(key, sent_at)
        taken = []
        for entry in claimed.entries:
            held = process.ledger.hold(key, entry.id, entry.claim)
            held.begun = True
            taken.append((entry, held.tag))
        process.doubts.answered(key, (entry.claim for entry in claimed.entries))
        return taken

    # -- from claim to callback ------------------------------------------------

    def _claimed(self, source: Source, entry: ClaimedEntry, tag: str) -> None:
        channel = self._channel
        try:
            message = Message(Record.unpack(entry.record), entry, tag, source.queue.name, channel)
        except CorruptRecord as exc:
            channel.bury_unreadable(source.queue, entry, tag, exc)
            return
        if source.queue.token and self.lanes is not None:
            self.lanes.put(message)
        else:
            self._put(message)

    def _put(self, message: Message) -> None:
        self._channel.qos.append(message, message.delivery_tag)
        self._inbox.put(message)

    @property
    def has_undelivered(self) -> bool:
        """Something lies in the inbox."""
        return bool(self._inbox)

    def was_busy(self, since: float) -> bool:
        """The consumer was busy with a message for longer than a claim, and has others in the inbox.

        Arguments:
            since: monotonic time until which it was us who kept it waiting, at its last question.
        """
        busy_s = self._process.clock.monotonic() - max(self._delivered_at, since)
        return busy_s >= LONG_SERVICE_S and bool(self._inbox)

    def asked(self) -> None:
        """The consumer asks for a message: so long it was busy with the one before."""
        if self._timing:
            self._timing = False
            seen = self._process.clock.monotonic() - self._delivered_at
            self._service_s = seen if self._service_s is None else 0.7 * self._service_s + 0.3 * seen

    def deliver_all(self) -> None:
        """Deliver what lies in the inbox. An exception leaves the rest there."""
        if self.has_next and self._gate is not None:
            self._gate.start_next()
        while self._inbox:
            while self._inbox:
                self.deliver_one()
            self.asked()
            if self.lanes is not None:
                # The next ones of a led queue need not wait for a round of the loop.
                self._channel.follow_terms()

    @property
    def has_next(self) -> bool:
        """A message of a led queue that was delivered waits no longer for the one before it."""
        lanes, gate = self.lanes, self._gate
        if lanes is None:
            return False
        if lanes.over:
            lanes.over = [tag for tag in lanes.over if gate is not None and gate.awaits(tag)]
        if lanes.is_blind:
            lanes.is_blind = gate is not None and gate.has_next
        return bool(lanes.over) or lanes.is_blind

    def deliver_one(self) -> bool:
        """Deliver the oldest message; return whether somebody got it."""
        self.asked()
        message = self._inbox.take()
        if message is None:
            return False
        self._delivered_at = self._process.clock.monotonic()
        self._timing = self._gate is None  # a worker measures by itself
        channel = self._channel
        tag: str = message.delivery_tag
        held = channel.ledger.get(tag)
        consumers = self._consumers.get(message.queue)
        gate = self._gate
        closing = gate is not None and gate.closing
        # Where it would run at once, the one before it is over.
        may = message.may_start if self._blocks else message.may_go
        if held is None or not consumers or closing or not may():
            # Too late: the lease or the term is not fresh, so somebody else may have it by now.
            self._release(message)
            self.fetcher.wake(message.queue)
            return False
        if message.discard:
            return self._discard(message)
        consumers.rotate(-1)
        consumer_tag, callback, no_ack = consumers[-1]
        message.delivery_info["consumer_tag"] = consumer_tag
        message.started = held.begun = gate is None
        if no_ack:
            channel.qos.forget(tag)
            channel.ledger.finish(tag)
        if self._blocks:
            self.fetcher.step_back()
        self.watchdog.busy()
        try:
            callback(message)
        finally:
            self.watchdog.idle()
        return True

    def _discard(self, message: Message) -> bool:
        gate = self._gate
        if gate is not None and gate.deliver_discard(message, message.discard):
            return True
        logger.info(
            "Message %s of queue %s is discarded: %s.", message.message_id, message.queue, message.discard
        )
        self._channel.qos.forget(message.delivery_tag)
        self._channel.ledger.finish(message.delivery_tag)
        return False

    # -- giving back -----------------------------------------------------------

    def _release(self, message: Message) -> None:
        self._channel.qos.forget(message.delivery_tag)
        self._channel.ledger.release(message.delivery_tag, "unstarted")

    def _give_back(self, queue_name: str | None = None) -> None:
        """Give back what lies in the inbox, youngest first; of one queue, or all."""
        for message in self._inbox.take_back(queue_name):
            self._release(message)

    def _check(self, now: float) -> None:
        """Look, in the keeper's thread, whether this consumer still consumes."""
        fetcher = self._fetcher
        since = max(self._delivered_at, fetcher.claimed_at if fetcher is not None else 0.0)
        if self._inbox and now - since > self._process.lease_s / 2:
            for name in self._inbox.queues():
                # What comes from a led queue is nobody else's.
                if self.lanes is None or name not in self.lanes:
                    self._give_back(name)
        if fetcher is not None:
            fetcher.teller.disown_claims(now - self._process.lease_s / 4)
            if self.watchdog.suspects(now, fetcher.claimed_at, self._neglects, self._blocks):
                self._channel.poller.wake()

    def _neglects(self) -> bool:
        channel = self._channel
        return channel.poller.driven and self._room()[0] > 0 and channel.has_token()

    # -- the end ---------------------------------------------------------------

    def close(self) -> None:
        """Give back what was not delivered, and stop."""
        terms = self._channel.session.terms
        if self.lanes is not None and terms is not None:
            terms.unlisten(self._channel.poller.wake)
        self._give_back()
        for name in list(self._consumers):
            for tag, _, _ in list(self._consumers.get(name, ())):
                self.stop(name, tag)
        if self._fetcher is not None:
            self._fetcher.close()

    def sources(self) -> Iterator[Source]:
        """The queues that are fetched from now."""
        return iter(self._fetcher.sources if self._fetcher is not None else ())
