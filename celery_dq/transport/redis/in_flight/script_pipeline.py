"""The script pipeline: sends claims and pending acks on one connection without waiting for the answers.

Answers come in the order in which the scripts were sent. When a script gets no answer, its acks become
pending again; an ack that is sent twice is harmless.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import redis
from redis.exceptions import NoScriptError

from celery_dq.transport.in_flight.pending_acks import Acks, PendingAcks, ack_calls
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.pipelined_connection import OVERDUE_S, PipelinedConnection
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.script_calls import ScriptCall
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS

#: Seconds until a script that Redis has refused is sent again.
RETRY_AFTER_REFUSAL_S = 1.0
#: Seconds until a script is sent again to a node that has failed, or to a slot that moves.
RETRY_UNAVAILABLE_S = 0.1


class ClaimFailure(enum.Enum):
    """The reason why a claim has no result. The value is the number of seconds until the next claim."""

    #: The heartbeat thread has waited too long for the answer, and releases the messages.
    DISOWNED = 0.0
    #: Redis refused the script.
    REFUSED = RETRY_AFTER_REFUSAL_S
    #: The node of a cluster did not answer, or its slot moves to another node.
    UNAVAILABLE = RETRY_UNAVAILABLE_S


@dataclass(eq=False, slots=True)
class InFlightCall:
    """A script that was sent and is not answered yet.

    Attributes:
        call: the script with its arguments.
        queue: the queue whose partition it changes.
        sent_at: monotonic time.
        on_claimed: for a claim, called with its result, or with the :class:`ClaimFailure` for which there
            is none.
        acks: the acks that it carries.
        unresolved: one element, popped by the thread that takes care of the claimed messages: the event
            loop's with the answer, or the heartbeat's after too long a wait. Both may pop at the same time,
            and popping is atomic.
        handovers: above 0 for the hand-over of a wake-up: how often it is still to be sent. Each next one is
            sent after the answer to the one before.
    """

    call: ScriptCall[Any]
    queue: Queue
    sent_at: float
    on_claimed: Callable[[Any], None] | None = None
    acks: Acks = field(default_factory=Acks)
    unresolved: list[None] = field(default_factory=lambda: [None])
    handovers: int = 0

    @property
    def carries_acks(self) -> bool:
        """Whether it carries acks, which the broker must have before the lease ends."""
        return bool(self.acks)

    def resolve_once(self) -> bool:
        """Return whether the calling thread takes care of the claimed messages; True for one thread only."""
        try:
            self.unresolved.pop()
        except IndexError:
            return False
        return True


class ScriptPipeline:
    """The script pipeline of one channel.

    Args:
        process: the consumer.
        pool: the pool of the connection.
        may_wait_for_claim: returns whether the finishes of a queue wait for the next claim, which can carry
            them; called with the queue, its acks and the monotonic time.
    """

    def __init__(
        self,
        process: ConsumerIdentity,
        pool: redis.ConnectionPool,
        may_wait_for_claim: Callable[[Queue, PendingAcks, float], bool],
    ) -> None:
        self._process = process
        self._may_wait_for_claim = may_wait_for_claim
        self.connection = PipelinedConnection(pool)
        self._under_way: deque[InFlightCall] = deque()
        #: Monotonic time until which no acks are sent, after a refusal.
        self.paused_until = 0.0

    def __len__(self) -> int:
        """Return the number of scripts without an answer."""
        return len(self._under_way)

    def check_alive(self, now: float) -> None:
        """Check that Redis answers in time.

        Args:
            now: monotonic time.

        Raises:
            redis.ConnectionError: the oldest answer is overdue.
        """
        silent_s = now - self._under_way[0].sent_at if self._under_way else 0.0
        # An unread answer means that this process was busy, not that the connection is dead.
        if silent_s > OVERDUE_S and not self.connection.has_unread_input():
            raise redis.ConnectionError(
                f"Redis has not answered a script for {silent_s:.0f} s: the connection is dead"
            )

    def send(self, sent: InFlightCall) -> None:
        """Send a script.

        Raises:
            redis.RedisError: the connection broke; :meth:`close` makes its acks pending again.
        """
        if sent.on_claimed is not None:
            self._process.in_doubt.claim_sent(sent.queue.key)
        if sent.carries_acks:
            self._process.in_doubt.count_acks_under_way(sent.queue.key, +1)
        self._under_way.append(sent)
        self._write(sent)

    def _write(self, sent: InFlightCall) -> None:
        self.connection.open()
        self.connection.send(sent.call.command())

    @property
    def together(self) -> AbstractContextManager[None]:
        """A context that sends the scripts of its block at the end."""
        return self.connection.together

    def connections(self) -> list[tuple[Any, Callable[[], None]]]:
        """Return the open redis-py connections, and for each the function that reads its answers."""
        return [] if self.connection.connection is None else [(self.connection.connection, self.read)]

    def resumes_at(self, queue: Queue) -> float:
        """Return the monotonic time until which no acks of *queue* are sent, after a refusal.

        It is infinity while acks of a singleton queue have no answer: a turn of the loop follows that one.
        """
        if queue.token and self._process.in_doubt.acks_under_way(queue.key):
            return math.inf
        return self.paused_until

    def has_claim_under_way(self, queue: Queue) -> bool:
        """Return whether a claim from *queue* has no answer yet."""
        return any(sent.on_claimed is not None and sent.queue.key == queue.key for sent in self._under_way)

    def has_end_under_way(self, queue: Queue) -> bool:
        """Return whether a call that ends a message of *queue* has no answer yet."""
        return any(
            (sent.acks.finishes or sent.acks.dead_letters) and sent.queue.key == queue.key
            for sent in self._under_way
        )

    def ask(self, command: tuple[Any, ...]) -> None:
        """Read all outstanding answers, send another command, and wait for its answer, too.

        Raises:
            redis.RedisError: The connection broke, or an answer is an error.
        """
        self.read_all_answers()
        self.connection.open()
        self.connection.ask(command)

    def hands_over_wakeup(self) -> bool:
        """Return whether the hand-over of a wake-up has no answer yet."""
        return any(sent.handovers for sent in self._under_way)

    def hand_over_wakeup(self, queue: Queue, now: float, times: int = 1) -> None:
        """Hand the next wake-up of *queue* over to another consumer, and give up the planned look there.

        Args:
            queue: the queue.
            now: monotonic time.
            times: 2 when this process has just stopped to wait for wake-ups. The broker may send one to the
                closed connection; with the first answer it has noticed the end of the connection.
        """
        call = queue.partition.hand_over_wakeup(queue.consumer(self._process.consumer))
        self.send(InFlightCall(call, queue, now, handovers=times))

    def send_pending_acks(self, now: float, urgent: str = "") -> None:
        """Send the pending acks.

        Args:
            now: monotonic time.
            urgent: the :attr:`Queue.key` whose finishes do not wait for a claim.

        Raises:
            redis.RedisError: the connection broke.
        """
        process = self._process
        waiting = process.queues_with_acks()
        if not waiting:
            return
        is_settling = self._is_settling()
        for queue, box in waiting:
            if now < self.resumes_at(queue):
                continue
            name = queue.key
            urgently = box.releases or box.dead_letters or self._is_settle_due(box, now, is_settling)
            if not urgently and (
                not box.finishes or (name != urgent and self._may_wait_for_claim(queue, box, now))
            ):
                continue
            with process.in_doubt.taking_acks(name):
                if not self.may_take_acks(queue):
                    continue
                calls = ack_calls(box, process.consumer, queue)
                while queue.token and len(calls) > 1:  # each waits for the answer to the one before
                    process.in_flight.restore_acks(name, calls.pop()[1])
                batch = deque(
                    InFlightCall(cast("ScriptCall[Any]", call), queue, now, acks=acks) for call, acks in calls
                )
                try:
                    while batch:
                        self.send(batch.popleft())
                finally:
                    # After a broken connection, close() restores the unsent calls with those that were sent.
                    for sent in batch:
                        process.in_doubt.count_acks_under_way(name, +1)
                        self._under_way.append(sent)

    @staticmethod
    def _is_settle_due(box: PendingAcks, now: float, is_settling: bool) -> bool:
        """Return whether to send the settles of a partition now.

        A settle is sent when it has waited long enough for the finish of its message; in most pools it does
        not wait. The finish itself, if it is there by then, must not wait longer either. While another settle
        has no answer yet, of any partition, this one waits for that answer and is sent with all others: a
        worker of short tasks settles one message after the other, and a call for each would be its greatest
        cost. Finishes travel with every settle.
        """
        due_at = None if is_settling or not box.settles else box.settle_due_at()
        return due_at is not None and due_at <= now

    def _is_settling(self) -> bool:
        """Return whether a settle has no answer yet."""
        for sent in self._under_way:  # noqa: SIM110 - each turn of the loop asks, and a generator costs more
            if sent.acks.settles:
                return True
        return False

    def may_take_acks(self, queue: Queue) -> bool:
        """Return whether the acks of *queue* may be taken, inside of ``InDoubtClaims.taking_acks``.

        Those of a singleton queue may not before the answer to earlier ones. These may be on another
        connection, or Redis may have forgotten their script, so that they are sent again. If only the later
        ones arrived before the process died, a message would run again after its successor.
        """
        return not queue.token or self._process.in_doubt.acks_under_way(queue.key) == 1

    def settle_times(self, waiting: list[tuple[Queue, PendingAcks]]) -> list[float]:
        """Return the monotonic times at which settles have waited long enough for their finishes.

        Args:
            waiting: the queues with pending acks.
        """
        if not waiting or self._is_settling():
            return []  # the answer to a settle under way, which others wait for, is followed by a tick
        times = []
        for queue, box in waiting:
            due_at = box.settle_due_at() if box.settles else None
            if due_at:
                times.append(max(due_at, self.resumes_at(queue)))
        return times

    def disown_claims(self, sent_before: float) -> None:
        """Wait no longer for claims that were sent before a monotonic time. The heartbeat thread calls this.

        The event loop is blocked or does not run, and other workers may have time for the claimed messages.
        """
        for sent in tuple(self._under_way):
            # A singleton queue has no other consumer, and its messages keep their order.
            waits = sent.on_claimed is not None and not sent.queue.token
            if waits and sent.sent_at < sent_before and sent.resolve_once():
                self._process.in_doubt.claim_unanswered(sent.queue.key)

    def read_all_answers(self) -> None:
        """Read all outstanding answers, blocking, because no event loop runs that would read them.

        Raises:
            redis.RedisError: the connection broke.
        """
        while self._under_way:
            self._read_one()

    def read(self) -> None:
        """Read the answers that have arrived; called when the socket is readable.

        Raises:
            redis.RedisError: the connection broke, or the server is in a failover.
        """
        self._read_one()
        while self._under_way and self.connection.has_answer():
            self._read_one()

    def _read_one(self) -> None:
        try:
            answer = self.connection.read()
        except redis.ConnectionError:
            if self._under_way:
                raise
            # Redis closes idle connections after its setting `timeout`. The next script opens another one.
            self.connection.close()
            return
        except NoScriptError:
            # The server's scripts were flushed: send the script again, with its source.
            sent = self._under_way.popleft()
            self._under_way.append(sent)
            self.connection.send(sent.call.command(full=True))
            return
        except redis.ResponseError as exc:
            sent = self._under_way.popleft()
            self._restore_acks(sent)
            if isinstance(exc, PASSING_ERRORS):
                raise
            self._refused(sent, exc)
            return
        self._receive(self._under_way.popleft(), answer)

    def _receive(self, sent: InFlightCall, answer: Any) -> None:
        """Handle the answer to a script."""
        acks, process = sent.acks, self._process
        acks.confirm()
        if sent.carries_acks:
            process.in_doubt.count_acks_under_way(sent.queue.key, -1)
        if process.refusals.reasons:
            process.refusals.accepted(sent.call.script.name, sent.queue.partition_name)
        result = sent.call.parse(answer)
        if sent.on_claimed is not None:
            process.claim_times[sent.queue.name].add(process.clock.monotonic() - sent.sent_at)
            self._answered(sent, result)
            return
        if sent.handovers:
            if sent.handovers > 1:
                self.hand_over_wakeup(sent.queue, process.clock.monotonic(), sent.handovers - 1)
            return
        if not acks.dead_letters:
            process.in_flight.stale += result
        process.in_flight.confirm_releases(sent.queue.key, len(acks.releases))

    def _answered(self, sent: InFlightCall, result: Any) -> None:
        in_doubt, key = self._process.in_doubt, sent.queue.key
        assert sent.on_claimed is not None
        if not sent.resolve_once():
            sent.on_claimed(ClaimFailure.DISOWNED)
            return
        try:
            sent.on_claimed(result)
        except BaseException:
            # The heartbeat thread releases the messages that were not recorded as in flight.
            in_doubt.claim_unanswered(key)
            raise
        in_doubt.claim_answered(key, {entry.claim for entry in result.entries})

    def _refused(self, sent: InFlightCall, exc: redis.ResponseError) -> None:
        """Handle an error of the script, e.g. of a full server, or a key that belongs to another program.

        The connection stays open, and the worker serves its other queues. The script is sent again later.
        """
        self._process.refusals.refused(sent.call.script.name, exc, sent.queue.partition_name)
        if sent.on_claimed is not None:
            sent.on_claimed(ClaimFailure.REFUSED)
        else:
            self.paused_until = self._process.clock.monotonic() + RETRY_AFTER_REFUSAL_S

    def _restore_acks(self, sent: InFlightCall) -> None:
        in_flight, in_doubt, key = self._process.in_flight, self._process.in_doubt, sent.queue.key
        # First: acks that are neither pending nor under way are taken for confirmed.
        in_flight.restore_acks(key, sent.acks)
        if sent.carries_acks:
            in_doubt.count_acks_under_way(key, -1, answered=False)
        if sent.on_claimed is not None and sent.resolve_once():
            # The claim may have taken messages.
            in_doubt.claim_unanswered(key)

    def close(self) -> None:
        """Close the connection; acks without an answer become pending again."""
        while self._under_way:
            self._restore_acks(self._under_way.popleft())
        self.connection.close()
        self._process.heartbeat.compare_all()
