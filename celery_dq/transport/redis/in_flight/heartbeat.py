"""The heartbeat: renews the leases of a process from a native thread with a connection of its own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import redis

from celery_dq.clock import Clock
from celery_dq.native import leave_green_hub, unpatched
from celery_dq.per_process import OwnerProcess
from celery_dq.transport.in_flight.in_flight_messages import TRUSTED_SHARE, InFlightMessages
from celery_dq.transport.partition_replies import HeartbeatReply
from celery_dq.transport.redis.in_flight.data_loss import DataLoss
from celery_dq.transport.redis.in_flight.in_doubt import InDoubtClaims
from celery_dq.transport.redis.in_flight.lost_workers import report_lost_workers
from celery_dq.transport.redis.in_flight.server_clock import ServerClock
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.refusals import RefusalLog
from celery_dq.transport.redis.store.script_batches import (
    chunks,
    held_counts,
    is_wakeup_stored,
    result_of,
    run_together,
    share,
)
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS, recognised_error

logger = logging.getLogger(__name__)

#: Renewals per lease. When two in a row get no answer, the third is still in time; with a lease below two
#: seconds only one may get none.
RENEWALS_PER_LEASE = 4
#: Shortest time in seconds to wait for an answer, for any lease: a busy server is not a dead connection.
MIN_ANSWER_TIMEOUT_S = 0.5
#: Shortest time in seconds between rounds, even if a lease expires sooner.
MIN_WAIT_S = 0.05
#: Leases after which a broker that does not answer and has no consumer left is forgotten.
ABANDON_AFTER_LEASES = 8
#: Most messages of each kind (of lost consumers, due ones) that one round trip moves, or few per queue.
CHUNK = 200
#: Seconds that an interpreter waits at its exit for a heartbeat without an answer.
EXIT_TIMEOUT_S = 5.0


class LeaseHolder(Protocol):
    """The process whose leases are renewed; ``ConsumerIdentity`` is it."""

    owner: OwnerProcess
    consumer: str
    clock: Clock
    lease_s: float
    lease_ms: int
    in_flight: InFlightMessages
    in_doubt: InDoubtClaims
    data_loss: DataLoss
    server_clock: ServerClock
    refusals: RefusalLog

    def renewed(self, queue: Queue, renewal: HeartbeatReply, sent_at: float) -> None:
        """Record the answer to a renewal that was sent at monotonic *sent_at*."""

    def not_renewed(self, queue: Queue, error: Exception) -> None:
        """Note a renewal that failed with *error*."""


class Heartbeat:
    """Renews the leases of a process, and sends its acks when no channel is left to send them.

    The thread starts with the first partition and ends by itself after the last one. It uses primitives that
    gevent and eventlet have not patched, so that it runs while the event loop is blocked.

    Args:
        process: the consumer whose leases are renewed.
    """

    def __init__(self, process: LeaseHolder) -> None:
        self._process = process
        #: The queues with a lease, by :attr:`Queue.key`. Only this class changes it.
        self.queues: dict[str, Queue] = {}
        #: Consumers per partition. Their number is the length, because appending and popping are atomic.
        self._lease_holders: dict[str, deque[None]] = {}
        self._checks: list[Callable[[float], None]] = []
        self._connect: Callable[[], redis.Redis] | None = None
        self._client: redis.Redis | None = None
        self._running = False
        #: Heartbeats in a row without an answer. The thread that sends the next one may be another.
        self._failures = 0
        self._overdue: set[str] = set()
        self._start_stop = unpatched("_thread", "allocate_lock")()
        self._wake_lock = unpatched("_thread", "allocate_lock")()
        self._wake_lock.acquire()
        #: Held while the thread lives.
        self._thread_lock = unpatched("_thread", "allocate_lock")()
        self._exiting = False

    # -- consumers of a lease ---------------------------------------------------

    def keep_lease(self, queue: Queue, clients: Callable[[], Callable[[], redis.Redis]]) -> None:
        """Keep a lease on the partition of *queue* from now on; :meth:`drop_lease` must be called as often.

        Args:
            queue: the queue that the caller begins to consume.
            clients: returns a function that makes a client which outlives the caller's connection.
        """
        name = queue.key
        with self._start_stop:
            if not self.queues or self._connect is None:
                self._connect = clients()
            self._lease_holders.setdefault(name, deque()).append(None)
            self.queues[name] = queue
            if not self._running:
                # The thread before this one releases the lock when it ends.
                self._thread_lock.acquire()
                self._running = True
                atexit.register(self._send_pending_acks_at_exit)
                unpatched("_thread", "start_new_thread")(self._run, ())

    def drop_lease(self, queue: Queue, soon: bool = True) -> None:
        """End the caller's use of a lease, which ends with the last message that is in flight.

        Args:
            queue: the queue that the caller has consumed.
            soon: end the lease now if possible; else at the next heartbeat, because the caller may consume
                again by then.
        """
        # Without the lock: the thread holds it while it resigns, and the broker may not answer.
        with contextlib.suppress(IndexError):
            self._lease_holders.get(queue.key, deque()).pop()
        if soon:
            self.wake()

    @property
    def answer_timeout_s(self) -> float:
        """Seconds to wait for an answer, so short that one dead connection does not cost the lease."""
        lease_s = self._process.lease_s
        return min(max(lease_s / RENEWALS_PER_LEASE, MIN_ANSWER_TIMEOUT_S), lease_s / 2)

    def add_check(self, check: Callable[[float], None]) -> None:
        """Call *check* with the monotonic time at every heartbeat, from the heartbeat thread."""
        self._checks.append(check)

    def remove_check(self, check: Callable[[float], None]) -> None:
        """Undo :meth:`add_check`."""
        if check in self._checks:
            self._checks.remove(check)

    def has_unclaimed_wakeup(self, queues: Sequence[Queue]) -> bool:
        """Return whether a wake-up of these queues waits for a consumer. For the heartbeat thread only."""
        return self._client is not None and is_wakeup_stored(queues, self._client)

    def _send_pending_acks_at_exit(self) -> None:
        """Send the pending acks and end the leases, at interpreter exit."""
        if self._connect is None or not self._process.owner.is_current:
            return
        # A thread that is alive when the interpreter ends is killed wherever it waits. Inside a greenlet
        # that is a crash of the process, with its exit status.
        self._exiting = True
        self.wake()
        if not self._thread_lock.acquire(True, EXIT_TIMEOUT_S):
            logger.warning(
                "Worker %s exits while its heartbeat waits for Redis: tasks that ended last may run again.",
                self._process.consumer,
                extra={"event": "exit_without_answer"},
            )
            return
        if not self.queues:
            return
        try:
            client = self._connect()
            for queue in list(self.queues.values()):
                self.send_pending_acks(queue, client)
            self._resign(list(self.queues.values()), client)
        except (redis.RedisError, OSError, RuntimeError) as exc:
            # Python 3.12 starts no thread at exit, and gevent resolves names in threads.
            logger.warning(
                "Worker %s could not reach Redis at its exit (%s): its last acknowledgements are lost, and "
                "tasks that ended last may run again when its lease has expired.",
                self._process.consumer,
                _text(exc),
                extra={"event": "acks_lost_at_exit"},
            )

    def wake(self) -> None:
        """Begin the next heartbeat now."""
        with contextlib.suppress(RuntimeError):  # it is awake
            self._wake_lock.release()

    end_leases_soon = renew_now = wake

    def send_pending_acks_soon(self) -> None:
        """Send the pending acks from the heartbeat thread, because no channel will send them."""
        self._overdue.update(tuple(self.queues))
        self.wake()

    # -- the thread ------------------------------------------------------------

    def _run(self) -> None:
        interval = self._process.lease_s / RENEWALS_PER_LEASE
        wait = interval
        while not self._should_end():
            self._wake_lock.acquire(True, wait)
            try:
                # The messages of a lost consumer are reaped when its lease expires, not one heartbeat later.
                wait = min(interval, max(self._renew_all(), MIN_WAIT_S))
                if self._failures:
                    logger.info(
                        "The leases of worker %s are renewed again.",
                        self._process.consumer,
                        extra={"event": "lease_renewed_again"},
                    )
                self._failures = 0
            except (redis.RedisError, OSError) as exc:
                # The broker may be back sooner than the next heartbeat.
                self._log_not_renewed(exc, logging.DEBUG if self._failures else logging.WARNING)
                self._failures += 1
                wait = interval / 4
                self._disconnect()
                self._abandon_unreachable()
            except Exception:
                if self._exiting:
                    # The exit tries once more, and reports.
                    break
                # When this thread ends, other workers get all messages of this process.
                wait, self._failures = interval, 0
                logger.exception(
                    "The heartbeat of worker %s goes on after an error.",
                    self._process.consumer,
                    extra={"event": "heartbeat_failed"},
                )
        try:
            self._disconnect()
            leave_green_hub()
        finally:
            # Until here the exit of the process waits for this thread.
            atexit.unregister(self._send_pending_acks_at_exit)
            self._thread_lock.release()

    def _log_not_renewed(self, exc: Exception, level: int) -> None:
        lease_s = self._process.lease_s
        logger.log(
            level,
            "The leases of worker %s could not be renewed (%s). Running tasks go on. No other task starts "
            "when Redis has not answered for %g s; after %g s other workers get the messages. The "
            "heartbeat tries again every %g s.",
            self._process.consumer,
            _text(exc),
            TRUSTED_SHARE * lease_s,
            lease_s,
            lease_s / RENEWALS_PER_LEASE / 4,
            extra={"event": "lease_not_renewed"},
        )

    def _should_end(self) -> bool:
        with self._start_stop:
            self._running = bool(self.queues) and not self._exiting
            return not self._running

    def _renew_all(self) -> float:
        """Renew, reap and send acks; return the seconds until the first lease of any consumer expires."""
        next_end_s = math.inf
        process, client = self._process, self._client
        if client is None:
            assert self._connect is not None
            client = self._client = self._connect()
            self.compare_all()
        queues = list(self.queues.values())
        if any(queue.token for queue in queues):
            # A leader itself waits until a retry is due; elsewhere Redis compares the times.
            process.server_clock.ask(client)
        self._resign(queues, client)
        kept = [queue for queue in queues if queue.key in self.queues]
        for chunk in chunks(kept):
            next_end_s = min(next_end_s, self._renew_leases(chunk, client))
        self._resign(kept, client)
        now = process.clock.monotonic()
        for check in list(self._checks):
            check(now)
        return next_end_s

    def _renew_leases(self, queues: Sequence[Queue], client: redis.Redis) -> float:
        """Renew the leases on these queues in one round trip; see :meth:`_renew_all`."""
        process, next_end_s = self._process, math.inf
        sent_at = process.clock.monotonic()
        calls = [
            queue.partition.heartbeat(
                queue.consumer(process.consumer),
                lease_ms=process.lease_ms,
                limit=share(CHUNK, len(queues)),
                max_deliveries=queue.max_deliveries,
                retention=queue.retention,
            )
            for queue in queues
        ]
        renewed: list[Queue] = []
        failure: Exception | None = None
        # All answers are recorded before the next call: a lost lease is reported only once.
        for queue, call, answer in zip(queues, calls, run_together(calls, client), strict=True):
            try:
                with self._each_by_itself(queue):
                    renewal = result_of(call, answer)
                    process.renewed(queue, renewal, sent_at)
                    report_lost_workers(queue.name, renewal.lost)
                    next_end_s = min(next_end_s, renewal.next_end_s)
                    renewed.append(queue)
            except (redis.RedisError, OSError) as exc:  # noqa: PERF203 - the others are recorded, too
                process.not_renewed(queue, exc)
                failure = failure or exc
        if failure is not None:
            raise failure
        self._compare(renewed, client)
        for queue in renewed:
            with self._each_by_itself(queue, "ack"):
                self._send_unsent_acks(queue, client)
        return next_end_s

    @contextlib.contextmanager
    def _each_by_itself(self, queue: Queue, command: str = "heartbeat") -> Iterator[None]:
        """Log an error of one queue, which must not cost the other queues their leases."""
        refusals = self._process.refusals
        try:
            yield
            refusals.accepted(command, queue.partition_name)
        except redis.ResponseError as exc:
            # The keys of the queue may belong to another program.
            if isinstance(recognised_error(exc), PASSING_ERRORS):
                raise
            refusals.refused(command, exc, queue.partition_name)
        except (struct.error, ValueError):
            logger.exception(
                "The heartbeat of queue %s goes on after an error.",
                queue.name,
                extra={"event": "heartbeat_failed", "queue": queue.name},
            )

    def _compare(self, queues: Sequence[Queue], client: redis.Redis) -> None:
        """Compare what the broker and this process have, on those of these queues where that is due."""
        process, in_doubt = self._process, self._process.in_doubt
        due = [queue for queue in queues if in_doubt.is_due(queue.key, process.lease_s)]
        due = [queue for queue in due if not in_doubt.has_old_acks(queue.key)]
        if not due:
            return
        had = process.in_flight.tags_by_partition()
        for queue, count in zip(due, held_counts(due, process.consumer, client), strict=True):
            with self._each_by_itself(queue, "comparison"):
                if isinstance(count, Exception):
                    raise count
                own = had.get(queue.key, ())
                in_doubt.compare(queue, process.consumer, client, process.in_flight, own, count)

    def compare_all(self) -> None:
        """Let the next heartbeat compare what the broker and this process have, after a reconnect."""
        for name in tuple(self.queues):
            self._process.in_doubt.doubt(name)

    def _send_unsent_acks(self, queue: Queue, client: redis.Redis) -> None:
        """Send the acks that no channel sends."""
        in_flight, name = self._process.in_flight, queue.key
        # Acks that are a heartbeat old were not sent because a task blocks the event loop.
        late = name in self._overdue
        # Before the acks are sent, so that a mark which another thread sets now stays.
        self._overdue.discard(name)
        try:
            if late or not in_flight.has_listener:
                self.send_pending_acks(queue, client)
        finally:
            # Also acks that could not be sent.
            if in_flight.pending_acks(name):
                self._overdue.add(name)

    def is_in_use(self, name: str) -> bool:
        """Return whether the partition has in-flight messages, pending acks or calls without an answer."""
        # In this order: an ack that is pending is under way a moment later.
        return self._process.in_flight.has_any(name) or self._process.in_doubt.is_unsettled(name)

    def send_pending_acks(self, queue: Queue, client: redis.Redis) -> None:
        """Send all pending acks of *queue*, and wait for the answers.

        Raises:
            redis.RedisError: no answer; the acks without an answer stay pending.
        """
        process, in_flight = self._process, self._process.in_flight
        name = queue.key
        while in_flight.pending_acks(name):
            try:
                with process.in_doubt.taking_acks(name):
                    # See `may_take_acks` of the pipeline. At the exit nothing else sends them, nor while a
                    # task blocks the loop: one that turns would have read that answer within a heartbeat.
                    interval_s = process.lease_s / RENEWALS_PER_LEASE
                    if queue.token and not self._exiting and process.in_doubt.awaits_others(name, interval_s):
                        break
                    in_flight.send_acks(process.consumer, queue, client)
            finally:
                # A message may wait for one of these answers, or an ack for the end of this call.
                in_flight.notify_listeners()

    def _resign(self, queues: Sequence[Queue], client: redis.Redis) -> None:
        """End the leases on those of these queues that are not used any more."""
        for chunk in chunks([queue for queue in queues if not self._is_used(queue)]):
            # A consumer that begins now waits for the lock, so that its first messages are not released here.
            with self._start_stop:
                left = [queue for queue in chunk if not self._is_used(queue)]
                while left:
                    consumer, limit = self._process.consumer, share(CHUNK, len(left))
                    calls = [queue.partition.resign(queue.consumer(consumer), limit=limit) for queue in left]
                    answers = run_together(calls, client)
                    ended, left = left, []
                    for queue, call, answer in zip(ended, calls, answers, strict=True):
                        with self._each_by_itself(queue, "resign"):
                            if result_of(call, answer):
                                left.append(queue)
                            else:
                                self._forget(queue.key)
                                self._process.data_loss.forget(queue.key)

    def _is_used(self, queue: Queue) -> bool:
        return bool(self._lease_holders.get(queue.key)) or self.is_in_use(queue.key)

    def _abandon_unreachable(self) -> None:
        """Forget queues that this process consumes no more, while Redis does not answer: leases expire."""
        process, in_flight = self._process, self._process.in_flight
        now, patience = process.clock.monotonic(), ABANDON_AFTER_LEASES * process.lease_s
        for name in list(self.queues):
            with self._start_stop:
                if self._lease_holders.get(name) or (
                    self.is_in_use(name) and in_flight.seconds_since_renewal(name, now) < patience
                ):
                    continue
                dropped = in_flight.abandon_partition(name)
                self._forget(name)
            if dropped:
                logger.warning(
                    "Worker %s gives up on %s: Redis has not answered for %d leases. The %d messages that "
                    "it held, or had finished without an answer, are delivered again when Redis is back.",
                    process.consumer,
                    name,
                    ABANDON_AFTER_LEASES,
                    dropped,
                    extra={"event": "broker_given_up"},
                )

    def _forget(self, name: str) -> None:
        queue = self.queues.pop(name, None)
        if queue is not None:
            self._process.refusals.forget(queue.partition_name)
        self._lease_holders.pop(name, None)
        self._overdue.discard(name)
        self._process.in_flight.forget_partition(name)
        self._process.in_doubt.forget_partition(name)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                client.connection_pool.disconnect()
            except (redis.RedisError, OSError) as exc:
                logger.debug("Closing the heartbeat's connection failed: %s.", exc)


def _text(exc: Exception) -> str:
    """Return the text of *exc* without its full stop, or the name of its class."""
    return str(exc).rstrip(".") or type(exc).__name__
