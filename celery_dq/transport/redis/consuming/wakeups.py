"""Waits for a *wake-up* of any queue that a channel consumes.

One ``BLPOP`` names the wake-up lists of a group of queues, on a connection of its own. So a wake-up costs
the next wait of one group, however many queues the channel consumes. Up to :data:`GROUP_SIZE` queues are one
group.

A group waits while no queue of it may have work. While some may, the group *asks* for wake-ups of its other
queues now and then, by a script that does not wait: a backlog in one queue must not hide the messages of
another. For the same reason, the queue that was served is the last one in the next ``BLPOP``.

When Redis refuses a wait or a question, e.g. because it cannot save, the group tries again a second later.

Other consumers rely on the consumer that took the wake-up of a queue, or keeps its next look. Without a free
slot, and when it stops to consume, it hands them over by a script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import redis

from celery_dq.transport.redis.consuming.subscriptions import Subscription, WaitGroup
from celery_dq.transport.redis.store.full_server import POP_FIRST
from celery_dq.transport.redis.store.pipelined_connection import (
    BLPOP_TIMEOUT_S,
    OVERDUE_S,
    PipelinedConnection,
)

#: Queues of a group. More make each wait longer to send, and fewer make more connections.
GROUP_SIZE = 100
#: Maximum number of groups. With more queues, the groups are larger.
MAX_GROUPS = 30
#: Seconds from one question of a group to its next, and to the next question of any group.
ASK_EVERY_S, ASK_SPACING_S = 0.1, 0.03


class WakeupListener(WaitGroup):
    """A group of queues whose wake-ups one connection receives.

    Args:
        pool: Pool that the connection is taken from.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self.connection = PipelinedConnection(pool)
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
        self.connection.send(("BLPOP", *self.members, BLPOP_TIMEOUT_S))
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
        subscription = self.members.pop(key, None)
        if subscription is not None:
            self.members[key] = subscription
        return [] if subscription is None else [subscription]

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
        for each in self.groups:
            if each.is_asking or (each.waiting_since is None and each.busy < len(each.members)):
                return True
        return False

    def join(self, subscription: Subscription) -> WakeupListener:
        """Add a queue to the smallest group, or to a new one."""
        # The pool has other connections, too, and its user may have limited them.
        most = max(min(MAX_GROUPS, getattr(self._pool, "max_connections", MAX_GROUPS) // 2), 1)
        group = min(self.groups, key=lambda each: len(each.members), default=None)
        if group is None or (len(group.members) >= GROUP_SIZE and len(self.groups) < most):
            group = WakeupListener(self._pool)
            self.groups.append(group)
        group.members[subscription.queue.partition.keys.wake.encode()] = subscription
        subscription.waits = group
        return group

    def group_of(self, subscription: Subscription) -> WakeupListener:
        """Return the group of a queue that has joined one."""
        return next(group for group in self.groups if group is subscription.waits)

    def leave(self, subscription: Subscription) -> None:
        """Remove a queue from its group."""
        group, subscription.waits = self.group_of(subscription), None
        del group.members[subscription.queue.partition.keys.wake.encode()]
        if subscription.may_have_work:
            group.busy -= 1
        if not group.members:
            self.groups.remove(group)
            group.close()

    def wait(self, now: float, *, may_wait: bool) -> bool:
        """Start the waits of the groups without work, and the questions of the others.

        Args:
            now: Monotonic time.
            may_wait: Whether the channel could take a message now.

        Returns:
            Whether there may be another connection.

        Raises:
            redis.RedisError: A connection broke, or an answer is overdue.
        """
        self.asks_at = resumes_at = math.inf
        is_changed = False
        for group in self.groups:
            if group.waiting_since is not None:
                group.check_alive(now)
            elif not may_wait:
                continue
            elif now < group.resumes_at:
                resumes_at = min(resumes_at, group.resumes_at)
            elif not group.busy:
                before = group.connection.connection
                group.start_wait(now)
                is_changed = is_changed or group.connection.connection is not before
            else:
                self.asks_at = min(self.asks_at, group.asks_at)
        if self.asks_at != math.inf:
            is_changed = self._ask(now) or is_changed
        self.asks_at = min(self.asks_at, resumes_at)
        return is_changed

    def _ask(self, now: float) -> bool:
        """Let the group ask that has not asked for the longest time, if that is due; see :meth:`wait`."""
        is_changed = False
        if max(self.asks_at, self._asked_at + ASK_SPACING_S) <= now:
            waiting = (each for each in self.groups if not (each.is_waiting or now < each.resumes_at))
            group = min(waiting, key=lambda each: each.asks_at)
            before = group.connection.connection
            group.ask(now)
            is_changed, self._asked_at = group.connection.connection is not before, now
        self.asks_at = max(self.asks_at, self._asked_at + ASK_SPACING_S)
        return is_changed

    def close(self) -> None:
        """Close all connections."""
        self.asks_at = math.inf
        for group in self.groups:
            group.close()
