"""Sends the scripts of a channel to the nodes of a Redis Cluster, each on one connection per node.

A node that fails stops its own partitions only. Its acks become pending again, its claims are in doubt, and
both are sent again after a moment, to the master that the cluster then has for the slot.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import redis
from redis.exceptions import MovedError, NoScriptError

from celery_dq.transport.in_flight.pending_acks import PendingAcks
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.in_flight.script_pipeline import (
    RETRY_UNAVAILABLE_S,
    ClaimFailure,
    InFlightCall,
    ScriptPipeline,
)
from celery_dq.transport.redis.store.cluster_client import (
    CONNECT_TIMEOUT_S,
    RECONNECT_SHARE,
    node_pool,
    refresh_slots,
    slots_of,
)
from celery_dq.transport.redis.store.cluster_connection import NOT_EXECUTED
from celery_dq.transport.redis.store.pipelined_connection import OVERDUE_S, PipelinedConnection
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.slot_map import NodeAddress

logger = logging.getLogger(__name__)


_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)


class _NodeLine:
    """The connection to one node.

    Args:
        node: The node.
        connection: The connection.
    """

    def __init__(self, node: NodeAddress, connection: PipelinedConnection) -> None:
        self.node = node
        self.connection = connection
        #: The scripts without an answer, each with the monotonic time at which it was sent there.
        self.sent: deque[tuple[InFlightCall, float]] = deque()


class NodePipelines(ScriptPipeline):
    """The script pipeline of one channel, on a Redis Cluster.

    Args:
        process: The consumer.
        pool: A pool of :func:`~celery_dq.transport.redis.store.cluster_client.cluster_pool`.
        may_wait_for_claim: As for the base class.
    """

    def __init__(
        self,
        process: ConsumerIdentity,
        pool: redis.ConnectionPool,
        may_wait_for_claim: Callable[[Queue, PendingAcks, float], bool],
    ) -> None:
        super().__init__(process, pool, may_wait_for_claim)
        self._pool = pool
        self._slots = slots_of(pool)
        self._lines: dict[NodeAddress, _NodeLine] = {}
        self._collects = False
        #: Monotonic time until which a node, or the partition with a prefix of its keys, gets no scripts.
        self._rests: dict[NodeAddress | str, float] = {}
        #: Nodes that were reported as unreachable, and have not answered since.
        self._failed: set[NodeAddress] = set()

    # -- connections

    @property
    def together(self) -> Any:
        """A context that sends the scripts of its block at the end, those for one node together."""
        return self._sent_together()

    @contextmanager
    def _sent_together(self) -> Iterator[None]:
        self._collects = True
        try:
            yield
        finally:
            self._collects = False
            for node, line in list(self._lines.items()):
                if line.connection.collected is not None:
                    try:
                        line.connection.together.__exit__()
                    except _LOST as exc:
                        self._lose(node, exc)

    def connections(self) -> list[tuple[Any, Callable[[], None]]]:
        """Return the open redis-py connections, and for each the function that reads its answers."""
        return [
            (line.connection.connection, partial(self._read_arrived, node, line))
            for node, line in self._lines.items()
            if line.connection.connection is not None
        ]

    def resumes_at(self, queue: Queue) -> float:
        """Return the monotonic time until which no acks of *queue* are sent."""
        node = self._slots.node_of(queue.partition.keys.slot)
        rests = (self._rests.get(queue.prefix, 0.0), self._rests.get(node, 0.0) if node else 0.0)
        return max(super().resumes_at(queue), *rests)

    def check_alive(self, now: float) -> None:
        """Close the connections to nodes that do not answer in time."""
        for node, line in list(self._lines.items()):
            silent_s = now - line.sent[0][1] if line.sent else 0.0
            if silent_s > OVERDUE_S and not line.connection.has_unread_input():
                self._lose(node, redis.ConnectionError(f"no answer for {silent_s:.0f} s"))

    def close(self) -> None:
        """Close all connections; acks without an answer become pending again."""
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.connection.close()
        self._rests.clear()
        super().close()

    # -- sending

    def _write(self, sent: InFlightCall) -> None:
        now = self._process.clock.monotonic()
        node = self._slots.node_of_key(sent.call.keys[0])
        if node is None:
            refresh_slots(self._pool, without=None)
            self._give_up(sent)
        elif self._rests.get(node, 0.0) > now:
            self._give_up(sent)
        else:
            try:
                line = self._line(node)
                line.sent.append((sent, now))
                line.connection.send(sent.call.command())
            except _LOST as exc:
                self._lose(node, exc, self._process.clock.monotonic() - now)
                if sent in self._under_way:  # the connection was not opened
                    self._give_up(sent)

    def _line(self, node: NodeAddress) -> _NodeLine:
        line = self._lines.get(node)
        if line is None:
            timeout_s = self._pool.connection_kwargs.get("socket_connect_timeout") or math.inf
            pool = node_pool(self._pool, node, socket_connect_timeout=min(timeout_s, CONNECT_TIMEOUT_S))
            line = _NodeLine(node, PipelinedConnection(pool))
            line.connection.open()
            self._lines[node] = line
        if self._collects and line.connection.collected is None:
            line.connection.together.__enter__()
        return line

    # -- answers

    def _read_arrived(self, node: NodeAddress, line: _NodeLine) -> None:
        try:
            while line.connection.has_answer():
                self._read_from(line)
        except _LOST as exc:
            if line.sent:
                self._lose(node, exc)
            else:  # it was idle for longer than the setting `timeout` of Redis
                self._lines.pop(node, None)
                line.connection.close()

    def read_all_answers(self) -> None:
        """Read all outstanding answers, blocking. Those of a node that fails do not come."""
        while self._under_way:
            for node, line in list(self._lines.items()):
                try:
                    while line.sent:
                        self._read_from(line)
                except _LOST as exc:  # noqa: PERF203 - the other nodes go on
                    self._lose(node, exc)

    def _read_from(self, line: _NodeLine) -> None:
        if not line.sent:
            line.connection.read()  # the node closes the connection
            return
        try:
            answer = line.connection.read()
        except NoScriptError:
            sent, _ = line.sent.popleft()
            line.sent.append((sent, self._process.clock.monotonic()))
            line.connection.send(sent.call.command(full=True))
        except MovedError as exc:
            sent, _ = line.sent.popleft()
            self._slots.moved(exc.slot_id, NodeAddress(exc.host, exc.port))
            self._write(sent)
        except NOT_EXECUTED:
            sent, _ = line.sent.popleft()
            self._rests[sent.queue.prefix] = self._process.clock.monotonic() + RETRY_UNAVAILABLE_S
            self._give_up(sent)
        except redis.ResponseError as exc:
            sent, _ = line.sent.popleft()
            self._under_way.remove(sent)
            self._restore_acks(sent)
            self._refused(sent, exc)
        else:
            sent, _ = line.sent.popleft()
            self._under_way.remove(sent)
            self._failed.discard(line.node)
            self._receive(sent, answer)

    # -- failures

    def _give_up(self, sent: InFlightCall) -> None:
        """Let the caller send a script again later."""
        self._under_way.remove(sent)
        self._restore_acks(sent)
        if sent.on_claimed is not None:
            sent.on_claimed(ClaimFailure.UNAVAILABLE)

    def _lose(self, node: NodeAddress, exc: Exception, took_s: float = 0.0) -> None:
        """Close the connection to a node, where an attempt took some seconds. Its scripts may have run."""
        rest_s = max(RETRY_UNAVAILABLE_S, RECONNECT_SHARE * took_s)
        self._rests[node] = self._process.clock.monotonic() + rest_s
        line = self._lines.pop(node, None)
        if line is not None:
            line.connection.close()
            for sent, _ in line.sent:
                self._give_up(sent)
        if node not in self._failed:
            self._failed.add(node)
            logger.warning(
                "Node %s of the Redis Cluster does not answer (%s): its partitions wait for it or for its "
                "replica, and the others go on.",
                node,
                exc,
                extra={"event": "node_unreachable"},
            )
        refresh_slots(self._pool, without=node)
