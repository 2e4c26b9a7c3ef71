"""Sends scripts on one wire without waiting, and tells the broker what the ledger has for it.

Answers come in the order in which the scripts were sent. What a script carried
goes back into the ledger when it gets no answer; telling twice is harmless.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.exceptions import NoScriptError

from celery_dq.transport.redis.fitness import PASSING_ERRORS
from celery_dq.transport.redis.ledger import Burial, Held
from celery_dq.transport.redis.partition import Call
from celery_dq.transport.redis.process import TELL_LIMIT, Process, bury, release, tags
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.wire import Wire

logger = logging.getLogger(__name__)

#: Seconds until a script that failed is tried again.
REFUSED_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Sent:
    """A script on its way.

    Attributes:
        call: the script with its arguments.
        queue: whose partition it changes.
        sent_at: monotonic time.
        claim: called with its result when it is a claim, or with None when it was refused.
        settles, finishes, releases, burials: what it carries out of the ledger.
    """

    call: Call[Any]
    queue: Queue
    sent_at: float
    claim: Callable[[Any], None] | None = None
    settles: list[Held] = field(default_factory=list)
    finishes: list[Held] = field(default_factory=list)
    releases: list[tuple[str, Held]] = field(default_factory=list)
    burials: list[Burial] = field(default_factory=list)


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
        self._process.ledger.sent(sent.queue.key)
        self._sent.append(sent)
        self.wire.open()
        self.wire.send(sent.call.command())

    def claims(self, queue: Queue) -> bool:
        """Return whether a claim from *queue* is on its way."""
        return any(sent.claim is not None and sent.queue.key == queue.key for sent in self._sent)

    def nudge(self, queue: Queue, now: float) -> None:
        """Let somebody else look at *queue*."""
        self.send(Sent(queue.partition.nudge(), queue, now))

    def send_untold(self, now: float) -> None:
        """Send what the ledger has for the broker.

        Raises:
            redis.RedisError: the connection broke.
        """
        ledger, process = self._process.ledger, self._process
        if now < self.rests_until:
            return
        for name in ledger.pending():
            queue = process.keeper.queue(name)
            if queue is None or self._waits_for_company(queue, now):
                continue
            partition, consumer = queue.partition, queue.consumer(process.consumer)
            settles, finishes = ledger.take(name, TELL_LIMIT)
            if settles:
                call: Call[Any] = partition.settle(consumer, tags(settles))
                self.send(Sent(call, queue, now, settles=settles))
            if finishes:
                call = partition.finish(consumer, tags(finishes))
                self.send(Sent(call, queue, now, finishes=finishes))
            releases = ledger.take_releases(name, TELL_LIMIT)
            for mode in sorted({mode for mode, _ in releases}):
                same = [held for how, held in releases if how == mode]
                call = release(process, queue, mode, same)
                self.send(Sent(call, queue, now, releases=[(mode, held) for held in same]))
            while (burial := ledger.take_burial(name)) is not None:
                self.send(Sent(bury(process, queue, burial), queue, now, burials=[burial]))

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
        self._process.ledger.answered(sent.queue.key)
        result = sent.call.parse(answer)
        if sent.claim is not None:
            sent.claim(result)
        elif sent.settles or sent.finishes or sent.releases:
            self._process.ledger.stale += result

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
            sent.claim(None)
        else:
            self.rests_until = self._process.clock.monotonic() + REFUSED_SECONDS

    def _take_back(self, sent: Sent) -> None:
        ledger, key = self._process.ledger, sent.queue.key
        ledger.answered(key)
        ledger.untold(key, sent.settles, sent.finishes, sent.releases, sent.burials)

    def close(self) -> None:
        """Close the wire; what was on its way goes back into the ledger."""
        while self._sent:
            self._take_back(self._sent.popleft())
        self.wire.close()
