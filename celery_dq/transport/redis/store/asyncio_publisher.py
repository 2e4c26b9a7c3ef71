"""Publishes messages from coroutines: the exchange with Redis on redis-py's asyncio.

A :class:`RedisPublisher` numbers, routes and packs here as on the blocking way, and the answers are read by
the same functions. Only the exchange differs. What needs more than one script call, such as a queue whose
partitions are not known or have changed, is left to the blocking publisher, which a thread runs. The stamp of
a message tells the broker that both have sent the same one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis
from kombu.exceptions import LimitExceeded
from redis.exceptions import NoScriptError

from celery_dq.per_loop import LoopTurns
from celery_dq.transport.packer import PackedMessage, StampedMessage
from celery_dq.transport.partition_replies import PushReply
from celery_dq.transport.redis.store.asyncio_connections import (
    asyncio_pool,
    close_sentinels,
    in_time,
)
from celery_dq.transport.redis.store.partition import PartitionedQueue
from celery_dq.transport.redis.store.publisher import RedisPublisher
from celery_dq.transport.redis.store.script_calls import pack
from celery_dq.transport.redis.store.server_checks import (
    PASSING_ERRORS,
    connection_refusals_named,
    recognised_error,
)
from celery_dq.transport.redis.store.server_errors import BacklogFull, PushInterrupted, refusals_as_outage


class BlockingPushNeeded(Exception):
    """A push that needs more than one script call: the map of the queue is not known, or has changed."""


class AsyncioBroker:
    """The parts that the coroutines of all loops of a process share: settings, maps of queues, addresses.

    Args:
        channel: A channel of the tenant broker, from which they are taken. It need not stay open.

    Attributes:
        serves: Whether connections like those of the channel exist in asyncio.
        durable: Names of queues that are partitions, so that no look is needed whether they are transient.
    """

    def __init__(self, channel: Any) -> None:
        self._context = channel.context
        self._pool = channel.own_clients()().connection_pool
        self._queues: dict[str, PartitionedQueue] = {}
        self.serves = asyncio_pool(self._pool) is not None
        self.durable: set[str] = set(channel.transients.durable)
        self.maps = channel.identity.partition_maps
        #: Seconds that an answer may take; None without a limit.
        self.timeout_s: float | None = self._pool.connection_kwargs.get("socket_timeout")
        self.confirms = bool(self._context.options.confirm_replicas)

    def known_queue(self, name: str) -> PartitionedQueue | None:
        """Return a queue by the map that the process knows; None for others. Opens nothing."""
        homes = self.maps.get(name)
        if homes is None:
            return None
        found = self._queues.get(name)
        if found is None or found.homes is not homes:
            found = self._queues[name] = self._context.queue_of(name, homes)
        return found

    def knows(self, name: str) -> bool:
        """Return whether a message for this queue needs one script call only."""
        return name in self.durable and self.known_queue(name) is not None

    def new_publisher(self) -> RedisPublisher:
        """Return a producer sequence that numbers and routes, and has no connection."""
        context = self._context
        return RedisPublisher(
            lambda: self._pool,
            context.options,
            context.identity.clock,
            lambda name, refresh: context.queue_of(name, self.maps.get(name)),
            context.queue_of,
            self.maps,
        )

    def new_pool(self) -> Any:
        """Return a pool that makes the connections of one loop."""
        return asyncio_pool(self._pool)


class AsyncioPublisher:
    """One producer sequence on one connection of an event loop, with one call under way.

    Args:
        broker: What all loops share.
        pool: The pool that makes the connection.
    """

    def __init__(self, broker: AsyncioBroker, pool: Any) -> None:
        self._broker = broker
        self._publisher = broker.new_publisher()
        self._connection = pool.make_connection()

    def number(self, message: PackedMessage) -> StampedMessage:
        """Stamp a packed message."""
        return self._publisher.number(message)

    async def push(self, message: StampedMessage) -> None:
        """Send a message and wait for the answer, for its dedup request, too.

        Args:
            message: The stamped message.

        Raises:
            BlockingPushNeeded: The blocking publisher has to send the message, with the same stamp.
            BacklogFull: There was no room for the message.
            redis.RedisError: As of :meth:`RedisPublisher.push`; sending again is safe.
        """
        name, sequence, outgoing, dedup, marker_ttl_ms = message
        queue, maps = self._broker.known_queue(name), self._broker.maps
        tried = maps.take_unanswered(name, sequence)
        try:
            if queue is None or tried not in ([], [queue.homes]):
                raise BlockingPushNeeded
            await self._connect()
        except BaseException:
            if tried:
                maps.note_unanswered(name, sequence, tried)  # it was not sent again
            raise
        self._publisher.begin_push()
        call = self._publisher.call_for(queue, sequence, [outgoing], marker_ttl_ms)
        try:
            try:
                answer = await self._ask(call.command())
            except NoScriptError:
                answer = await self._ask(call.command(full=True))
            reply = None if type(answer) is int else call.parse(answer)[0]
            if reply is not None and reply.status == "misrouted":
                raise BlockingPushNeeded
            if self._broker.confirms:
                is_repeat = reply is not None and reply.status == "seen"
                for command in self._publisher.confirmation(is_repeat):
                    answer = await self._ask(command)
                self._publisher.check_confirmed(int(answer))
        except redis.ResponseError:
            raise  # it was the answer
        except BaseException as error:
            maps.note_unanswered(name, sequence, [queue.homes])
            if isinstance(error, redis.ConnectionError):
                raise PushInterrupted.of(error, name, [len(outgoing.record)]) from error
            raise
        reply = reply or PushReply("accepted", outgoing.id)
        if reply.status == "full":
            raise self._publisher.backlog_full(name, outgoing.record, reply)
        if dedup is not None:
            dedup.receive_verdict(reply.status, reply.id, reply.covering, reply.replaced)

    async def _connect(self) -> None:
        if not self._connection.is_connected:
            with refusals_as_outage(), connection_refusals_named():
                await in_time(self._broker.timeout_s, self._connection.connect())

    async def _ask(self, command: Sequence[Any]) -> Any:
        """Send a command and wait for its answer, up to the socket timeout."""
        try:
            return await in_time(self._broker.timeout_s, self._exchange(pack((command,))))
        except redis.ResponseError as error:
            raise recognised_error(error) from None

    async def _exchange(self, packed: bytes) -> Any:
        await self._connection.send_packed_command(packed)
        return await self._connection.read_response()

    async def disconnect(self) -> None:
        """Close the connection, on which an answer may be left. The next push opens it again."""
        with suppress(redis.RedisError, OSError):
            await self._connection.disconnect(nowait=True)

    async def close(self) -> None:
        """Shorten the lifetime of the markers, and close the connection."""
        with suppress(redis.RedisError, OSError):
            commands = self._publisher.retirement() if self._connection.is_connected else ()
            for command in commands:
                await self._ask(command)
        with suppress(redis.RedisError, OSError):
            await self._connection.disconnect()


@dataclass(slots=True, eq=False)
class Publication:
    """The publish of one message.

    Attributes:
        message: The packed message.
        stamped: The message with the stamp of its first attempt; None before. All attempts have this stamp,
            so the broker stores one copy.
    """

    message: PackedMessage
    stamped: StampedMessage | None = None


class LoopPublishers:
    """The publishers of one event loop.

    Args:
        broker: What all loops share.
        limit: Maximum number of connections.

    Attributes:
        turns: Shares out the turns of the loop among the calls that are made there.
    """

    def __init__(self, broker: AsyncioBroker, limit: int) -> None:
        self._broker = broker
        self._pool = broker.new_pool()
        self.limit = limit
        self.turns = LoopTurns()
        self._permits = asyncio.Semaphore(limit)
        self._idle: list[AsyncioPublisher] = []

    async def push(self, publication: Publication, timeout_s: float | None) -> None:
        """Make one attempt to send a message; raises as :meth:`AsyncioPublisher.push`.

        Args:
            publication: The message.
            timeout_s: Longest wait, in seconds, for a free connection when as many as the limit are in use;
                None waits without a limit.

        Raises:
            LimitExceeded: No connection was free in time.
        """
        if self._permits.locked():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._permits.acquire()
            except TimeoutError:
                raise LimitExceeded(self.limit) from None
        else:
            await self._permits.acquire()
        try:
            await self._push(publication)
        finally:
            self._permits.release()

    async def _push(self, publication: Publication) -> None:
        publisher = self._idle.pop() if self._idle else AsyncioPublisher(self._broker, self._pool)
        keeps = False
        try:
            if publication.stamped is None:
                publication.stamped = publisher.number(publication.message)
            await publisher.push(publication.stamped)
            keeps = True
        except BacklogFull:
            keeps = True
            raise
        except redis.ResponseError as error:
            # Only a message that was refused for good is not sent again, so that the next number may follow.
            keeps = not isinstance(error, (redis.ConnectionError, *PASSING_ERRORS))
            raise
        except asyncio.CancelledError:
            # A message that is not awaited any more is not sent again either. Its answer may be left on the
            # connection.
            await publisher.disconnect()
            keeps = True
            raise
        finally:
            if keeps:
                self._idle.append(publisher)
            else:
                # The message may be sent again, on another connection. No later number of its sequence may
                # come before it, so the sequence ends.
                await publisher.disconnect()

    async def close(self) -> None:
        """Close all connections that are not in use."""
        idle, self._idle = self._idle, []
        # Together, because a server that hangs answers none of them.
        await asyncio.gather(*(publisher.close() for publisher in idle))
        await close_sentinels(self._pool)
