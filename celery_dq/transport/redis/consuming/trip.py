"""One trip to a server: the calls that one write sends, and their answers.

A trip carries the claims of the queues whose turn it is, each with the acks of its partition; the acks of
other partitions that are due; renewals of leases, and hand-overs of wake-ups. The next trip begins when all
answers are there. So no answer overtakes another one, and only the calls of a lost trip are in doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis

from celery_dq.transport.redis.store.pipelined_connection import PipelinedConnection
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.script_calls import ScriptCall, is_lost, run_on
from celery_dq.transport.redis.store.server_errors import RefusalLog

#: Seconds until a command is sent again that Redis has refused.
RETRY_AFTER_REFUSAL_S = 1.0
#: Most calls of one trip, for any purpose, so that its answers do not come late.
MAX_CALLS = 100


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
        room: How many calls it may still carry.
    """

    now: float
    refusals: RefusalLog
    calls: list[TripCall] = field(default_factory=list)
    claims: set[str] = field(default_factory=set)
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
                else:
                    if self.refusals.reasons:
                        self._accepted(each)
                    each.answered(each.call.parse(answer))
            except Exception as exc:  # noqa: PERF203 - each by itself
                broken = broken or exc
        return broken

    def _accepted(self, each: TripCall) -> None:
        # An ack that was refused may travel with a claim now, and a hand-over is not sent again.
        names = ("claim", "ack", "hand_over_wakeup") if each.call.script.name == "claim" else ()
        for name in names or (each.call.script.name,):
            self.refusals.accepted(name, each.queue.partition_name)
