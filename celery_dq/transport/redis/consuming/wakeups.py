"""Waits for a *wake-up* of any queue that a channel consumes.

One ``BLPOP`` names the wake-up lists of a group of queues, on a connection of its own. So a wake-up costs
the next wait of one group, however many queues the channel consumes. Up to :data:`GROUP_SIZE` queues are one
group.

A group waits while no queue of it may have work. While some may, the group *asks* for wake-ups of its other
queues now and then, by a script that does not wait: a backlog in one queue must not hide the messages of
another. For the same reason, the queue that was served is the last one in the next ``BLPOP``.

When Redis refuses a wait or a question, e.g. because it cannot save, the group tries again a second later.

Other consumers rely on the consumer that took the wake-up of a queue, or keeps its next look. Without a free
slot, before a long callback, and when it stops to consume, it hands them over by a script.

Before a long callback, the channel *ends* its waits: each ``BLPOP`` names one more list, which gets an
element. So each is answered, and the channel knows which wake-ups it has taken.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator

import redis

from celery_dq.keys import wait_end
from celery_dq.transport.redis.consuming.subscriptions import ReadyQueues, Subscription, WaitGroup
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.in_flight.script_pipeline import RETRY_AFTER_REFUSAL_S, ScriptPipeline
from celery_dq.transport.redis.store.full_server import POP_FIRST, PUSH_EACH_FOR
from celery_dq.transport.redis.store.pipelined_connection import (
    BLPOP_TIMEOUT_S,
    OVERDUE_S,
    PipelinedConnection,
)
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS

#: The command of a group, in logs.
_WAIT = "wait for wake-ups"
#: Queues of a group. More make each wait longer to send, and fewer make more connections.
GROUP_SIZE = 100
#: Maximum number of groups. With more queues, the groups are larger.
MAX_GROUPS = 30
#: Seconds from one question of a group to its next, and to the next question of any group.
ASK_EVERY_S, ASK_SPACING_S = 0.1, 0.03
#: Milliseconds after which the end of a wait is forgotten that has found its wait already over. Until then,
#: it ends a wait that reaches the server after it.
END_LIFE_MS = round((BLPOP_TIMEOUT_S + OVERDUE_S) * 1000)


class WakeupListener(WaitGroup):
    """A group of queues whose wake-ups one connection receives.

    Args:
        pool: Pool that the connection is taken from.
        end_key: Key of the list that ends a wait.
    """

    def __init__(self, pool: redis.ConnectionPool, end_key: bytes = b"") -> None:
        self.connection = PipelinedConnection(pool)
        self.end_key = end_key
        #: Monotonic start of the current wait or question; None without one.
        self.waiting_since: float | None = None
        #: Whether it is a question, which is answered at once.
        self.is_asking = False
        #: The queues, by the keys of their wake-up lists.
        self.members: dict[bytes, Subscription] = {}
        self._asked_at = -math.inf
        #: Monotonic time until which no wait begins, after a refusal.
        self.resumes_at = -math.inf

    @property
    def is_waiting(self) -> bool:
        """Whether a wait or a question is under way, so that this channel may receive a wake-up."""
        return self.waiting_since is not None

    def start_wait(self, now: float) -> None:
        """Start to wait for a wake-up of any member.

        Args:
            now: Monotonic time.

        Raises:
            redis.RedisError: The connection broke.
        """
        self.connection.open()
        self.connection.send(("BLPOP", *self.members, self.end_key, BLPOP_TIMEOUT_S))
        self.is_asking, self.waiting_since = False, now

    def ask(self, now: float) -> None:
        """Ask for a wake-up of any member that has no work.

        Args:
            now: Monotonic time.

        Raises:
            redis.RedisError: The connection broke.
        """
        self.connection.open()
        # An idle Redis ends a short BLPOP up to 0.1 s late, and a full one refuses it in a transaction, in
        # which it would not wait.
        keys = [key for key, each in self.members.items() if not each.may_have_work]
        self.connection.send(("EVAL", POP_FIRST, len(keys), *keys))
        self.is_asking, self.waiting_since, self._asked_at = True, now, now

    @property
    def asks_at(self) -> float:
        """Monotonic time from which the group asks again; infinity if each member has work."""
        return self._asked_at + ASK_EVERY_S if self.busy < len(self.members) else math.inf

    def check_alive(self, now: float) -> None:
        """Check that Redis answers the wait in time.

        Args:
            now: Monotonic time.

        Raises:
            redis.ConnectionError: The answer is overdue.
        """
        silent_s = 0.0 if self.waiting_since is None else now - self.waiting_since
        # An unread answer means that this process was busy, not that the connection is dead.
        if silent_s > BLPOP_TIMEOUT_S + OVERDUE_S and not self.connection.has_unread_input():
            raise redis.ConnectionError(
                f"Redis has not answered a BLPOP for {silent_s:.0f} s: the connection is dead"
            )

    def read_wakeups(self) -> list[Subscription]:
        """Read the answer of the wait.

        Returns:
            The queue whose wake-up has come; none after a wait without a wake-up.

        Raises:
            redis.RedisError: The connection broke in a wait, or the answer is an error.
        """
        try:
            answer = self.connection.read()
        except redis.ConnectionError:
            if self.is_waiting:
                raise
            self.connection.close()  # it was idle for longer than the setting `timeout` of Redis
            return []
        except redis.ResponseError:
            self.waiting_since = None
            raise
        self.waiting_since = None
        if answer is None:
            return []
        key = answer[0].encode() if isinstance(answer[0], str) else bytes(answer[0])
        source = self.members.pop(key, None)
        if source is not None:
            self.members[key] = source
        return [] if source is None else [source]

    def cancel_wait(self) -> bool:
        """Cancel the wait. A wake-up that Redis has already sent is lost then.

        Returns:
            Whether a wait was under way.
        """
        waited = self.is_waiting
        if waited:
            self.close()
        return waited

    def close(self) -> None:
        """Close the connection."""
        self.waiting_since = None
        self.connection.close()


class WakeupGroups:
    """All waits of one channel.

    Args:
        pool: Pool that the connections are taken from.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self.groups: list[WakeupListener] = []
        #: Monotonic time of the next question; infinity without one.
        self.asks_at = math.inf
        self._asked_at = -math.inf

    def __iter__(self) -> Iterator[WakeupListener]:
        return iter(self.groups)

    @property
    def is_waiting(self) -> bool:
        """Whether each group waits."""
        return bool(self.groups) and all(each.is_waiting and not each.is_asking for each in self.groups)

    @property
    def needs_capacity(self) -> bool:
        """Whether the free capacity decides on something: a wait or a question may begin."""
        return any(
            each.is_asking or (each.waiting_since is None and each.busy < len(each.members))
            for each in self.groups
        )

    def join(self, source: Subscription) -> WakeupListener:
        """Add a queue to the smallest group, or to a new one."""
        # The pool has other connections, too, and its user may have limited them.
        most = max(min(MAX_GROUPS, getattr(self._pool, "max_connections", MAX_GROUPS) // 2), 1)
        group = min(self.groups, key=lambda each: len(each.members), default=None)
        if group is None or (len(group.members) >= GROUP_SIZE and len(self.groups) < most):
            keys = source.queue.partition.keys
            end_key = wait_end(keys.environment, uuid.uuid4().hex, keys.key_prefix)
            group = WakeupListener(self._pool, end_key.encode())
            self.groups.append(group)
        group.members[source.queue.partition.keys.wake.encode()] = source
        source.waits = group
        return group

    def group_of(self, source: Subscription) -> WakeupListener:
        """Return the group of a queue that has joined one."""
        return next(group for group in self.groups if group is source.waits)

    def leave(self, source: Subscription) -> None:
        """Remove a queue from its group."""
        group, source.waits = self.group_of(source), None
        del group.members[source.queue.partition.keys.wake.encode()]
        if source.may_have_work:
            group.busy -= 1
        if not group.members:
            self.groups.remove(group)
            group.close()

    def wait(self, now: float, *, may_wait: bool, in_loop: bool) -> None:
        """Start the waits of the groups without work, and the questions of the others.

        Args:
            now: Monotonic time.
            may_wait: Whether the channel could take a message now.
            in_loop: Whether messages run in the event loop. Each would end all waits, so there are none
                before all groups have no work.

        Raises:
            redis.RedisError: A connection broke, or an answer is overdue.
        """
        self.asks_at = resumes_at = math.inf
        works = in_loop and any(group.busy for group in self.groups)
        for group in self.groups:
            if group.waiting_since is not None:
                group.check_alive(now)
            elif not may_wait:
                continue
            elif now < group.resumes_at:
                resumes_at = min(resumes_at, group.resumes_at)
            elif not (group.busy or works):
                group.start_wait(now)
            else:
                self.asks_at = min(self.asks_at, group.asks_at)
        if self.asks_at != math.inf:
            self._ask(now)
        self.asks_at = min(self.asks_at, resumes_at)

    def _ask(self, now: float) -> None:
        """Let the group ask that has not asked for the longest time, if that is due."""
        if max(self.asks_at, self._asked_at + ASK_SPACING_S) <= now:
            waiting = (each for each in self.groups if not (each.is_waiting or now < each.resumes_at))
            min(waiting, key=lambda each: each.asks_at).ask(now)
            self._asked_at = now
        self.asks_at = max(self.asks_at, self._asked_at + ASK_SPACING_S)

    def close(self) -> None:
        """Close all connections."""
        self.asks_at = math.inf
        for group in self.groups:
            group.close()


class Handovers:
    """The wake-ups of one channel.

    Args:
        process: Consumer identity of the process.
        ready: The consumed queues with their states.
        pipeline: Sends the scripts.
        wakeups: The waits for wake-ups.
    """

    def __init__(
        self,
        process: ConsumerIdentity,
        ready: ReadyQueues,
        pipeline: ScriptPipeline,
        wakeups: WakeupGroups,
    ) -> None:
        self._process = process
        self._ready = ready
        self._pipeline = pipeline
        self._wakeups = wakeups
        #: Queues whose wake-up must be handed over, with the number of handovers.
        self.queued: list[tuple[Queue, int]] = []

    # -- taking ----------------------------------------------------------------

    def read(self, group: WakeupListener) -> list[Subscription]:
        """Read the answer of a wait, and return the queues whose wake-up this process has taken."""
        refusals = self._process.refusals
        try:
            sources = group.read_wakeups()
        except PASSING_ERRORS:
            raise
        except redis.ResponseError as error:
            refusals.refused(_WAIT, error)
            group.resumes_at = self._process.clock.monotonic() + RETRY_AFTER_REFUSAL_S
            return []
        if refusals.reasons:
            refusals.accepted(_WAIT)
        for source in sources:
            self._ready.rely_on(source)
        return sources

    def restart_wait(self, group: WakeupListener) -> bool:
        """Cancel the wait of a group, because its queues have changed.

        Returns:
            Whether a ``BLPOP`` was under way.
        """
        if waited := group.cancel_wait():
            # A wake-up may have been lost with the connection.
            for source in group.members.values():
                self._ready.rely_on(source)
        return waited

    # -- handing over ----------------------------------------------------------

    def hand_over(self, source: Subscription, now: float) -> None:
        """Hand the wake-up and the next look over to another consumer, for lack of a free slot."""
        if not source.queue.token:  # a singleton queue has no other consumer
            self._ready.handed_over(source)
            self._pipeline.hand_over_wakeup(source.queue, now)

    def add(self, source: Subscription, times: int = 1) -> None:
        """Let :meth:`send` hand a wake-up over, in the place where a broken connection is handled."""
        if not source.queue.token and self._pipeline.connections():
            self.queued.append((source.queue, times))

    def send(self, now: float) -> None:
        """Send the handovers of the queues that this channel no longer consumes."""
        while self.queued:
            queue, times = self.queued.pop()
            self._pipeline.hand_over_wakeup(queue, now, times)

    def _end_waits(self) -> None:
        """End all waits in one round trip, and take the wake-ups that have come before."""
        waiting = [group for group in self._wakeups if group.is_waiting]
        if keys := [group.end_key for group in waiting if not group.is_asking]:
            with self._process.refusals.watch("end of the waits for wake-ups") as outcome:
                self._pipeline.ask(("EVAL", PUSH_EACH_FOR, len(keys), *keys, END_LIFE_MS))
            if outcome.refused:
                for group in waiting:
                    self.restart_wait(group)
        for group in waiting:
            while group.is_waiting:
                self.read(group)

    def send_before_blocking(self) -> None:
        """Hand all wake-ups and next looks over, because a callback may block the loop for long.

        Raises:
            redis.RedisError: The connection broke.
        """
        self._end_waits()
        now = self._process.clock.monotonic()
        with self._pipeline.together:
            for source in self._ready.awaited():
                self.hand_over(source, now)
        if self._pipeline.hands_over_wakeup():
            # The loop stops. A second handover waits for an answer, and one whose script Redis does not know.
            self._pipeline.read_all_answers()

    def close(self) -> None:
        """Forget the handovers that were not sent."""
        self.queued.clear()
