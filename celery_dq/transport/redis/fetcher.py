"""Brings messages from Redis to one channel, without polling and without blocking.

Two wires per channel: on one, a ``BLPOP`` waits for a *token* of any consumed
partition; on the other go the scripts. The life of a consumed queue::

    quiet ──token, appointment, new consumer──▶ hungry ──claim──▶ hungry or quiet

A *hungry* queue may have something eligible; it is claimed from while the
channel has room, and it stays hungry as long as claims come back full or say
"more". A *quiet* one waits for its token. An *appointment* is the promise of this
process to look again when the next delayed or throttled message is due; the claim
script hands it out, to one consumer at a time. Others *rely on* whoever has taken a
token or has an appointment. If he has no room when he ought to look, or stops, he
hands on what he has by a nudge.

Whatever the ledger has to tell (settles, finishes) rides along with the next
claim of that partition, or goes alone when no claim is due.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from celery_dq.transport.redis.ledger import COMPANY_SECONDS
from celery_dq.transport.redis.process import Process
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.replies import Claimed
from celery_dq.transport.redis.reports import TELL_LIMIT, tags
from celery_dq.transport.redis.source import REST_SECONDS, Source
from celery_dq.transport.redis.teller import REFUSED_SECONDS, NoUse, Sent, Teller
from celery_dq.transport.redis.tokens import Tokens
from celery_dq.transport.redis.transient import Listener
from celery_dq.transport.redis.wire import OVERDUE_SECONDS

if TYPE_CHECKING:
    from celery_dq.transport.redis.replies import ClaimedEntry

logger = logging.getLogger(__name__)


#: More pool slots than anybody has.
LARGE = 1 << 30


class Fetcher:
    """The consuming side of one channel.

    Arguments:
        process: the process's consumer identity and ledger.
        pool: pool of the connections that the loop watches.
        room: returns (want, free): how many messages the channel takes now, and
            how many of them fit free pool slots.
        keeps_appointments: returns whether the process can keep one while it works; None: it is
            about to work, and not even an idle one could be kept.
        deliver: called with (source, entry, delivery tag) for every claimed message.
    """

    def __init__(
        self,
        process: Process,
        pool: redis.ConnectionPool,
        room: Callable[[], tuple[int, int]],
        keeps_appointments: Callable[[], bool | None],
        deliver: Callable[[Source, ClaimedEntry, str], None],
    ) -> None:
        self._process = process
        self._room = room
        self._keeps_appointments = keeps_appointments
        self._deliver = deliver
        self.teller = Teller(process, pool, self._waits_for_company)
        self.tokens = Tokens(pool)
        self._pool = pool
        self._sources: dict[str, Source] = {}
        self._turn: deque[Source] = deque()
        self._claiming = False
        #: Queues that are consumed no more, and how often to nudge them.
        self._left: list[tuple[Queue, int]] = []
        #: Transient queues, by the keys of their lists.
        self._listeners: dict[str, Listener] = {}
        #: Delivery tag of a message that has killed a worker before. Until it is over, no second
        #: one is claimed, so that an innocent neighbour of a poison message is hit once at most.
        self._suspect: str | None = None
        #: Monotonic time of the last answered claim, for the watchdog.
        self.claimed_at = process.clock.monotonic()

    # -- what to consume -------------------------------------------------------

    def consume(
        self,
        queue: Queue,
        limit: Callable[[], int] | None = None,
        claimed: Callable[[], None] | None = None,
    ) -> Source:
        """Start fetching from *queue*; see :class:`Source` for the others."""
        source = self._sources.get(queue.name)
        if source is None:
            source = self._sources[queue.name] = Source(queue, limit=limit, claimed=claimed)
            self._turn.append(source)
        self._rearm()
        return source

    def cancel(self, queue: str) -> Source | None:
        """Stop fetching from *queue*; a claim on its way is given back when answered."""
        source = self._sources.pop(queue, None)
        if source is not None:
            self._turn.remove(source)
            waited = self._rearm()
            if waited or source.relied_on or source.appointment is not None:
                self._leave(source, 2 if waited else 1)
        return source

    def listen(self, key: str, deliver: Callable[[bytes], None]) -> None:
        """Start popping a plain list, for a queue that dies with its consumer."""
        self._listeners[key] = Listener(key, deliver, self._pool)

    def unlisten(self, key: str) -> None:
        """Stop popping a plain list."""
        listener = self._listeners.pop(key, None)
        if listener is not None:
            listener.close()

    def connections(self) -> Iterator[tuple[str, Any]]:
        """The connections to be watched, with what is read from them."""
        wires = [("scripts", self.teller.wire), ("tokens", self.tokens.wire)]
        wires += [("messages", listener.wire) for listener in self._listeners.values()]
        for kind, wire in wires:
            if wire.connection is not None:
                yield kind, wire.connection

    @property
    def sources(self) -> list[Source]:
        """What is fetched from now."""
        return list(self._sources.values())

    @property
    def _quiet(self) -> bool:
        """No queue has anything for this channel, so that it must wait for a token."""
        return not any(source.hungry for source in self._turn)

    @property
    def _runs_suspect(self) -> bool:
        return self._suspect is not None and self._suspect in self._process.ledger

    def wake(self, queue: str | None = None) -> None:
        """Look at *queue* (or at all) even though no token came."""
        for source in self._sources.values():
            if queue is None or source.queue.name == queue:
                source.hungry = True

    # -- the loop calls these --------------------------------------------------

    def tick(self) -> None:
        """Send what is due. Called before every wait.

        Raises:
            redis.RedisError: the connection broke.
        """
        now = self._process.clock.monotonic()
        for source in self._turn:
            if source.appointment is not None and source.appointment <= now:
                source.appointment = None
                source.hungry = source.relied_on = True
            if source.rest_until and source.rest_until <= now:
                source.rest_until = 0.0
            elif source.rest_s > REST_SECONDS and not self._runs_suspect:
                source.rise()
            if source.look_at is not None and source.look_at <= now:
                source.look_at = None
        want, free = self._room() if self._turn else (0, 0)
        if want > 0 and not self._claiming:
            hungry = self._next_hungry(now, free)
            if hungry is not None:
                self._send_claim(hungry, want, free, now)
        if want <= 0:
            for source in self._turn:
                if source.relied_on:
                    self._pass_on(source, now)
        self._hand_on(now)
        self.teller.send_untold(now)
        if self.tokens.waits:
            self.tokens.check(now)
        elif want > 0 and not self._claiming and self._quiet and self._keeps_appointments() is not None:
            self.tokens.wait((source.queue for source in self._turn), now)
        for listener in tuple(self._listeners.values()):
            listener.tick(now)
        oldest = self.teller.oldest()
        # An answer that lies there unread says that it was us who was busy.
        if oldest is not None and now - oldest > OVERDUE_SECONDS and not self.teller.wire.arrived():
            raise redis.ConnectionError(
                f"Redis has not answered a script for {now - oldest:.0f} s: the connection is dead"
            )

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which :meth:`tick` must run though nothing arrives."""
        times = [source.appointment for source in self._turn if source.appointment is not None]
        for source in self._turn:
            if source.rest_until:
                times.append(source.rest_until)
            if source.look_at is not None:
                times.append(source.look_at)
            box = self._process.ledger.outbox(source.queue.key)
            if box.finishes:
                times.append(max(box.finishes_since + COMPANY_SECONDS, self.teller.rests_until))
        return min(times) if times else None

    @property
    def expects_answer(self) -> bool:
        """A script is on its way: its answer comes without any event elsewhere."""
        return len(self.teller) > 0

    def on_readable(self, fd: int) -> bool:
        """Read what has arrived on *fd*; return whether it went straight to a consumer.

        Raises:
            redis.RedisError: the connection broke, or a script failed.
        """
        if fd == self.tokens.wire.fd:
            self._read_token()
            return False
        if fd == self.teller.wire.fd:
            self.teller.read()
            return False
        return any(listener.read() for listener in tuple(self._listeners.values()) if listener.wire.fd == fd)

    # -- claims ----------------------------------------------------------------

    def _next_hungry(self, now: float, free: int) -> Source | None:
        for _ in range(len(self._turn)):
            source = self._turn[0]
            self._turn.rotate(-1)
            if source.hungry and not source.rests(now, free):
                return source
        return None

    def _send_claim(self, source: Source, want: int, free: int, now: float) -> None:
        process, queue = self._process, source.queue
        if source.limit is not None:
            want = min(want, source.limit())
        settles, finishes = process.ledger.take(queue.key, TELL_LIMIT)
        call = queue.partition.claim(
            queue.consumer(process.consumer),
            lease_ms=process.lease_ms,
            want=want,
            free=free,
            hold=self._keeps_appointments(),
            max_deliveries=queue.max_deliveries,
            suspects=not self._runs_suspect,
            settle=tags(settles),
            finish=tags(finishes),
        )
        self._claiming = True
        source.free = free
        answer = partial(self._claimed, source, want, now)
        self.teller.send(Sent(call, queue, now, answer, settles, finishes))

    def _claimed(self, source: Source, want: int, sent_at: float, claimed: Claimed | NoUse) -> None:
        self._claiming = False
        process, key = self._process, source.queue.key
        if claimed is NoUse.REFUSED:
            source.rest_until, source.free = process.clock.monotonic() + REFUSED_SECONDS, LARGE
        is_gone = self._sources.get(source.queue.name) is not source
        if isinstance(claimed, NoUse):
            # What was disowned is asked for again at once: we are back. Whether it has brought an appointment
            # is not known.
            source.relied_on = True
            if is_gone:
                self._leave(source)
            return
        if claimed.fenced:
            self._fenced(source)
            return
        if not claimed.alive:
            process.lease_was_lost(key)
        process.ledger.renewed(key, sent_at)
        process.ledger.stale += claimed.stale
        self.claimed_at = now = process.clock.monotonic()
        process.strikes = 0
        source.hungry = claimed.more or len(claimed.entries) >= want
        if claimed.more and not claimed.entries:
            source.rest(now, self._runs_suspect)
        else:
            source.rise()
        source.appointment = None if claimed.appointment_s is None else now + claimed.appointment_s
        source.relied_on = False
        if is_gone and source.appointment is not None:
            self._leave(source)
        for entry in claimed.entries:
            held = process.ledger.hold(key, entry.id, entry.claim)
            if is_gone:
                # Cancelled while the claim was on its way.
                process.ledger.release(held.tag, "unstarted")
                continue
            if claimed.suspect:
                self._suspect = held.tag
            self._deliver(source, entry, held.tag)
        if source.claimed is not None:
            source.claimed()

    def _fenced(self, source: Source) -> None:
        """Somebody else leads this queue, or it has a leader and we do not know."""
        source.hungry = False
        if not source.queue.token:
            # Waiting for its tokens would take them away from the leader.
            self.cancel(source.queue.name)
        self._process.fenced_out(source.queue)

    # -- what others rely on us for --------------------------------------------

    def _pass_on(self, source: Source, now: float, times: int = 1) -> None:
        """We have no room: somebody else is to look, now and when the next message is due."""
        if not source.queue.token:  # nobody else consumes it
            source.appointment, source.relied_on = None, False
            self.teller.nudge(source.queue, now, times)

    def _leave(self, source: Source, times: int = 1) -> None:
        # Sent by who finds out if the connection is broken.
        if not source.queue.token and self.teller.wire.connection is not None:
            self._left.append((source.queue, times))

    def _hand_on(self, now: float) -> None:
        """Let others look at the queues that are consumed no more."""
        while self._left:
            queue, times = self._left.pop()
            self.teller.nudge(queue, now, times)

    def step_back(self) -> None:
        """We are about to be busy, for who knows how long: tokens and appointments are for others.

        Raises:
            redis.RedisError: the connection broke.
        """
        waited, on_their_way = self._rearm(), len(self.teller)
        now = self._process.clock.monotonic()
        for source in self._turn:
            if waited or source.relied_on or source.appointment is not None:
                self._pass_on(source, now, 2 if waited else 1)
        if waited and len(self.teller) > on_their_way:
            # Nobody turns the loop, and the second nudge waits for the answer to the first.
            self.teller.hear_out()

    def hear_out(self) -> None:
        """Hand on what is left and wait for all answers: nobody turns the loop that would read them.

        Raises:
            redis.RedisError: the connection broke.
        """
        self._hand_on(self._process.clock.monotonic())
        while len(self.teller):
            self.teller.hear_out()
            self._hand_on(self._process.clock.monotonic())

    # -- telling ---------------------------------------------------------------

    def _waits_for_company(self, queue: Queue, now: float) -> bool:
        """Whether the finishes of *queue* wait for the claim that is about to come anyway."""
        source = self._sources.get(queue.name)
        if source is None or not source.hungry:
            return False
        box = self._process.ledger.outbox(queue.key)
        return now - box.finishes_since < COMPANY_SECONDS

    # -- the token wire --------------------------------------------------------

    def _rearm(self) -> bool:
        """The set of keys has changed; return whether a BLPOP was on its way, which names the wrong ones."""
        waited = self.tokens.give_up()
        if waited:
            # A token may have been on its way to the connection that is gone.
            self.wake()
        return waited

    def _read_token(self) -> None:
        queue = self.tokens.take()
        source = self._sources.get(queue) if queue is not None else None
        if source is None:
            return
        source.hungry = source.relied_on = True
        if self._room()[0] <= 0:
            # Somebody else may have room: the script puts the token back if it is due.
            self._pass_on(source, self._process.clock.monotonic())

    # -- the end ---------------------------------------------------------------

    def close(self) -> None:
        """Close all wires; what was on its way goes back into the ledger."""
        for key in tuple(self._listeners):
            self.unlisten(key)
        self._claiming = False
        self._left.clear()
        for source in self._turn:
            source.hungry = source.relied_on = True
        self.teller.close()
        self.tokens.close()
