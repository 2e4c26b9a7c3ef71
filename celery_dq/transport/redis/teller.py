"""Sends scripts on one wire without waiting, and tells the broker what the ledger has for it.

Answers come in the order in which the scripts were sent. What a script carried
goes back into the ledger when it gets no answer; telling twice is harmless.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.exceptions import NoScriptError

from celery_dq.transport.redis.fitness import PASSING_ERRORS
from celery_dq.transport.redis.ledger import Burial, Held, Outbox
from celery_dq.transport.redis.partition import Call
from celery_dq.transport.redis.process import Process
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.reports import TELL_LIMIT, bury, release, tags
from celery_dq.transport.redis.wire import Wire

logger = logging.getLogger(__name__)

#: Seconds until a script that failed is tried again.
REFUSED_SECONDS = 1.0


class NoUse(enum.Enum):
    """Why a claim has brought nothing to use."""

    #: The keeper did not wait for its answer any more, and gives back what it took.
    DISOWNED = enum.auto()
    #: The script failed.
    REFUSED = enum.auto()


@dataclass(eq=False, slots=True)
class Sent:
    """A script on its way.

    Attributes:
        call: the script with its arguments.
        queue: whose partition it changes.
        sent_at: monotonic time.
        claim: called with its result when it is a claim, or with why there is none to use.
        settles, finishes, releases, burials: what it carries out of the ledger.
        awaited: popped by who sees to what the claim takes: the loop with the answer, or the keeper, who has
            given up on it. Both may come at the same time, and popping is atomic.
        nudges: above 0 for a nudge: how often it is sent, each time when the one before was answered.
    """

    call: Call[Any]
    queue: Queue
    sent_at: float
    claim: Callable[[Any], None] | None = None
    settles: list[Held] = field(default_factory=list)
    finishes: list[Held] = field(default_factory=list)
    releases: list[tuple[str, Held]] = field(default_factory=list)
    burials: list[Burial] = field(default_factory=list)
    awaited: list[None] = field(default_factory=lambda: [None])
    nudges: int = 0

    @property
    def tells(self) -> bool:
        """It tells the broker what must be heard before the lease is given back."""
        return self.claim is None and not self.nudges

    def see_to_it(self) -> bool:
        """Return whether the caller, and nobody else, is to see to what the claim takes."""
        try:
            self.awaited.pop()
        except IndexError:
            return False
        return True


def untold(process: Process, queue: Queue, now: float, finishing: bool = True) -> Iterator[Sent]:
    """Yield what the ledger has to tell *queue*'s partition, taking it out of the ledger.

    Arguments:
        process: whose ledger.
        queue: whose partition.
        now: monotonic time.
        finishing: also the finishes; else they stay.
    """
    ledger, name, partition = process.ledger, queue.key, queue.partition
    consumer = queue.consumer(process.consumer)
    settles, finishes = ledger.take(name, TELL_LIMIT, finishing)
    if settles:
        call: Call[Any] = partition.settle(consumer, tags(settles))
        yield Sent(call, queue, now, settles=settles)
    if finishes:
        call = partition.finish(consumer, tags(finishes))
        yield Sent(call, queue, now, finishes=finishes)
    releases = ledger.take_releases(name, TELL_LIMIT)
    for mode in sorted({mode for mode, _ in releases}):
        same = [held for how, held in releases if how == mode]
        call = release(process, queue, mode, same)
        yield Sent(call, queue, now, releases=[(mode, held) for held in same])
    while (burial := ledger.take_burial(name)) is not None:
        yield Sent(bury(process, queue, burial), queue, now, burials=[burial])


class Teller:
    """The script wire of one channel.

    Arguments:
        process: consumer identity and ledger.
        pool: where the connection comes from.
        waits_for_company: returns whether the finishes of a queue wait for a claim to ride with.
    """

    def __init__(
        self,
        process: Process,
        pool: redis.ConnectionPool,
        waits_for_company: Callable[[Queue, float], bool],
    ) -> None:
        self._process = process
        self._waits_for_company = waits_for_company
        self.wire = Wire(pool)
        self._sent: deque[Sent] = deque()
        #: Monotonic time until which nothing is told, after a refusal.
        self.rests_until = 0.0

    def __len__(self) -> int:
        """Return how many scripts are on their way."""
        return len(self._sent)

    def oldest(self) -> float | None:
        """Return when the oldest unanswered script was sent, monotonic; None without one."""
        return self._sent[0].sent_at if self._sent else None

    def send(self, sent: Sent) -> None:
        """Send a script.

        Raises:
            redis.RedisError: the connection broke; :meth:`close` puts back what it carried.
        """
        if sent.claim is not None:
            self._process.doubts.claims(sent.queue.key)
        elif sent.tells:
            self._process.doubts.reports(sent.queue.key, +1)
        self._sent.append(sent)
        self.wire.open()
        self.wire.send(sent.call.command())

    def claims(self, queue: Queue) -> bool:
        """Return whether a claim from *queue* is on its way."""
        return any(sent.claim is not None and sent.queue.key == queue.key for sent in self._sent)

    def ends(self, queue: Queue) -> bool:
        """Return whether the end of a message from *queue* is on its way."""
        return any((sent.finishes or sent.burials) and sent.queue.key == queue.key for sent in self._sent)

    def nudge(self, queue: Queue, now: float, times: int = 1) -> None:
        """Let somebody else look at *queue*: this process keeps no appointment there any more.

        Arguments:
            queue: where.
            now: monotonic time.
            times: 2 when a wait for tokens was given up just now. The broker may not have noticed and send
                the token there; by the answer it has.
        """
        call = queue.partition.nudge(queue.consumer(self._process.consumer))
        self.send(Sent(call, queue, now, nudges=times))

    def send_untold(self, now: float, urgent: str = "") -> None:
        """Send what the ledger has for the broker.

        Arguments:
            now: monotonic time.
            urgent: the partition whose finishes do not wait for company.

        Raises:
            redis.RedisError: the connection broke.
        """
        ledger, process = self._process.ledger, self._process
        if now < self.rests_until:
            return
        for name in ledger.pending():
            queue = process.keeper.queue(name)
            if queue is None:
                continue
            box = ledger.outbox(name)
            company = bool(box.finishes) and name != urgent and self._waits_for_company(queue, now)
            if not (box.releases or box.burials) and not self._worth_a_call(box, name, company):
                continue
            # What is taken out of the ledger here must not look as if it had been told.
            process.doubts.reports(name, +1)
            batch = deque(untold(process, queue, now, not company))
            try:
                while batch:
                    self.send(batch.popleft())
            finally:
                # What a broken connection has left unsent waits for close() like what was sent.
                for sent in batch:
                    process.doubts.reports(name, +1)
                    self._sent.append(sent)
                process.doubts.reports(name, -1)

    def _worth_a_call(self, box: Outbox, name: str, company: bool) -> bool:
        """Whether to tell what may wait a little: finishes for a claim, settles for the settles before them.

        One settle leaves at once. While it is on its way others gather and leave with its answer: a
        worker of short tasks settles one after the other, and a call for each is its greatest cost.
        """
        if box.settles and not any(sent.settles and sent.queue.key == name for sent in self._sent):
            return True
        return bool(box.finishes) and not company

    def disown_claims(self, sent_before: float) -> None:
        """Wait no longer for claims that went off before then; called by the keeper.

        The loop is blocked or nobody turns it, and others may have time for what was claimed.
        """
        for sent in tuple(self._sent):
            # A led queue is nobody else's, and what is claimed of it goes before what is claimed later.
            waits = sent.claim is not None and not sent.queue.token
            if waits and sent.sent_at < sent_before and sent.see_to_it():
                self._process.doubts.unanswered(sent.queue.key)

    def hear_out(self) -> None:
        """Wait for all answers that are on their way: nobody turns the loop that would read them.

        Raises:
            redis.RedisError: the connection broke.
        """
        while self._sent:
            self._read_one()

    def read(self) -> None:
        """Read the answers that have arrived; called when the socket is readable.

        Raises:
            redis.RedisError: the connection broke, or the server is in a failover.
        """
        self._read_one()
        while self._sent and self.wire.readable():
            self._read_one()

    def _read_one(self) -> None:
        try:
            answer = self.wire.read()
        except NoScriptError:
            # Scripts were flushed: the same again, with the source this time.
            sent = self._sent.popleft()
            self._sent.append(sent)
            self.wire.send(sent.call.command(full=True))
            return
        except redis.ResponseError as exc:
            sent = self._sent.popleft()
            self._take_back(sent)
            if isinstance(exc, PASSING_ERRORS):
                raise
            self._refused(sent, exc)
            return
        sent = self._sent.popleft()
        result = sent.call.parse(answer)
        if sent.claim is not None:
            self._answered(sent, result)
            return
        if sent.nudges:
            if sent.nudges > 1:
                self.nudge(sent.queue, self._process.clock.monotonic(), sent.nudges - 1)
            return
        self._process.doubts.reports(sent.queue.key, -1)
        if sent.settles or sent.finishes or sent.releases:
            self._process.ledger.stale += result
        if sent.releases:
            self._process.ledger.returned(sent.queue.key, len(sent.releases))

    def _answered(self, sent: Sent, result: Any) -> None:
        doubts, key = self._process.doubts, sent.queue.key
        assert sent.claim is not None
        if not sent.see_to_it():
            sent.claim(NoUse.DISOWNED)
            return
        try:
            sent.claim(result)
        except BaseException:
            # What did not reach the ledger must not stay with us for ever.
            doubts.unanswered(key)
            raise
        doubts.answered(key, {entry.claim for entry in result.entries})

    def _refused(self, sent: Sent, exc: redis.ResponseError) -> None:
        """The connection is sound, but the script failed: a full server, or a foreign key in our place.

        The worker lives on and serves its other queues; this is tried again in a second.
        """
        logger.error(
            "Redis refused the script %r for queue %s: %s. It is tried again in %g s.",
            sent.call.script.name,
            sent.queue.name,
            exc,
            REFUSED_SECONDS,
        )
        if sent.claim is not None:
            sent.claim(NoUse.REFUSED)
        else:
            self.rests_until = self._process.clock.monotonic() + REFUSED_SECONDS

    def _take_back(self, sent: Sent) -> None:
        ledger, doubts, key = self._process.ledger, self._process.doubts, sent.queue.key
        if sent.tells:
            doubts.reports(key, -1)
        elif sent.claim is not None and sent.see_to_it():
            # It may have taken messages all the same.
            doubts.unanswered(key)
        ledger.untold(key, sent.settles, sent.finishes, sent.releases, sent.burials)

    def close(self) -> None:
        """Close the wire; what was on its way goes back into the ledger."""
        while self._sent:
            self._take_back(self._sent.popleft())
        self.wire.close()
