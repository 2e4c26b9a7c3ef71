"""The masters of a Redis Cluster, and the slots that each of them serves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import redis
from redis.exceptions import AskError, MovedError, TryAgainError

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import ServerError
from celery_dq.hash_slots import SLOTS

#: Shortest time in seconds between two questions for the map.
REFRESH_EVERY_S = 0.05


class NodeAddress(NamedTuple):
    """The address of a node, as the cluster announces it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class NodeUnreachable(redis.exceptions.ClusterDownError):
    """A node of the cluster did not answer a command. The command may have been executed."""


class NodeClosedConnection(NodeUnreachable):
    """A node accepts connections, and closed each one on which the command was sent."""


def final_answer(answer: Any, slot: int | None) -> Any:
    """Return the answer for a caller whose deadline is over: for a slot that moves, an error that passes.

    Args:
        answer: The last answer of a node. A caller follows no redirection.
        slot: The slot of the command.
    """
    if isinstance(answer, (AskError, MovedError, TryAgainError)):
        return TryAgainError(f"slot {slot} of the Redis Cluster moves to another node")
    return answer


class SlotMap:
    """The slots of one cluster, as this process knows them. Threads may share it.

    A node that does not serve a slot names the one that does, so the map may be out of date.

    Args:
        seeds: Addresses from the broker URL. One of them must be reachable at first.
        clock: Source of monotonic time.
    """

    def __init__(self, seeds: Iterable[tuple[str, int]], clock: Clock | None = None) -> None:
        self.seeds = tuple(NodeAddress(*each) for each in seeds)
        self.clock = clock or SystemClock()
        self._slots: list[NodeAddress | None] = [None] * SLOTS
        #: How often a slot has got another master.
        self.changes = 0
        self._masters: tuple[NodeAddress, ...] = ()
        self._replicas: tuple[NodeAddress, ...] = ()
        self._asked_at = float("-inf")

    @property
    def masters(self) -> tuple[NodeAddress, ...]:
        """The masters that serve slots; empty before :meth:`refresh`."""
        return self._masters

    def node_of(self, slot: int) -> NodeAddress | None:
        """Return the master of a slot; None when the cluster has none for it."""
        return self._slots[slot]

    def moved(self, slot: int, node: NodeAddress) -> None:
        """Note that a node has named the master of a slot."""
        self.changes += self._slots[slot] != node
        self._slots[slot] = node

    def refresh(self, connect: Callable[[NodeAddress], Any], without: NodeAddress | None = None) -> None:
        """Ask one node for the map, unless one was asked a moment ago.

        Args:
            connect: Returns a new redis-py connection to a node.
            without: A node that has just failed, which is asked last.

        Raises:
            redis.RedisError: No node answered.
            ServerError: A server is not a node of a cluster.
        """
        now = self.clock.monotonic()
        if self._masters and now - self._asked_at < REFRESH_EVERY_S:
            return
        self._asked_at = now
        known = [*self._masters, *self._replicas]
        random.shuffle(known)  # so that not all processes ask the same node
        candidates = sorted(dict.fromkeys((*known, *self.seeds)), key=lambda each: each == without)
        failure: Exception | None = None
        for candidate in candidates:
            try:
                self._take_over(_ask(candidate, connect))
            except redis.AuthenticationError:  # noqa: PERF203 - the next node may answer
                raise
            except (redis.ConnectionError, redis.TimeoutError, OSError) as exc:
                failure = failure or exc
            else:
                return
        raise NodeUnreachable(
            f"No node of the Redis Cluster answered: {', '.join(map(str, candidates))} ({failure})"
        ) from failure

    def _take_over(self, ranges: list[tuple[int, int, list[NodeAddress]]]) -> None:
        slots: list[NodeAddress | None] = [None] * SLOTS
        masters, replicas = dict[NodeAddress, None](), dict[NodeAddress, None]()
        for first, last, (master, *others) in ranges:
            slots[first : last + 1] = [master] * (last + 1 - first)
            masters[master] = None
            replicas.update(dict.fromkeys(others))
        self.changes += slots != self._slots
        self._slots, self._masters, self._replicas = slots, tuple(masters), tuple(replicas)


def _ask(
    node: NodeAddress, connect: Callable[[NodeAddress], Any]
) -> list[tuple[int, int, list[NodeAddress]]]:
    connection = connect(node)
    try:
        connection.send_command("CLUSTER", "SLOTS", check_health=False)
        answer = connection.read_response()
    except redis.ResponseError as exc:
        if "cluster support disabled" not in str(exc):
            raise
        raise ServerError(
            f"The server {node} is not a node of a Redis Cluster ({exc}): name it as dq-redis://{node}/0"
        ) from None
    finally:
        connection.disconnect()

    def address(found: Any) -> NodeAddress:
        host = found[0].decode() if isinstance(found[0], bytes) else str(found[0] or "")
        # A node that does not know its own address answers with none.
        return NodeAddress(host if host not in ("", "?") else node.host, int(found[1]))

    return [(int(first), int(last), [address(each) for each in rest]) for first, last, *rest in answer]
