"""The consumer thread: it owns all sockets of the consuming side, and does one thing after the other.

There is one in each process for each server (``consumer_threads.py``). It *collects* what other threads have
left: acks, consumers that begin or end. It makes one :class:`Trip`, which fills the inboxes of the channels
and wakes those that deliver from them. Then it *waits*, by ``poll()`` on the wake-ups and on its own waker,
until an ack, a renewal or a planned look is due. An ack that may wait begins no turn.

A trip carries the claims of the queues whose turn it is, each with the acks of its partition; the acks of
other partitions that are due (:class:`AckSender`); renewals of leases, and hand-overs of wake-ups. The next
trip begins when all answers are there. So no answer overtakes another one, and only the calls of a lost trip
are in doubt.

Nothing blocks the thread but Redis: neither a task of the solo pool nor a callback of plain kombu. It uses
primitives that gevent and eventlet have not patched. It starts with the first consumer, and ends after the
last lease.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import redis

from celery_dq.compat.redis_sockets import socket_of
from celery_dq.native import leave_green_hub, start_thread, unpatched
from celery_dq.shown import shell_word, shown_ids, shown_logger
from celery_dq.transport.in_flight import TRUSTED_SHARE, Acks, InFlightMessage, PendingAcks, ack_calls
from celery_dq.transport.partition_replies import HeartbeatReply, Reaped
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.cluster_client import twin_of
from celery_dq.transport.redis.store.partition import Queue, process_of
from celery_dq.transport.redis.store.script_calls import (
    PipelinedConnection,
    ScriptCall,
    chunks,
    is_lost,
    result_of,
    run_on,
    run_together,
    share,
)
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS, recognised_error
from celery_dq.transport.redis.store.server_errors import RefusalLog
from celery_dq.transport.redis.store.slot_map import NodeAddress, SlotMap
from celery_dq.transport.redis.store.whole_queue import held_counts, is_wakeup_stored
from celery_dq.wake_flag import WakeFlag
from celery_dq.waker import Waker

logger = shown_logger(__name__)

#: Seconds until a command is sent again that Redis has refused.
RETRY_AFTER_REFUSAL_S = 1.0
#: Most calls of one trip, for any purpose, so that its answers do not come late.
MAX_CALLS = 100
#: Seconds that a finish waits for the next claim, which can carry it: with 100 messages a second, most do.
FINISH_WAIT_S = 0.01
#: Seconds from one trip to the next while the process has enough to do, so that claims and acks travel
#: together.
PACE_S = 0.003
#: The most times that on a cluster. An ack for which a message waits may be late by as long.
CLUSTER_PACES = 3
#: Messages in flight from which on a process has enough to do for so long, each time.
FED = 8
#: Longest wait in seconds, after which connections and capacity are looked at.
MAX_WAIT_S = 1.0
#: Shortest time in seconds to wait for an answer, for any lease: a busy server is not a dead connection.
MIN_ANSWER_TIMEOUT_S = 0.5
#: Seconds that an interpreter waits at its exit for a trip without an answer.
EXIT_TIMEOUT_S = 5.0
#: Renewals per lease. When two in a row get no answer, the third is still in time; with a lease below two
#: seconds only one may get none.
RENEWALS_PER_LEASE = 4
#: Shortest time in seconds between rounds, even if a lease expires sooner.
MIN_ROUND_S = 0.05
#: Leases after which a broker that does not answer and has no consumer left is forgotten.
ABANDON_AFTER_LEASES = 8
#: Most messages of each kind (of lost consumers, due ones) that one round trip moves, or few per queue.
MAX_MOVED = 200


@dataclass(eq=False, slots=True)
class TripCall:
    """One call of a trip.

    Attributes:
        call: The script with its arguments.
        queue: The queue whose partition it reads or changes.
        answered: Called with the parsed answer.
        failed: Called with the error in the place of an answer. After :func:`is_lost` errors, the call may
            have run.
    """

    call: ScriptCall[Any]
    queue: Queue
    answered: Callable[[Any], None]
    failed: Callable[[Exception], None]


@dataclass(eq=False)
class Trip:
    """The calls of one trip.

    Attributes:
        now: Monotonic time at which it is planned.
        refusals: Logs the calls that Redis refuses.
        calls: Its calls, in their order.
        claims: The keys of the queues from which it claims. A claim carries the acks of its queue.
        acked: The keys of the queues whose acks it carries. A key is added before the acks are taken.
        room: How many calls it may still carry.
    """

    now: float
    refusals: RefusalLog
    calls: list[TripCall] = field(default_factory=list)
    claims: set[str] = field(default_factory=set)
    acked: set[str] = field(default_factory=set)
    room: int = MAX_CALLS

    def add(
        self,
        call: ScriptCall[Any],
        queue: Queue,
        answered: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Add a call; see :class:`TripCall`."""
        self.calls.append(TripCall(call, queue, answered, failed))
        self.room -= 1

    def run(self, wire: PipelinedConnection) -> Exception | None:
        """Send all calls, and pass each its answer.

        Returns:
            The error of the connection if it broke, or the first error of a receiver of an answer.

        Raises:
            redis.RedisError: No connection. Each call has got this error.
        """
        try:
            answers = run_on([each.call for each in self.calls], wire)
        except (redis.RedisError, OSError) as exc:
            for each in self.calls:
                each.failed(exc)
            raise
        broken: Exception | None = None
        for each, answer in zip(self.calls, answers, strict=True):
            # A receiver that fails must not keep the other answers from theirs.
            try:
                if isinstance(answer, Exception):
                    if is_lost(answer):
                        broken = broken or answer
                    each.failed(answer)
                    continue
                try:
                    result = each.call.parse(answer)
                except ValueError as exc:
                    each.failed(_unreadable(exc))
                    continue
                if self.refusals.reasons:
                    self._accepted(each)
                each.answered(result)
            except Exception as exc:
                broken = broken or exc
        return broken

    def _accepted(self, each: TripCall) -> None:
        # An ack that was refused may travel with a claim now, and a hand-over is not sent again.
        names = ("claim", "ack", "hand_over_wakeup") if each.call.script.name == "claim" else ()
        for name in names or (each.call.script.name,):
            self.refusals.accepted(name, each.queue.partition_name)


def _unreadable(error: ValueError) -> redis.ResponseError:
    """Return the error of an answer that cannot be read, which is retried as a refusal of its queue."""
    return redis.ResponseError(
        f"the answer cannot be read ({error}), because another program has written into the keys of the queue"
    )


class Leases:
    """The leases of one process.

    Args:
        identity: The process.
    """

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._identity = identity
        #: The queues with a lease, by :attr:`Queue.key`. Only this class changes it.
        self.queues: dict[str, Queue] = {}
        #: Consumers per partition. Their number is the length, because appending and popping are atomic.
        self._holders: dict[str, deque[None]] = {}
        #: Held while leases end, so that a consumer which begins then waits.
        self.lock = unpatched("_thread", "allocate_lock")()
        #: Keys of the queues that are still to be renewed, in a round or because their consumer has begun.
        self._to_renew: dict[str, None] = {}
        #: Whether a round of renewals is under way.
        self.in_round = False
        self._next_end_s = math.inf
        #: Monotonic time of the next round.
        self.round_at = -math.inf
        #: Whether a lease may end before the next round.
        self.may_end = False
        #: Whether the process ends, so that only messages in flight keep a lease.
        self.is_last = False
        #: Rounds in a row that failed.
        self._failures = 0
        #: Entries of each queue that could not be read, as far as they were logged.
        self._set_aside: dict[str, int] = {}

    @property
    def _interval_s(self) -> float:
        return self._identity.lease_s / RENEWALS_PER_LEASE

    # -- from other threads ------------------------------------------------------

    def keep(self, queue: Queue) -> None:
        """Keep a lease from now on; :meth:`drop` must be called as often. The lock is held."""
        self._holders.setdefault(queue.key, deque()).append(None)
        self.queues[queue.key] = queue

    def drop(self, queue: Queue) -> None:
        """End the caller's use of a lease, which ends with the last message that is in flight."""
        with contextlib.suppress(IndexError):
            self._holders.get(queue.key, deque()).pop()

    def give(self, queue: Queue) -> int:
        """Let another thread have a lease from now on; return the number of its users."""
        with self.lock:
            self._to_renew.pop(queue.key, None)
            del self.queues[queue.key]
            return len(self._holders.pop(queue.key, ()))

    def take(self, queue: Queue, users: int) -> None:
        """Have a lease from now on that another thread gives, and renew it soon."""
        with self.lock:
            self._holders.setdefault(queue.key, deque()).extend([None] * users)
            self.queues[queue.key] = queue
        self.renew_soon([queue])

    def is_in_use(self, name: str) -> bool:
        """Return whether the partition has in-flight messages, pending acks or calls without an answer."""
        # In this order: an ack that is pending is under way a moment later.
        return self._identity.in_flight.has_any(name) or self._identity.in_doubt.is_unsettled(name)

    def _is_used(self, queue: Queue) -> bool:
        if self.is_last:
            return self._identity.in_flight.has_any(queue.key)
        return bool(self._holders.get(queue.key)) or self.is_in_use(queue.key)

    # -- renewing ----------------------------------------------------------------

    @property
    def due_at(self) -> float:
        """The monotonic time of the next renewal."""
        if not self.queues:
            return math.inf
        return -math.inf if self._to_renew or self.may_end else self.round_at

    def renew_soon(self, queues: Iterable[Queue]) -> None:
        """Renew these leases with the next trips."""
        self._to_renew.update(dict.fromkeys(queue.key for queue in queues))

    def begin_again(self) -> None:
        """Begin a round with the next trip, also where one is under way."""
        self.in_round, self.round_at = False, -math.inf

    def plan(self, trip: Trip) -> bool:
        """Add the renewals that are due to a trip; return whether a round begins."""
        begins = not self.in_round and trip.now >= self.round_at and bool(self.queues)
        if begins:
            self.in_round, self._next_end_s = True, math.inf
            self._to_renew = dict.fromkeys(self.queues)
        if not self._to_renew:
            return begins
        identity = self._identity
        names = list(self._to_renew)[: max(trip.room, 0)]
        for name in names:
            del self._to_renew[name]
            queue = self.queues.get(name)
            if queue is None:
                continue
            call = queue.partition.heartbeat(
                queue.consumer(identity.consumer),
                lease_ms=identity.lease_ms,
                limit=share(MAX_MOVED, len(names)),
                max_deliveries=queue.max_deliveries,
                retention=queue.retention,
            )
            trip.add(call, queue, partial(self._renewed, queue, trip.now), partial(self._not_renewed, queue))
        return begins

    def _renewed(self, queue: Queue, sent_at: float, renewal: HeartbeatReply) -> None:
        self._identity.renewed(queue, renewal, sent_at)
        _report_lost_workers(queue.name, renewal.lost)
        self._report_set_aside(queue, renewal.set_aside)
        self._next_end_s = min(self._next_end_s, renewal.next_end_s)

    def _report_set_aside(self, queue: Queue, count: int) -> None:
        if count > self._set_aside.get(queue.key, 0):
            logger.error(
                "%d entries of %s could not be read and were set aside: another program has written into the "
                "keys of the queue, and messages may not run. 'celery dq doctor' names the entries, and "
                "'celery dq dead recover %s' finds such messages.",
                count,
                queue.partition_name,
                shell_word(queue.name),
                extra={"event": "entries_set_aside", "queue": queue.name},
            )
        if count:
            self._set_aside[queue.key] = count
        else:
            self._set_aside.pop(queue.key, None)

    def _not_renewed(self, queue: Queue, exc: Exception) -> None:
        """Handle an error in the place of an answer, which must not cost the other queues their leases."""
        if isinstance(exc, redis.ResponseError) and not isinstance(recognised_error(exc), PASSING_ERRORS):
            # The keys of the queue may belong to another program.
            self._identity.refusals.refused("heartbeat", exc, queue.partition_name)
            return
        self._identity.not_renewed(queue, exc)
        if isinstance(exc, redis.ResponseError):
            raise exc

    def end_round(self, now: float) -> bool:
        """End the round that is under way if all leases are renewed; return whether it has ended."""
        if self._to_renew:
            return False
        self.in_round = False
        # The messages of a lost consumer are reaped when its lease expires, not one heartbeat later.
        self.round_at = now + min(self._interval_s, max(self._next_end_s, MIN_ROUND_S))
        if self._failures:
            logger.info(
                "The leases of worker %s are renewed again.",
                self._identity.consumer,
                extra={"event": "lease_renewed_again"},
            )
        self._failures = 0
        return True

    def fail_round(self, now: float, exc: Exception) -> None:
        """End a round that failed. The broker may be back sooner than the next one."""
        was_in_round, self.in_round = self.in_round, False
        self._to_renew.clear()
        if not was_in_round and not self._failures:
            self.round_at = now  # another call has failed: is the broker away?
            return
        self.round_at = now + self._interval_s / 4
        self._log_not_renewed(exc, logging.DEBUG if self._failures else logging.WARNING)
        self._failures += 1

    def _log_not_renewed(self, exc: Exception, level: int) -> None:
        lease_s = self._identity.lease_s
        logger.log(
            level,
            "The leases of worker %s could not be renewed (%s). Running tasks go on. No other task starts "
            "when Redis has not answered for %g s; after %g s other workers get the messages. The "
            "heartbeat tries again every %g s.",
            self._identity.consumer,
            text_of(exc),
            TRUSTED_SHARE * lease_s,
            lease_s,
            self._interval_s / 4,
            extra={"event": "lease_not_renewed"},
        )

    @contextlib.contextmanager
    def each_by_itself(self, queue: Queue, command: str) -> Iterator[None]:
        """Log an error of one queue, which must not cost the other queues their leases."""
        refusals = self._identity.refusals
        try:
            yield
            refusals.accepted(command, queue.partition_name)
        except redis.ResponseError as exc:
            if isinstance(recognised_error(exc), PASSING_ERRORS):
                raise
            refusals.refused(command, exc, queue.partition_name)
        except (struct.error, ValueError):
            logger.exception(
                "The heartbeat of queue %s goes on after an error.",
                queue.name,
                extra={"event": "heartbeat_failed", "queue": queue.name},
            )

    def compare(self, client: redis.Redis) -> None:
        """Compare what the broker and this process have, on those queues where that is due."""
        identity, in_doubt = self._identity, self._identity.in_doubt
        due = [queue for name, queue in list(self.queues.items()) if in_doubt.is_due(name, identity.lease_s)]
        if not due:
            return
        had = identity.in_flight.tags_by_partition()
        for chunk in chunks(due):
            for queue, count in zip(chunk, held_counts(chunk, identity.consumer, client), strict=True):
                with self.each_by_itself(queue, "comparison"):
                    if isinstance(count, Exception):
                        raise count
                    own = had.get(queue.key, ())
                    in_doubt.compare(queue, identity.consumer, client, identity.in_flight, own, count)

    def compare_all(self) -> None:
        """Let the end of the next round compare what the broker and this process have, after a reconnect."""
        for name in tuple(self.queues):
            self._identity.in_doubt.doubt(name)

    # -- ending ------------------------------------------------------------------

    def resign(self, client: redis.Redis) -> None:
        """End the leases that are not used any more.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        self.may_end = False
        for chunk in chunks([queue for queue in list(self.queues.values()) if not self._is_used(queue)]):
            # A consumer that begins now waits for the lock, so that its first messages are not released here.
            with self.lock:
                left = [queue for queue in chunk if not self._is_used(queue)]
                while left:
                    consumer, limit = self._identity.consumer, share(MAX_MOVED, len(left))
                    calls = [queue.partition.resign(queue.consumer(consumer), limit=limit) for queue in left]
                    answers = run_together(calls, client)
                    ended, left = left, []
                    for queue, call, answer in zip(ended, calls, answers, strict=True):
                        with self.each_by_itself(queue, "resign"):
                            if result_of(call, answer):
                                left.append(queue)
                            else:
                                self._forget(queue.key)
                                self._identity.data_loss.forget(queue.key)

    def abandon_unreachable(self, now: float) -> None:
        """Forget queues that this process consumes no more, while Redis does not answer: leases expire."""
        identity, in_flight = self._identity, self._identity.in_flight
        patience = ABANDON_AFTER_LEASES * identity.lease_s
        for name in list(self.queues):
            with self.lock:
                if self._holders.get(name) or (
                    self.is_in_use(name) and in_flight.seconds_since_renewal(name, now) < patience
                ):
                    continue
                dropped = in_flight.abandon_partition(name)
                self._forget(name)
            if dropped:
                logger.warning(
                    "Worker %s gives up on %s: Redis has not answered for %d leases. The %d messages that "
                    "it held, or had finished without an answer, are delivered again when Redis is back.",
                    identity.consumer,
                    name,
                    ABANDON_AFTER_LEASES,
                    dropped,
                    extra={"event": "broker_given_up"},
                )

    def _forget(self, name: str) -> None:
        queue = self.queues.pop(name, None)
        if queue is not None:
            self._identity.refusals.forget(queue.partition_name)
        self._holders.pop(name, None)
        self._to_renew.pop(name, None)
        self._identity.in_flight.forget_partition(name)
        self._identity.in_doubt.forget_partition(name)


def _report_lost_workers(queue: str, lost: Iterable[Reaped]) -> None:
    """Log a record for each worker whose messages of *queue* were reaped."""
    for worker, messages in groupby(sorted(lost), key=lambda each: process_of(each.consumer)):
        reaped = list(messages)
        back = [each.id for each in reaped if not each.settled]
        gone = [each.id for each in reaped if each.settled]
        fates = []
        if back:
            fates.append(f"Its messages run again on other workers: {shown_ids(back)}.")
        if gone:
            fates.append(
                f"Acknowledged early and so lost: {shown_ids(gone)}. A task with acks_late would run again."
            )
        logger.warning(
            "Worker %s lost its lease on queue %s: it ended, or stood still for longer than dq_lease. %s",
            worker,
            queue,
            " ".join(fates),
            extra={"event": "worker_lost", "queue": queue, "worker": worker, "back": back, "gone": gone},
        )


def text_of(exc: Exception) -> str:
    """Return the text of *exc* without its full stop, or the name of its class."""
    return str(exc).rstrip(".") or type(exc).__name__


class AckSender:
    """Adds acks to the trips of a consumer thread, which calls all methods but :attr:`queues`.

    Args:
        identity: The process, with its pending acks.
        leases: The leases of the thread. It sends the acks of these queues.
        comes_with_claim: Returns whether the pending finishes of a queue may wait for its next claim.
        refused: Handles an error in the place of an answer; returns the seconds until the next attempt.
    """

    def __init__(
        self,
        identity: ConsumerIdentity,
        leases: Leases,
        comes_with_claim: Callable[[Queue, PendingAcks], bool],
        refused: Callable[[str, Queue, Exception], float],
    ) -> None:
        self._identity = identity
        self._leases = leases
        self._comes_with_claim = comes_with_claim
        self._refused = refused
        #: Monotonic times until which no acks of a queue are sent, by its key, after a refusal.
        self._resumes_at: dict[str, float] = {}
        #: The queues whose acks wait no longer.
        self._urgent: set[str] = set()

    def is_refused(self, key: str, now: float) -> bool:
        """Return whether Redis has refused acks of a queue a moment ago."""
        return now < self._resumes_at.get(key, 0.0)

    def send_soon(self, keys: Iterable[str]) -> None:
        """Let the acks of these queues wait no longer."""
        self._urgent.update(keys)

    def next_time(self) -> float:
        """Return the monotonic time at which acks are due; infinity without any."""
        next_at = math.inf
        for queue, box in self._identity.in_flight.queues_with_acks(self._leases.queues):
            next_at = min(next_at, max(self._due_at(queue, box), self._resumes_at.get(queue.key, 0.0)))
        return next_at

    def plan(self, trip: Trip) -> None:
        """Add the acks that are due, of the queues from which the trip does not claim."""
        identity = self._identity
        if not identity.in_flight.with_acks:
            return
        for queue, box in identity.in_flight.queues_with_acks(self._leases.queues):
            if queue.key in trip.claims or self._due_at(queue, box) > trip.now:
                continue
            if self._resumes_at and self.is_refused(queue.key, trip.now):
                continue
            if trip.room <= 0:  # the calls of one queue may be more than the room
                return
            trip.acked.add(queue.key)
            calls = ack_calls(box, identity.consumer, queue)
            while queue.token and len(calls) > 1:  # each waits for the answer to the one before
                identity.in_flight.restore_acks(queue.key, calls.pop()[1])
            for call, acks in calls:
                answered = partial(self._acked, queue, acks)
                trip.add(call, queue, answered, partial(self._not_acked, queue, acks))  # type: ignore[arg-type]
        self._urgent.clear()

    def _due_at(self, queue: Queue, box: PendingAcks) -> float:
        """Return the monotonic time at which the acks of a queue are sent, if no claim takes them before."""
        if box.releases or box.dead_letters or queue.key in self._urgent:
            return -math.inf
        due_at = math.inf
        for held in tuple(box.settles):
            # In place of the settle of a task that has ended in its process, its finish is sent by then.
            if held.runs_outside or not held.done:
                due_at = held.settle_by
                break
        if not box.finishes:
            return due_at
        if not self._comes_with_claim(queue, box):
            return -math.inf
        return min(due_at, box.oldest_finish_at + FINISH_WAIT_S)

    def _acked(self, queue: Queue, acks: Acks, answer: Any) -> None:
        acks.confirm()
        if not acks.dead_letters:
            self._identity.in_flight.stale += answer
        if acks.releases:
            self._identity.in_flight.confirm_releases(queue.key, len(acks.releases))

    def _not_acked(self, queue: Queue, acks: Acks, exc: Exception) -> None:
        self._identity.in_flight.restore_acks(queue.key, acks)
        if not is_lost(exc):
            pause_s = self._refused("ack", queue, exc)
            now = self._identity.clock.monotonic()
            self._resumes_at = {key: at for key, at in self._resumes_at.items() if at > now}
            self._resumes_at[queue.key] = now + pause_s


def answer_timeout_of(lease_s: float) -> float:
    """Return the seconds to wait for an answer, so few that one dead connection does not cost the lease."""
    return min(max(lease_s / RENEWALS_PER_LEASE, MIN_ANSWER_TIMEOUT_S), lease_s / 2)


class ServedChannel(Protocol):
    """A channel, as its thread serves it. The thread calls all methods.

    Attributes:
        has_queues: Whether it has consumed queues. Another one waits for replies and broadcasts, and plans
            nothing.
        awaits_room: Whether the end of a message, or room for one, may let the channel do something.
    """

    has_queues: bool
    awaits_room: bool

    def plan(self, trip: Trip) -> None:
        """Add the claims and hand-overs of the channel to a trip."""

    def wait(self, now: float) -> float:
        """Begin to wait for what may come.

        Returns:
            The monotonic time from which :meth:`plan` must be called again; infinity for none.
        """

    def sockets(self) -> Iterator[tuple[Any, Callable[[], object]]]:
        """Yield the connections on which something may come, each with the function that reads it."""

    def may_wait_for_claim(self, queue: Queue, box: PendingAcks) -> bool:
        """Return whether the pending finishes of a queue may wait for its next claim by this channel."""

    def after_round(self, now: float) -> None:
        """Check whether the channel still consumes, after a round of renewals."""

    def follow_slots(self) -> None:
        """Hand the queues over whose partitions another master serves."""

    def begin_again(self) -> None:
        """Wait over new connections, and look at all queues: the last connection to the master was lost."""

    def fail(self, error: Exception) -> None:
        """End the channel with an error."""


class Flush:
    """A wait until the broker has confirmed acks.

    Args:
        held: The message whose ack is waited for; None for all.

    Attributes:
        held: As above.
        waiting: The messages whose acks are not confirmed, of those that were pending at its begin.
    """

    def __init__(self, held: InFlightMessage | None) -> None:
        self.held = held
        self.waiting: set[InFlightMessage] = set()
        self._ended = WakeFlag()
        self._is_confirmed = False

    def end(self, is_confirmed: bool) -> None:
        """End the wait, in the consumer thread."""
        self._is_confirmed = is_confirmed
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for so many seconds at most; return whether the broker has confirmed the acks."""
        with contextlib.closing(self._ended):
            return self._ended.wait(timeout_s) and self._is_confirmed


class ConsumerThread:
    """The consumer thread of a process on one server.

    Args:
        identity: The process as a consumer.
        follow_slots: Hands the leases over whose partitions another master of a cluster serves now.
        checks: Called with the monotonic time after every round of renewals.
        node: The master whose partitions it has; None for one server, and for the main thread on a cluster.
    """

    def __init__(
        self,
        identity: ConsumerIdentity,
        follow_slots: Callable[[ConsumerThread], None],
        checks: Sequence[Callable[[float], None]],
        node: NodeAddress | None = None,
    ) -> None:
        self._identity = identity
        self._follow_slots = follow_slots
        self.node = node
        #: Number of changes of the cluster's slots that the thread has followed.
        self._followed = 0
        self.leases = Leases(identity)
        self._members: tuple[ServedChannel, ...] = ()
        #: Held while they change. The lock of the leases may be held while Redis is asked.
        self._members_lock = unpatched("_thread", "allocate_lock")()
        self._checks = checks
        self._connect: Callable[[], redis.Redis] | None = None
        self._client: redis.Redis | None = None
        self._wire: PipelinedConnection | None = None
        self._requests: deque[Callable[[], object]] = deque()
        self._waker = Waker()
        self._poll: Any = None
        self._readers: dict[int, Callable[[], object]] = {}
        #: Whether a member may have opened or closed a connection since the last wait.
        self.sockets_changed = True
        self._trip_at = -math.inf
        #: The keys of the queues with acks in the trip under way, which are not pending any more; or in the
        #: last one, if it was lost.
        self.acks_under_way: set[str] = set()
        #: Monotonic time at which something but an ack is due.
        self._next_at = -math.inf
        self._acks = AckSender(identity, self.leases, self._comes_with_claim, self.refused)
        self._flushes: list[Flush] = []
        #: Whether the last connection was lost, and no trip has succeeded since.
        self._has_lost = False
        #: Whether another thread asks for a turn.
        self._is_woken = False
        #: Whether a message has ended, or there is room for another one, since the turn began.
        self._has_room = False
        #: Whether a member awaits that, or may begin to in this turn.
        self._awaits_room = True
        #: Whether it turns. It ends with its last lease and channel.
        self.is_running = False
        self._exiting = False
        self._thread_id = 0
        #: Held while the thread lives.
        self._alive = unpatched("_thread", "allocate_lock")()
        self._sleep = unpatched("time", "sleep")

    # -- leases, from other threads --------------------------------------------------

    @property
    def queues(self) -> dict[str, Queue]:
        """The queues with a lease, by :attr:`Queue.key`."""
        return self.leases.queues

    def keep_lease(self, queue: Queue, clients: Callable[[], Callable[[], redis.Redis]]) -> None:
        """Keep a lease on a partition from now on; :meth:`drop_lease` must be called as often.

        Args:
            queue: The queue that the caller begins to consume.
            clients: Returns a function that makes a client which outlives the caller's connection.
        """
        with self.leases.lock:
            self._start(clients)
            self.leases.keep(queue)

    def drop_lease(self, queue: Queue, soon: bool = True) -> None:
        """End the caller's use of a lease, which ends with the last message that is in flight.

        Args:
            queue: The queue that the caller has consumed.
            soon: End the lease now if possible; else with the next round, because the caller may consume
                again by then.
        """
        self.leases.drop(queue)
        if soon:
            self.end_leases_soon()

    def end_leases_soon(self) -> None:
        """End the leases that are not used any more."""
        self.leases.may_end = True
        self.wake()

    def renew_now(self) -> None:
        """Begin a round of renewals now, also where one is under way."""
        self.request(self.leases.begin_again)

    def will_release(self, queue: Queue, trip: Trip) -> bool:
        """Return whether the trip, without a claim from a queue, will release messages of it."""
        # A thread sends the acks of its leases only. A claim that waited for others would wait for ever.
        sends = not self._acks.is_refused(queue.key, trip.now) and queue.key in self.leases.queues
        return sends and bool(self._identity.in_flight.pending_acks(queue.key).releases)

    def has_unclaimed_wakeup(self, queues: Sequence[Queue]) -> bool:
        """Return whether a wake-up of these queues waits for a consumer. For this thread only."""
        return self._client is not None and is_wakeup_stored(queues, self._client)

    # -- the masters of a cluster ----------------------------------------------------

    def twin_clients(self) -> Callable[[], redis.Redis]:
        """Return a function that makes clients like those of this thread, which has run before.

        They have pools of their own: a thread that has lost its connection closes all of its pool.
        """
        connect = self._connect
        assert connect is not None
        return lambda: twin_of(connect())

    def take_lease(self, queue: Queue, users: int, clients: Callable[[], Callable[[], redis.Redis]]) -> None:
        """Keep a lease that another thread gives, for its users; see :meth:`keep_lease`."""
        self.leases.take(queue, users)
        with self.leases.lock:
            self._start(clients)

    def follow_slots_soon(self) -> None:
        """Look soon whether another thread is to have a queue of this one."""
        self._followed = -1
        self.wake()

    def _follow(self, slots: SlotMap) -> None:
        if slots.changes != self._followed:
            self._followed = slots.changes
            self._follow_slots(self)
            for member in self._members:
                member.follow_slots()

    # -- members, from other threads -------------------------------------------------

    def attach(self, member: ServedChannel, clients: Callable[[], Callable[[], redis.Redis]]) -> None:
        """Serve a channel from now on."""
        with self.leases.lock:
            self._start(clients)
            self.serve(member)
        self.wake()

    def serve(self, member: ServedChannel) -> None:
        """Serve a channel from now on. For this thread, or under the lock of the leases."""
        with self._members_lock:
            self._members = (*self._members, member)

    def detach(self, member: ServedChannel) -> None:
        """Serve a channel no longer."""
        with self._members_lock:
            self._members = tuple(each for each in self._members if each is not member)
        self.wake()

    def wake(self) -> None:
        """Begin the next turn now; callable from any thread and from signal handlers."""
        self._is_woken = True
        self._waker.wake()

    def has_room(self) -> None:
        """Begin the next turn if a member waits for room; callable from any thread."""
        self._has_room = True
        if self._awaits_room:
            self._waker.wake()

    def _acks_pending(self) -> None:
        self._has_room = True
        # Each thread sends the acks of its own master, but the end of a task makes room for all.
        slots, in_flight = self._identity.slots, self._identity.in_flight
        if self._awaits_room or slots is None or in_flight.has_acks(self.leases.queues):
            self._waker.wake()

    def request(self, action: Callable[[], object]) -> None:
        """Run an action in this thread, between two trips."""
        self._requests.append(action)
        self.wake()

    def begin_between_trips(self, action: Callable[[], None]) -> Callable[[float], bool]:
        """Run an action in this thread, between two trips.

        Returns:
            A function that waits, for so many seconds at most, until the action has ended, and returns
            whether it has.
        """
        if not self.is_running or self._thread_id == unpatched("_thread", "get_ident")():
            action()
            return lambda timeout_s: True
        ended = WakeFlag()

        def run() -> None:
            try:
                action()
            finally:
                ended.set()

        def wait(timeout_s: float) -> bool:
            with contextlib.closing(ended):
                return ended.wait(timeout_s)

        self.request(run)
        return wait

    def run_between_trips(self, action: Callable[[], None], timeout_s: float) -> bool:
        """Run an action in this thread, and wait for its end; return whether it came in time."""
        return self.begin_between_trips(action)(timeout_s)

    def has_acks(self, held: InFlightMessage | None = None) -> bool:
        """Return whether the ack of a message, or any ack, is to be sent by this thread or is under way."""
        # In this order: an ack that is pending is in a trip a moment later.
        if self._pending_messages(held):
            return True
        under_way = self.acks_under_way
        return bool(under_way) if held is None else held.partition in under_way

    def begin_flush(self, held: InFlightMessage | None = None) -> Callable[[float], bool]:
        """Send the acks of this thread's queues that are pending now.

        Args:
            held: The message whose ack is waited for; None for all.

        Returns:
            A function that waits, for so many seconds at most, until the broker has confirmed them, and
            returns whether it has. It waits no longer than the broker is reachable.
        """
        if not self.is_running:
            return lambda timeout_s: not self.has_acks(held)
        flush = Flush(held)
        self.request(partial(self._begin_flush, flush))
        return flush.wait

    def _begin_flush(self, flush: Flush) -> None:
        flush.waiting = self._pending_messages(flush.held)
        if flush.waiting:
            self._flushes.append(flush)
            self._acks.send_soon({held.partition for held in flush.waiting})
        else:
            flush.end(is_confirmed=True)

    def _pending_messages(self, held: InFlightMessage | None) -> set[InFlightMessage]:
        pending, leased = self._identity.in_flight.pending_messages(held), self.leases.queues
        return {each for each in pending if each.partition in leased}

    def _look_at_flushes(self, *, is_lost: bool = False) -> None:
        """End the flushes whose acks are confirmed, or cannot be; the others wait for another trip."""
        flushes, self._flushes = self._flushes, []
        now = self._identity.clock.monotonic()
        for flush in flushes:
            flush.waiting &= self._pending_messages(flush.held)
            keys = {held.partition for held in flush.waiting}
            if not keys or is_lost or all(self._acks.is_refused(key, now) for key in keys):
                flush.end(is_confirmed=not keys)
            else:  # a part of the acks may wait for the answer to another
                self._flushes.append(flush)
                self._acks.send_soon(keys)

    # -- the thread --------------------------------------------------------------

    def _start(self, clients: Callable[[], Callable[[], redis.Redis]]) -> None:
        """Start the thread unless it turns. The lock of the leases is held."""
        if not self.is_running or self._connect is None:
            self._connect = clients()
        if self.is_running:
            self.wake()
            return
        if self._exiting:
            # The thread may wait for the lock of the leases, to end them.
            raise redis.ConnectionError("The process ends, and consumes no more messages")
        # The thread before this one releases the lock when it ends.
        self._alive.acquire()
        try:
            self._waker.fileno()  # opens the sockets, which :meth:`wake` needs
            # The system may have given the id of a former thread to the caller.
            self._thread_id = 0
            self.is_running, self.sockets_changed = True, True
            start_thread(self._run)
        except BaseException:
            # The system allows no more threads or sockets. The next consumer tries again.
            self.is_running = False
            self._alive.release()
            raise
        self._identity.in_flight.add_listener(self._acks_pending)
        atexit.register(self._end_at_exit)

    def _should_end(self) -> bool:
        with self.leases.lock:
            self.is_running = (
                bool(self.leases.queues or self._members or self._requests) and not self._exiting
            )
            return not self.is_running

    def _run(self) -> None:
        self._thread_id = unpatched("_thread", "get_ident")()
        clock = self._identity.clock
        while not self._should_end():
            try:
                self._turn()
            except (redis.RedisError, OSError) as exc:  # noqa: PERF203 - the next turn follows
                self._lost(exc)
            except Exception as exc:
                self._look_at_flushes(is_lost=True)
                if self._exiting:
                    break  # the end of the leases tries once more, and reports
                # When this thread ends, other workers get all messages of this process.
                logger.exception(
                    "The heartbeat of worker %s goes on after an error.",
                    self._identity.consumer,
                    extra={"event": "heartbeat_failed"},
                )
                self._fail_members(exc)
                self.leases.round_at = max(
                    self.leases.round_at, clock.monotonic() + self._identity.lease_s / RENEWALS_PER_LEASE / 4
                )
        self._identity.in_flight.remove_listener(self._acks_pending)
        self.acks_under_way = set()
        self._look_at_flushes(is_lost=True)
        try:
            if self._exiting and self.queues:
                self._end_leases()
            self._disconnect()
            self._waker.close()
            leave_green_hub()
        finally:
            # Until here the exit of the process waits for this thread.
            atexit.unregister(self._end_at_exit)
            self._alive.release()

    def _turn(self) -> None:
        identity, leases = self._identity, self.leases
        self._is_woken, self._has_room, self._awaits_room = False, False, True
        while self._requests:
            self._requests.popleft()()
        if identity.slots is not None:
            self._follow(identity.slots)
        now = identity.clock.monotonic()
        if self.node is not None and self._has_lost and now < leases.round_at:
            # What others ask for makes no trip come sooner: a master that hangs would delay the next request.
            self._look_at_flushes(is_lost=True)
            self._wait_for_retry(leases.round_at - now)
            return
        trip = Trip(now, identity.refusals)
        self.acks_under_way = trip.acked
        if leases.due_at <= now:
            self._renew(trip)
        # A master that has failed gets no claims before it answers: they would take up the capacity.
        if self.node is None or not (self._has_lost and trip.calls):
            for member in self._members:
                if member.has_queues:
                    member.plan(trip)
        self._acks.plan(trip)
        if trip.calls:
            self._trip_at = now
            if self._wire is None:
                self._wire = PipelinedConnection(self.pool)
            connects = self._wire.connects
            error = trip.run(self._wire)
            if self._wire.connects != connects:
                self.sockets_changed = True
                # The server may have been restarted and have lost acks that it had confirmed.
                leases.compare_all()
            if error is not None:
                raise error
            self._has_lost = False
            now = identity.clock.monotonic()
        self.acks_under_way = set()
        if leases.in_round and leases.end_round(now):
            self._after_round(now)
        elif leases.may_end:
            self._resign()
        if self._flushes:
            self._look_at_flushes()
        next_at, awaits_room = leases.due_at, False
        for member in self._members:
            next_at = min(next_at, member.wait(now))
            awaits_room = awaits_room or member.awaits_room
        # Changed only now: until here, whatever makes room ends the wait that follows.
        self._next_at, self._awaits_room = next_at, awaits_room
        if not (self._requests or self._flushes):
            self._wait(identity.clock.monotonic())

    def _renew(self, trip: Trip) -> None:
        identity, leases = self._identity, self.leases
        if leases.may_end or trip.now >= leases.round_at:
            self._resign()
        if leases.plan(trip) and any(queue.token for queue in leases.queues.values()):
            # A leader itself waits until a retry is due; elsewhere Redis compares the times.
            with identity.refusals.watch("time"):
                identity.server_clock.ask(self._open_client())

    def _resign(self) -> None:
        self.leases.may_end = False
        with self._identity.refusals.watch("resign"):
            self.leases.resign(self._open_client())

    def _after_round(self, now: float) -> None:
        with self._identity.refusals.watch("comparison"):
            self.leases.compare(self._open_client())
        self._resign()
        for member in self._members:
            member.after_round(now)
        for check in tuple(self._checks):
            check(now)

    # -- acks --------------------------------------------------------------------

    def _comes_with_claim(self, queue: Queue, box: PendingAcks) -> bool:
        for member in self._members:  # noqa: SIM110 - a generator costs a call for each
            if member.has_queues and member.may_wait_for_claim(queue, box):
                return True
        return False

    def send_acks_soon(self, key: str) -> None:
        """Let the acks of a queue wait no longer; for this thread only."""
        self._acks.send_soon((key,))

    def refused(self, script: str, queue: Queue, exc: Exception) -> float:
        """Handle an error in the place of an answer; return the seconds until the next attempt.

        The connection stays open, and the worker serves its other queues.

        Raises:
            redis.RedisError: The server is in a failover; another connection may find the new master.
        """
        if isinstance(exc, PASSING_ERRORS) or not isinstance(exc, redis.ResponseError):
            raise exc
        self._identity.refusals.refused(script, exc, queue.partition_name)
        return RETRY_AFTER_REFUSAL_S

    # -- waiting -----------------------------------------------------------------

    def _wait(self, now: float) -> None:
        """Wait until something comes, is due, or another thread wakes this one."""
        # The threads of several masters share the capacity: each has as many messages in a trip as one thread
        # would, if its trips are rarer.
        most = 1 if self._identity.slots is None else CLUSTER_PACES
        paces = min(len(self._identity.in_flight) // FED, most)
        if paces and (left_s := self._trip_at + paces * PACE_S - now) > 0 and not self._exiting:
            self._sleep(left_s)
        if self.sockets_changed:
            self._watch()
        identity, next_at = self._identity, min(self._next_at, now + MAX_WAIT_S)
        needs_turn = False
        while not needs_turn:
            until = min(next_at, self._acks.next_time()) if identity.in_flight.with_acks else next_at
            timeout_s = max(until - identity.clock.monotonic(), 0.0)
            # A millisecond is the unit: rounded up, because a wait that ends early would be repeated at once.
            ready = self._poll.poll(math.ceil(timeout_s * 1000))
            needs_turn = not ready  # else an ack may have come that can wait
            for fd, _ in ready:
                reader = self._readers.get(fd)
                if reader is None:
                    self._waker.clear()
                else:
                    needs_turn = True
                    reader()
            needs_turn = needs_turn or self._is_woken or (self._awaits_room and self._has_room)

    def _watch(self) -> None:
        """Watch the present sockets, and no other ones."""
        self.sockets_changed = False
        self._poll = unpatched("select", "poll")()
        self._poll.register(self._waker.fileno(), unpatched("select", "POLLIN"))
        self._readers = {}
        for member in self._members:
            for connection, reader in member.sockets():
                self._watch_one(connection, partial(self._read, member, reader))
        if self._wire is not None:
            # Between two trips nothing comes but the end of the connection. A claim that is sent over a
            # connection that was lost would be in doubt.
            self._watch_one(self._wire.watched, self._check_wire)

    def _watch_one(self, connection: Any, reader: Callable[[], object]) -> None:
        sock = None if connection is None else socket_of(connection)
        if sock is not None and sock.fileno() >= 0:
            self._readers[sock.fileno()] = reader
            self._poll.register(sock.fileno(), unpatched("select", "POLLIN"))

    def _check_wire(self) -> None:
        wire, self.sockets_changed = self._wire, True
        if wire is not None:
            try:
                if not wire.has_answer():
                    return  # TLS has sent something for itself
            except (redis.RedisError, OSError) as exc:
                # Redis closes connections that are idle for longer than its setting `timeout`.
                logger.debug("An idle connection was closed: %s.", exc)
            wire.close()

    def _read(self, member: ServedChannel, reader: Callable[[], object]) -> None:
        try:
            reader()
        except (redis.RedisError, OSError) as exc:
            if self.node is not None:
                raise
            # The connection of one wait is broken; the leases may be well.
            self.detach(member)
            self.sockets_changed = True
            member.fail(exc)

    # -- connections -------------------------------------------------------------

    def _open_client(self) -> redis.Redis:
        if self._client is None:
            assert self._connect is not None
            self._client = self._connect()
            self.leases.compare_all()
        return self._client

    @property
    def pool(self) -> redis.ConnectionPool:
        """The pool of all connections of this thread."""
        return self._open_client().connection_pool

    def new_client(self) -> redis.Redis:
        """Return the client of this thread."""
        return self._open_client()

    def _lost(self, exc: Exception) -> None:
        """Handle a lost connection: the leases are renewed over the next one.

        The channels end. On a cluster they go on without the partitions of this master.
        """
        if self._exiting:
            return
        self._has_lost = True
        if self.node is None:
            self._fail_members(exc)
        self._disconnect()
        for member in self._members:
            member.begin_again()
        now = self._identity.clock.monotonic()
        self.leases.fail_round(now, exc)
        self.leases.abandon_unreachable(now)
        self._look_at_flushes(is_lost=True)
        left_s = self.leases.round_at - self._identity.clock.monotonic()
        self._waker.clear()
        if left_s > 0 and not self._requests:
            self._wait_for_retry(left_s)

    def _wait_for_retry(self, left_s: float) -> None:
        self._watch()
        self._poll.poll(math.ceil(left_s * 1000))
        self._waker.clear()

    def _fail_members(self, exc: Exception) -> None:
        with self._members_lock:
            members, self._members = self._members, ()
        self.sockets_changed = True
        for member in members:
            member.fail(exc)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        wire, self._wire = self._wire, None
        self.sockets_changed = True
        if client is not None:
            try:
                # The next client may have the same pool, which counts what it has lent.
                if wire is not None:
                    wire.close()
                client.connection_pool.disconnect()
            except (redis.RedisError, OSError) as exc:
                logger.debug("Closing the connections of the consumer thread failed: %s.", exc)

    # -- the end -----------------------------------------------------------------

    def exit_soon(self) -> None:
        """End the thread after its trip, because the process ends."""
        self._exiting = True
        self.wake()

    def _end_at_exit(self) -> None:
        """Wait until the thread has sent the pending acks and ended the leases, at interpreter exit."""
        identity = self._identity
        if self._connect is None or not identity.owner.is_current:
            return
        # A thread that is alive when the interpreter ends is killed wherever it waits. Inside a greenlet
        # that is a crash of the process, with its exit status.
        if not self._alive.acquire(True, identity.threads.begin_exit()):
            logger.warning(
                "Worker %s exits while its heartbeat waits for Redis: tasks that ended last may run again.",
                identity.consumer,
                extra={"event": "exit_without_answer"},
            )

    def _end_leases(self) -> None:
        """Send the pending acks and end the leases, because the process ends."""
        identity = self._identity
        try:
            client = self._open_client()
            # Nothing runs any more: messages of a claim without an answer are released with the lease.
            self.leases.is_last = True
            for queue in list(self.queues.values()):
                with self.leases.each_by_itself(queue, "ack"):
                    while identity.in_flight.pending_acks(queue.key):
                        identity.in_flight.send_acks(identity.consumer, queue, client)
            self.leases.resign(client)
        except (redis.RedisError, OSError, RuntimeError) as exc:
            # Python 3.12 starts no thread at exit, and gevent resolves names in threads.
            logger.warning(
                "Worker %s could not reach Redis at its exit (%s): its last acknowledgements are lost, and "
                "tasks that ended last may run again when its lease has expired.",
                identity.consumer,
                text_of(exc),
                extra={"event": "acks_lost_at_exit"},
            )
