"""The leases of a process on the partitions that it consumes, and what a heartbeat of each brings.

The heartbeat is a call in a trip. A *round* renews all leases, some in each trip, :data:`RENEWALS_PER_LEASE`
times in a lease. A lease ends when no consumer uses it and no message of it is in flight.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import redis

from celery_dq.native import unpatched
from celery_dq.shown import shell_word, shown_ids, shown_logger
from celery_dq.transport.in_flight.in_flight_messages import TRUSTED_SHARE
from celery_dq.transport.partition_replies import HeartbeatReply, Reaped
from celery_dq.transport.redis.consuming.trip import Trip
from celery_dq.transport.redis.store.queue import Queue, process_of
from celery_dq.transport.redis.store.script_calls import (
    chunks,
    result_of,
    run_together,
    share,
)
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS, recognised_error
from celery_dq.transport.redis.store.whole_queue import held_counts

if TYPE_CHECKING:
    from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity

logger = shown_logger(__name__)

#: Renewals per lease. When two in a row get no answer, the third is still in time; with a lease below two
#: seconds only one may get none.
RENEWALS_PER_LEASE = 4
#: Shortest time in seconds between rounds, even if a lease expires sooner.
MIN_WAIT_S = 0.05
#: Leases after which a broker that does not answer and has no consumer left is forgotten.
ABANDON_AFTER_LEASES = 8
#: Most messages of each kind (of lost consumers, due ones) that one round trip moves, or few per queue.
CHUNK = 200


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
                limit=share(CHUNK, len(names)),
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
        self.round_at = now + min(self._interval_s, max(self._next_end_s, MIN_WAIT_S))
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
                    consumer, limit = self._identity.consumer, share(CHUNK, len(left))
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
