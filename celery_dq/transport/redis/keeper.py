"""Renews the leases of a process from a native thread with a connection of its own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import redis

from celery_dq.native import leave_green_hub, unpatched
from celery_dq.transport.redis.fitness import PASSING_ERRORS, recognised
from celery_dq.transport.redis.ledger import Burial
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.replies import Tag
from celery_dq.transport.redis.reports import TELL_LIMIT, bury, release, tags

if TYPE_CHECKING:
    from celery_dq.transport.redis.process import Process

logger = logging.getLogger(__name__)

#: Renewals per lease. Two in a row may get no answer at all, and a third one is in time; one, where the lease
#: is shorter than two seconds.
RENEWALS_PER_LEASE = 4
#: Seconds that an answer may take at least, however short the lease: a busy server is not a dead connection.
LEAST_PATIENCE_S = 0.5
#: Seconds between rounds at least, however soon the next lease runs out.
SHORTEST_WAIT_S = 0.05
#: Leases after which a broker that does not answer, and that nobody uses any more, is forgotten.
GIVE_UP_LEASES = 8
#: How many expired messages, due ones and so on one heartbeat moves at most.
CHUNK = 200
#: How a held entry begins.
CLAIM_NUMBER = struct.Struct(">d")
#: Seconds that an interpreter waits at its exit for a heartbeat that is under way.
LAST_ROUND_S = 5.0


class Keeper:
    """Renews the leases of a process, and tells what no connection is left to tell.

    The thread starts with the first partition and ends by itself with the last.
    It uses primitives that gevent and eventlet have not patched, so that it runs
    while the loop is blocked.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._queues: dict[str, Queue] = {}
        #: By their length, as several threads count: appending and popping are atomic.
        self._users: dict[str, deque[None]] = {}
        self._idle_checks: list[Callable[[float], None]] = []
        self._connect: Callable[[], redis.Redis] | None = None
        self._client: redis.Redis | None = None
        self._running = False
        self._late: set[str] = set()
        self._start_stop = unpatched("_thread", "allocate_lock")()
        self._bell = unpatched("_thread", "allocate_lock")()
        self._bell.acquire()
        #: Held while the thread lives.
        self._alive = unpatched("_thread", "allocate_lock")()
        self._exiting = False

    # -- who needs a lease -----------------------------------------------------

    def use(self, queue: Queue, clients: Callable[[], Callable[[], redis.Redis]]) -> None:
        """Keep a lease on the partition of *queue* from now on; counted, see :meth:`leave`.

        Arguments:
            queue: what is consumed.
            clients: returns what makes a client that outlives the caller's connection.
        """
        name = queue.key
        with self._start_stop:
            if not self._queues or self._connect is None:
                self._connect = clients()
            self._users.setdefault(name, deque()).append(None)
            self._queues[name] = queue
            if not self._running:
                # The last one gives the lock back as the last thing it does.
                self._alive.acquire()
                self._running = True
                atexit.register(self._last_words)
                unpatched("_thread", "start_new_thread")(self._run, ())

    def leave(self, queue: Queue, soon: bool = True) -> None:
        """The caller consumes no more; the lease ends once nothing is held.

        Arguments:
            queue: what was consumed.
            soon: end it now if possible; else at the next heartbeat, as the caller may be back by then.
        """
        # Not under the lock, which the keeper holds while it resigns: the broker may not answer.
        with contextlib.suppress(IndexError):
            self._users.get(queue.key, deque()).pop()
        if soon:
            self.ring()

    @property
    def patience_s(self) -> float:
        """Seconds to wait for an answer: a connection that has died silently must not cost the lease."""
        lease_s = self._process.lease_s
        return min(max(lease_s / RENEWALS_PER_LEASE, LEAST_PATIENCE_S), lease_s / 2)

    def queue(self, key: str) -> Queue | None:
        """Return the queue whose partition the ledger names *key*, while it has a lease."""
        return self._queues.get(key)

    def watch(self, check: Callable[[float], None]) -> None:
        """Call *check* with the monotonic time at every heartbeat (a watchdog's bone)."""
        self._idle_checks.append(check)

    def unwatch(self, check: Callable[[float], None]) -> None:
        """Undo :meth:`watch`."""
        if check in self._idle_checks:
            self._idle_checks.remove(check)

    def waits_for_somebody(self, queue: Queue) -> bool:
        """Return whether a token lies in *queue* that nobody takes; only for the keeper's thread."""
        length: Any = 0 if self._client is None else self._client.llen(queue.partition.keys.wake)
        return bool(length)

    def _last_words(self) -> None:
        """Tell what there is to tell and give the leases back, at interpreter exit."""
        if self._connect is None or self._process.pid != os.getpid():
            return
        # A thread that lives on while the interpreter is taken down is killed wherever it waits. Inside
        # a greenlet that is a crash, and the exit status that of one.
        self._exiting = True
        self.ring()
        if not self._alive.acquire(True, LAST_ROUND_S):
            logger.warning("A heartbeat still waits for the broker at exit: what was done may be done again.")
            return
        try:
            client = self._connect()
            for queue in list(self._queues.values()):
                self.tell(queue, client)
                self._resign(queue, client)
        except (redis.RedisError, OSError) as exc:
            logger.warning("The broker could not be told at exit (%s): what was done may be done again.", exc)

    def ring(self) -> None:
        """Do a round now rather than at the next heartbeat."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def tell_soon(self) -> None:
        """Tell what there is to tell in the keeper's thread: whoever would do it comes no more."""
        self._late.update(tuple(self._queues))
        self.ring()

    # -- the thread ------------------------------------------------------------

    def _run(self) -> None:
        interval = self._process.lease_s / RENEWALS_PER_LEASE
        wait, failures = interval, 0
        while not self._over():
            self._bell.acquire(True, wait)
            try:
                # What a dead process held comes back when its lease ends, not at some heartbeat later.
                wait, failures = min(interval, max(self._round(), SHORTEST_WAIT_S)), 0
            except (redis.RedisError, OSError) as exc:
                # The broker may be back sooner than the next heartbeat.
                logger.log(
                    logging.DEBUG if failures else logging.WARNING,
                    "The leases of %s could not be renewed: %s.",
                    self._process.consumer,
                    exc,
                )
                wait, failures = interval / 4, failures + 1
                self._disconnect()
                self._give_up()
            except Exception:
                # This thread must not die of anything, or every message it guards is given away.
                wait, failures = interval, 0
                logger.exception("The keeper of %s goes on after an error.", self._process.consumer)
        try:
            self._disconnect()
            leave_green_hub()
        finally:
            self._alive.release()

    def _over(self) -> bool:
        with self._start_stop:
            self._running = bool(self._queues) and not self._exiting
            if not self._running:
                atexit.unregister(self._last_words)
            return not self._running

    def _round(self) -> float:
        """Renew, reap and tell; return the seconds until the first lease of anybody runs out."""
        next_end_s = math.inf
        process, client = self._process, self._client
        if client is None:
            assert self._connect is not None
            client = self._client = self._connect()
        for queue in list(self._queues.values()):
            try:
                next_end_s = min(next_end_s, self._beat(queue, client))
            except redis.ResponseError as exc:  # noqa: PERF203 - each queue by itself
                # One queue whose keys are somebody else's must not cost the others their leases.
                if isinstance(recognised(exc), PASSING_ERRORS):
                    raise
                logger.error("Redis refuses the heartbeat of queue %s: %s.", queue.name, exc)
            except (struct.error, ValueError):
                logger.exception("The heartbeat of queue %s goes on after an error.", queue.name)
        now = process.clock.monotonic()
        for check in list(self._idle_checks):
            check(now)
        return next_end_s

    def _beat(self, queue: Queue, client: redis.Redis) -> float:
        process, ledger, name = self._process, self._process.ledger, queue.key
        sent_at = process.clock.monotonic()
        renewal = queue.partition.renew(
            queue.consumer(process.consumer),
            lease_ms=process.lease_ms,
            limit=CHUNK,
            max_deliveries=queue.max_deliveries,
        ).run(client)
        if renewal.reaped:
            logger.info("%d messages of %s came back from lost consumers.", renewal.reaped, queue.name)
        if renewal.fenced:
            process.fenced_out(queue)
        else:
            if not renewal.alive:
                process.lease_was_lost(name, renewal.claim)
            ledger.renewed(name, sent_at)
        if process.doubts.exists(name):
            self._clear_doubts(queue, client)
        # A loop that is blocked by a task cannot tell anything for a whole heartbeat.
        late = name in self._late
        # Before it is told: another thread may say meanwhile that there is more.
        self._late.discard(name)
        try:
            if late or not ledger.has_listener:
                self.tell(queue, client)
        finally:
            # Also what could not be told.
            if ledger.outbox(name):
                self._late.add(name)
        if not self._users.get(name) and not self.owes(name):
            self._resign(queue, client)
        return renewal.next_end_s

    def owes(self, name: str) -> bool:
        """Whether something of that partition is held, to be told, or on its way."""
        ledger = self._process.ledger
        return (
            bool(ledger.outbox(name)) or bool(ledger.holds_of(name)) or self._process.doubts.under_way(name)
        )

    def _clear_doubts(self, queue: Queue, client: redis.Redis) -> None:
        process, name = self._process, queue.key
        fields = client.hscan_iter(queue.partition.keys.held(queue.consumer(process.consumer)), count=CHUNK)
        held = [(f"{CLAIM_NUMBER.unpack_from(value)[0]:.0f}", key.decode()) for key, value in fields]
        strangers = [Tag(*each) for each in process.doubts.compare(name, held, process.ledger.get)]
        for start in range(0, len(strangers), TELL_LIMIT):
            chunk = strangers[start : start + TELL_LIMIT]
            consumer = queue.consumer(process.consumer)
            queue.partition.release(consumer, chunk, mode="unstarted").run(client)
        if strangers:
            logger.info("%d messages of %s whose claim got no answer were given back.", len(strangers), name)

    def tell(self, queue: Queue, client: redis.Redis) -> None:
        """Send everything that the ledger has for *queue*, and wait for the answers.

        Raises:
            redis.RedisError: no answer; what was not told stays in the ledger.
        """
        process, ledger = self._process, self._process.ledger
        name, partition, consumer = queue.key, queue.partition, queue.consumer(process.consumer)
        while ledger.outbox(name):
            process.doubts.reports(name, +1)
            settles, finishes = ledger.take(name, TELL_LIMIT)
            releases = ledger.take_releases(name, TELL_LIMIT)
            burials: list[Burial] = []
            try:
                if settles:
                    ledger.stale += partition.settle(consumer, tags(settles)).run(client)
                    settles = []
                if finishes:
                    ledger.stale += partition.finish(consumer, tags(finishes)).run(client)
                    finishes = []
                while releases:
                    mode = releases[0][0]
                    same = [held for how, held in releases if how == mode]
                    ledger.stale += release(process, queue, mode, same).run(client)
                    ledger.returned(name, len(same))
                    releases = [(how, held) for how, held in releases if how != mode]
                while (burial := ledger.take_burial(name)) is not None:
                    burials = [burial]
                    bury(process, queue, burial).run(client)
                    burials = []
            except BaseException:
                ledger.untold(name, settles, finishes, releases, burials)
                raise
            finally:
                process.doubts.reports(name, -1)

    def _resign(self, queue: Queue, client: redis.Redis) -> None:
        name = queue.key
        # Whoever begins to consume now waits for the end of this: else what he claims would be resigned.
        with self._start_stop:
            if not (self._users.get(name) or self.owes(name)):
                consumer = queue.consumer(self._process.consumer)
                while queue.partition.resign(consumer, limit=CHUNK).run(client):
                    pass
                self._forget(name)

    def _give_up(self) -> None:
        """Without a server: leave to their end the leases of queues that nobody here consumes any more."""
        process, ledger = self._process, self._process.ledger
        now, patience = process.clock.monotonic(), GIVE_UP_LEASES * process.lease_s
        for name in list(self._queues):
            with self._start_stop:
                if self._users.get(name) or (self.owes(name) and ledger.silence(name, now) < patience):
                    continue
                dropped = ledger.abandon(name)
                self._forget(name)
            if dropped:
                logger.warning(
                    "%s gives up on %s, whose broker has been away for %d leases. What was held, or finished "
                    "and not told (%d messages), will be delivered again when it comes back.",
                    process.consumer,
                    name,
                    GIVE_UP_LEASES,
                    dropped,
                )

    def _forget(self, name: str) -> None:
        self._queues.pop(name, None)
        self._users.pop(name, None)
        self._late.discard(name)
        self._process.ledger.forget(name)
        self._process.doubts.forget(name)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                client.connection_pool.disconnect()
            except (redis.RedisError, OSError) as exc:
                logger.debug("Closing the keeper's connection failed: %s.", exc)
