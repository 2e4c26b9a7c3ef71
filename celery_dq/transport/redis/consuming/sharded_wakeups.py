"""Waits for wake-ups on a Redis Cluster, where no ``BLPOP`` can name lists of several slots.

A channel has one connection for each node that serves partitions it consumes. On it, the channel subscribes
to the sharded channels ``woken`` of these partitions, and pops wake-ups. A script that stores a wake-up
publishes the number of consumers. A consumer without work in that partition then tries to take the wake-up by
an ``LPOP``, and one of them gets it. The consumers spread their attempts over a time that grows with their
number.

PUB/SUB stores nothing. A message that comes while the consumer has work is remembered. After a connection to
a node was lost, or a slot has moved, the consumer subscribes again and tries to take a wake-up at once. A
connection that fails in silence is noticed after :data:`PING_EVERY_S` and ``OVERDUE_S``. Each heartbeat
publishes again while a wake-up is stored.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis
from redis.exceptions import MovedError

from celery_dq.shown import shown_logger
from celery_dq.transport.redis.consuming.subscriptions import Subscription, WakeupGroups, WakeupListener
from celery_dq.transport.redis.store.cluster_client import (
    CONNECT_TIMEOUT_S,
    RECONNECT_S,
    RECONNECT_SHARE,
    node_pool,
    refresh_slots,
    slots_of,
)
from celery_dq.transport.redis.store.script_calls import OVERDUE_S
from celery_dq.transport.redis.store.slot_map import NodeAddress

logger = shown_logger(__name__)

#: Seconds for each other consumer over which the attempts to take a wake-up are spread, and the most of them.
SPREAD_S, MOST_SPREAD_S = 0.0005, 0.01
#: Seconds until a consumer tries again to take a wake-up of a slot that moves.
RETRY_S = 0.1
#: Seconds between two checks of a connection.
PING_EVERY_S = 10.0

_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)


class _Sent(NamedTuple):
    """A command without an answer: its name, the key of its queue, and the monotonic time of its sending."""

    name: str
    key: bytes
    at: float


class NodeWakeups(WakeupListener):
    """The wake-ups of the partitions that one node serves.

    Args:
        groups: All groups of the channel.
        node: The node.
    """

    def __init__(self, groups: ShardedWakeups, node: NodeAddress) -> None:
        # PUB/SUB messages and answers share a connection since the third version of the protocol.
        super().__init__(node_pool(groups.pool, node, protocol=3, socket_connect_timeout=CONNECT_TIMEOUT_S))
        self.node = node
        self._groups = groups
        self._sent: deque[_Sent] = deque()
        self._subscribed: set[bytes] = set()
        #: Keys of wake-up lists, and the monotonic times from which to try to take their wake-ups.
        self.due: dict[bytes, float] = {}
        #: Monotonic time until which the node gets no new connection.
        self._rests_until = 0.0
        self._pinged_at = 0.0
        #: Duration in seconds of the last attempt to connect.
        self._took_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether an attempt to take a wake-up has no answer."""
        return self.is_asking

    @property
    def is_asking(self) -> bool:
        """Whether an attempt to take a wake-up has no answer."""
        return any(each.name == "LPOP" for each in self._sent)

    @is_asking.setter
    def is_asking(self, value: bool) -> None:
        """Do nothing: the commands without an answer say it."""

    @property
    def is_subscribed(self) -> bool:
        """Whether the node sends the messages of all members, and none is unread or to be followed."""
        return not (self.due or self._sent) and self._subscribed >= set(self.members)

    def turn(self, now: float, may_take: bool) -> float:
        """Connect, subscribe, and try to take the wake-ups that are due.

        Args:
            now: Monotonic time.
            may_take: Whether the channel could take a message now.

        Returns:
            The monotonic time at which to call again.

        Raises:
            redis.ConnectionError: The node does not answer.
        """
        if now < self._rests_until:
            return self._rests_until
        if self.connection.connection is None:
            try:
                self.connection.open()
            finally:
                self._took_s = self._groups.monotonic() - now
            self._pinged_at = now
        if self._sent and now - self._sent[0].at > OVERDUE_S and not self.connection.has_unread_input():
            raise redis.ConnectionError(f"no answer for {now - self._sent[0].at:.0f} s")
        commands = [("SSUBSCRIBE", key) for key in self.members.keys() - self._subscribed]
        for _, key in commands:
            self._subscribed.add(key)
            self.due[key] = now  # a wake-up may have been stored before
        if now - self._pinged_at >= PING_EVERY_S:
            self._pinged_at = now
            commands.append(("PING", b""))
        next_at = self._pinged_at + PING_EVERY_S
        for key, at in list(self.due.items()) if may_take else ():
            if key not in self.members or (at <= now and not self.members[key].may_have_work):
                del self.due[key]
                if key in self.members:
                    commands.append(("LPOP", key))
            elif not self.members[key].may_have_work:
                next_at = min(next_at, at)
        if commands:
            self._send(commands, now)
        return next_at

    def _send(self, commands: Sequence[tuple[str, bytes]], now: float) -> None:
        self._sent.extend(_Sent(name, key, now) for name, key in commands)
        self.connection.send_all([_command(name, key) for name, key in commands])

    # -- the interface of the base class

    def read_wakeups(self) -> list[Subscription]:
        """Read the messages and answers that have arrived, or wait for one if a wake-up may come.

        Returns:
            The queues whose wake-ups were taken, or may have been.
        """
        taken: list[Subscription] = []
        try:
            waits = self.is_asking
            while waits or self.connection.has_answer():
                waits = False
                self._read(taken)
        except _LOST as exc:
            taken += self._groups.lost(self, exc)
        return taken

    def cancel_wait(self) -> bool:
        """Return whether an attempt to take a wake-up has no answer; the connection stays."""
        return self.is_asking

    def leave(self, key: bytes) -> None:
        """End the subscription of a queue that has left."""
        self.due.pop(key, None)
        if key in self._subscribed and self.connection.connection is not None:
            self._subscribed.discard(key)
            try:
                # Its answer is a message, as the node also sends one when a slot moves, or an error. With the
                # next answer to a PING, either has come.
                self._send([("SUNSUBSCRIBE", key), ("PING", b"")], self._groups.monotonic())
            except _LOST as exc:
                logger.debug("Node %s did not end a subscription: %s.", self.node, exc)

    def close(self) -> None:
        """Close the connection."""
        self._sent.clear()
        self._subscribed.clear()
        self.due.clear()
        super().close()

    def reset(self, now: float) -> list[Subscription]:
        """Close a broken connection; return the queues whose wake-ups it may have taken."""
        maybe = [
            self.members[each.key] for each in self._sent if each.name == "LPOP" and each.key in self.members
        ]
        self.close()
        self._rests_until = now + max(RECONNECT_S, RECONNECT_SHARE * self._took_s)
        return maybe

    # -- messages and answers

    def _read(self, taken: list[Subscription]) -> None:
        now = self._groups.monotonic()
        try:
            answer = self.connection.connection.read_response(push_request=True)
        except MovedError as exc:
            self._groups.moved(self, self._sent.popleft().key, exc.slot_id, NodeAddress(exc.host, exc.port))
            return
        except redis.ResponseError as exc:
            sent = self._sent.popleft()  # the slot moves now, or the cluster has no master for it
            logger.debug("Node %s refused %s: %s.", self.node, sent.name, exc)
            self._subscribed.discard(sent.key) if sent.name == "SSUBSCRIBE" else None
            self._notify(sent.key, now + RETRY_S)
            return
        if not isinstance(answer, list):
            sent = self._sent.popleft()
            if sent.name == "SUNSUBSCRIBE":  # a message has answered it
                sent = self._sent.popleft()
            if sent.name == "LPOP" and answer is not None and sent.key in self.members:
                taken.append(self.members[sent.key])
            return
        kind, channel = _raw(answer[0]), _raw(answer[1])
        key = _key_of(channel)
        if kind == b"smessage":
            others = max(int(answer[2] or 0) - 1, 0)
            self._notify(key, now + random.random() * min(others * SPREAD_S, MOST_SPREAD_S))
        elif kind == b"ssubscribe":
            self._sent.popleft()
        elif kind == b"sunsubscribe" and key in self._subscribed:
            self._groups.moved(self, key)

    def _notify(self, key: bytes, at: float) -> None:
        if key in self.members:
            self.due.setdefault(key, at)
            self._groups.asks_at = min(self._groups.asks_at, at)

    def forget(self, key: bytes) -> None:
        """Note that the node does not serve a queue any more."""
        self._subscribed.discard(key)
        self.due.pop(key, None)


class ShardedWakeups(WakeupGroups):
    """All waits of one channel on a Redis Cluster, one group for each node.

    Args:
        pool: A pool of :func:`~celery_dq.transport.redis.store.cluster_client.cluster_pool`.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(pool)
        self.pool = pool
        self._slots = slots_of(pool)
        self.groups: list[NodeWakeups] = []  # type: ignore[assignment]  # a list of the same interface

    def monotonic(self) -> float:
        """Return the monotonic time of the channel."""
        return self._slots.clock.monotonic()

    @property
    def is_waiting(self) -> bool:
        """Whether each group is subscribed, and no message is to be followed."""
        return bool(self.groups) and all(each.is_subscribed for each in self.groups)

    @property
    def needs_capacity(self) -> bool:
        """Whether the free capacity decides on something: a message may be followed in any turn."""
        return True

    def _group_to_join(self, subscription: Subscription) -> WakeupListener:
        """Return the group of the node that serves the queue."""
        node = self._slots.node_of(subscription.queue.partition.keys.slot) or self._slots.masters[0]
        group = next((each for each in self.groups if each.node == node), None)
        if group is None:
            group = NodeWakeups(self, node)
            self.groups.append(group)
        self.asks_at = 0.0
        return group

    def leave(self, subscription: Subscription) -> None:
        """Remove a queue from its group."""
        group = self.group_of(subscription)
        assert isinstance(group, NodeWakeups)
        group.leave(subscription.queue.partition.keys.wake.encode())
        super().leave(subscription)

    def wait(self, now: float, *, may_wait: bool) -> bool:
        """Subscribe to messages, and try to take the wake-ups that they tell of.

        A group whose node fails does not stop the others.

        Args:
            now: Monotonic time.
            may_wait: Whether the channel could take a message now.

        Returns:
            Whether there may be another connection.
        """
        self.asks_at = math.inf
        before = [group.connection.connection for group in self.groups]
        for group in list(self.groups):
            try:
                self.asks_at = min(self.asks_at, group.turn(now, may_wait))
            except _LOST as exc:  # noqa: PERF203 - the other groups go on
                self.lost(group, exc)
        return before != [group.connection.connection for group in self.groups]

    def lost(self, group: NodeWakeups, exc: Exception) -> list[Subscription]:
        """Let the queues of a node that has failed find their nodes again.

        Returns:
            The queues whose wake-ups were perhaps taken over the lost connection.
        """
        logger.debug("Node %s sends no wake-ups: %s.", group.node, exc)
        maybe = group.reset(self.monotonic())
        refresh_slots(self.pool, without=group.node)
        for subscription in list(group.members.values()):
            if (self._slots.node_of(subscription.queue.partition.keys.slot) or group.node) != group.node:
                self._regroup(subscription)
        self.asks_at = min(self.asks_at, self.monotonic() + RECONNECT_S)
        return maybe

    def moved(
        self, group: NodeWakeups, key: bytes, slot: int | None = None, node: NodeAddress | None = None
    ) -> None:
        """Let a queue find its node whose slot has moved, perhaps to a node that is known now."""
        if slot is not None and node is not None:
            self._slots.moved(slot, node)
        group.forget(key)
        subscription = group.members.get(key)
        if subscription is not None:
            self._regroup(subscription)

    def _regroup(self, subscription: Subscription) -> None:
        super().leave(subscription)
        self.join(subscription)


def _command(name: str, key: bytes) -> tuple[str | bytes, ...]:
    if name in ("SSUBSCRIBE", "SUNSUBSCRIBE"):
        return name, _channel_of(key)
    return (name, key) if key else (name,)


def _channel_of(key: bytes) -> bytes:
    return key.removesuffix(b"wake") + b"woken"


def _key_of(channel: bytes) -> bytes:
    return channel.removesuffix(b"woken") + b"wake"


def _raw(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
