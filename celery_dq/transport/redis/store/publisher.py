"""Publishes messages into the partitions of queues, exactly once each.

A publisher is a *producer sequence*: it belongs to one channel, and has one call in flight. It stamps every
message once with its producer id and the next number. The stamp stays in the properties of the message when
kombu publishes it again after a lost connection. The push script ignores a number that it has seen.

The tenant of a message decides its partition; of a spread tenant, also the dedup key or the task id. A batch
for a queue with several partitions is one call per partition, and all of them travel together. A partition
refuses messages of a client that knows another number of partitions; the client then asks the broker and
sends them again, under a producer id of their own.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any, TypeVar

import redis

from celery_dq.clock import Clock
from celery_dq.compat.kombu_messages import library_errors
from celery_dq.errors import TooFewReplicas
from celery_dq.options.sections import Options
from celery_dq.per_process import OwnerProcess, current_pid
from celery_dq.shown import shown_logger
from celery_dq.transport.message_record import tenant_of
from celery_dq.transport.packer import PackedMessage, Packer, PublishBatch, StampedMessage
from celery_dq.transport.partition_replies import OutgoingRecord, PushReply
from celery_dq.transport.redis.store.partition import Partition, PartitionedQueue, Queue, read_push_reply
from celery_dq.transport.redis.store.partition_map import MOVING, ROUTINGS, PartitionMap, PartitionMaps
from celery_dq.transport.redis.store.script_calls import PipelinedConnection, ScriptCall, ask_script, run_on
from celery_dq.transport.redis.store.server_errors import (
    BacklogFull,
    PartitionsChanging,
    PushInterrupted,
    refusals_named,
)
from celery_dq.transport.redis.store.slot_map import NodeClosedConnection

T = TypeVar("T")
R = TypeVar("R")

#: Maximum number of milliseconds that a push waits for replicas to confirm.
CONFIRM_TIMEOUT_MS = 2_000
#: Maximum share of the socket timeout for that wait, so that the answer of ``WAIT`` is still read.
CONFIRM_SHARE = 0.8
#: Lifetime, in milliseconds, of a producer's markers after it was closed without an error.
RETIRED_MARKER_MS = 60_000
#: Shortest and longest pause in seconds between two looks whether a tenant has room.
FIRST_PAUSE_S = 0.01
LAST_PAUSE_S = 0.25


#: Whether a push of this context may wait, with its connection, until a tenant has room.
may_wait_for_room: ContextVar[bool] = ContextVar("celery_dq.may_wait_for_room", default=True)


def pauses_for_room(options: Options, clock: Clock) -> Iterator[float]:
    """Yield the pauses in seconds between the attempts of a call that waits until its tenant has room.

    Args:
        options: With the time of a call, of which the last third is left for other steps.
        clock: Its monotonic time ends the wait.
    """
    # Without a limit for calls, the wait has none either.
    until = clock.monotonic() + (options.publishing.timeout_us / 1.5e6 or math.inf)
    pause_s = FIRST_PAUSE_S
    while (left_s := until - clock.monotonic()) > 0:
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


class _Interrupted(Exception):
    """The error of a connection that was open when a request was sent."""


class RedisPublisher:
    """The producer sequence of one channel.

    Args:
        pool: Returns the pool that the connection is taken from.
        options: Lifetime of markers, number of replicas to wait for.
        clock: Source of wall time, for relative expirations and countdowns.
        queues: Returns the queue with a name; with True, as the broker now has it.
        queue_of: Returns the queue with a name as it is by a map.
        maps: The maps of this process, and those of pushes that were not answered.
    """

    def __init__(
        self,
        pool: Callable[[], redis.ConnectionPool],
        options: Options,
        clock: Clock,
        queues: Callable[[str, bool], PartitionedQueue],
        queue_of: Callable[[str, PartitionMap], PartitionedQueue],
        maps: PartitionMaps,
    ) -> None:
        self._pool = pool
        self._options = options
        self._clock = clock
        self._packer = Packer(options, clock)
        self._queues = queues
        self._queue_of = queue_of
        self._maps = maps
        self._connection: PipelinedConnection | None = None
        #: The markers of the last batch, with their lifetimes in ms.
        self._pushed_with: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._owner = OwnerProcess()
        self._sequence = uuid.uuid4().hex
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(partial(count, 1))
        #: Partition, and whether its tenants move there, to the key of the marker of this sequence.
        self._markers: dict[tuple[Partition, bool], str] = {}

    def begin_push(self) -> None:
        """Forget the markers of the push before."""
        self._pushed_with.clear()

    def _reset_after_fork(self) -> None:
        """Start a new producer sequence after a fork: parent and child must not share numbers or answers."""
        if self._owner.pid != current_pid():
            self._begin()
            self.close()

    def stamp(self, queue: str, message: dict[str, Any]) -> StampedMessage:
        """Pack *message*, and stamp it with the next number of this producer; see :class:`Packer`."""
        self._reset_after_fork()
        return self._packer.stamp(message, queue, self._sequence, self._numbers[queue])

    def number(self, message: PackedMessage) -> StampedMessage:
        """Stamp a packed message."""
        self._reset_after_fork()
        queue, task_id, record, request = message
        outgoing = OutgoingRecord(next(self._numbers[queue]), task_id, record)
        return StampedMessage(queue, self._sequence, outgoing, request, self._packer.marker_ttl_ms)

    def push(self, messages: Sequence[StampedMessage]) -> None:
        """Send *messages*, all of one queue and producer, and wait for the answers, for their dedup requests.

        Args:
            messages: Stamped messages.

        Raises:
            redis.RedisError: Redis did not answer; sending again is safe.
            PushInterrupted: The connection was closed; sending again is safe.
            BrokerRefused: The server refused messages; nothing was stored in the partition that refused, and
                sending again is safe.
            InvalidMessage: The name is that of one partition.
            PartitionsChanging: The number of partitions changed again and again; sending again is safe.
            TooFewReplicas: The messages are stored, but on fewer replicas than required; sending again is
                safe.
            BacklogFull: There was no room for some of the messages, and the other ones are stored. The broker
                knows the numbers of the refused ones until the next push only: send them under new ones.
        """
        first = messages[0]
        outgoing = [message.outgoing for message in messages]
        replies = self.deliver(first.queue, first.sequence, outgoing, first.marker_ttl_ms)
        refused = None
        if replies is not None:
            refused = self._refusal(first.queue, outgoing, replies)
            if refused is not None and may_wait_for_room.get():
                refused = self._wait_for_room(first, outgoing, replies, refused)
        for place, message in enumerate(messages):
            if message.dedup is not None:
                reply = PushReply("accepted", message.outgoing.id) if replies is None else replies[place]
                if reply.status != "full":
                    message.dedup.receive_verdict(reply.status, reply.id, reply.covering, reply.replaced)
        if refused is not None:
            raise refused

    def _wait_for_room(
        self,
        first: StampedMessage,
        outgoing: Sequence[OutgoingRecord],
        replies: list[PushReply],
        refused: BacklogFull,
    ) -> BacklogFull | None:
        """Send refused messages again as long as a quota lets publishers wait for one of them.

        Args:
            first: The first message, which names queue and producer.
            outgoing: All messages.
            replies: Their replies, which are replaced.
            refused: The error for them.

        Returns:
            The error of the messages that have found no room.
        """
        left: BacklogFull | None = refused
        for pause_s in pauses_for_room(self._options, self._clock):
            if left is None or not left.waits:
                break
            time.sleep(pause_s)
            # All of them, because the broker forgets the numbers that a push leaves out.
            places = [place for place, reply in enumerate(replies) if reply.status == "full"]
            again = [outgoing[place] for place in places]
            answers = self.deliver(first.queue, first.sequence, again, first.marker_ttl_ms)
            for place, answer in zip(places, answers or read_push_reply(len(again), again), strict=True):
                replies[place] = answer
            left = self._refusal(first.queue, outgoing, replies)
        return left

    def _refusal(
        self, queue: str, outgoing: Sequence[OutgoingRecord], replies: Sequence[PushReply]
    ) -> BacklogFull | None:
        """Return the error of the messages for which there was no room; None when there was."""
        full = [place for place, reply in enumerate(replies) if reply.status == "full"]
        if not full:
            return None
        place = next((place for place in full if replies[place].waits), full[0])
        task_ids = [replies[place].id for place in full]
        return self.backlog_full(queue, outgoing[place].record, replies[place], task_ids)

    def backlog_full(
        self, queue: str, record: bytes, reply: PushReply, task_ids: Sequence[str] = ()
    ) -> BacklogFull:
        """Return the error of a message for which there was no room.

        Args:
            queue: Name of the target queue.
            record: Its record.
            reply: The reply that says so.
            task_ids: Ids of all such messages of the push; empty when it is the only one.
        """
        tenant = tenant_of(record)
        is_share = tenant in self._queues(queue, False).homes.spreads
        return BacklogFull.of(
            task_ids or (reply.id,), tenant, queue, reply.bound, is_share=is_share, waits=reply.waits
        )

    def deliver(
        self,
        name: str,
        sequence: str,
        messages: Sequence[OutgoingRecord],
        marker_ttl_ms: int,
    ) -> list[PushReply] | None:
        """Send messages that their caller has numbered to the partitions of their tenants.

        Raises the errors of :meth:`push`.

        Args:
            name: Name of the target queue.
            sequence: Producer id of the messages.
            messages: Numbers, task ids and packed records.
            marker_ttl_ms: Lifetime of the producer's marker, in milliseconds.

        Returns:
            A reply for each message; None when each was accepted under its task id, as nearly all are.
        """
        self._reset_after_fork()
        self.begin_push()
        # A message that may be stored by an older map is recognised by that map only.
        tried = self._maps.take_unanswered(name, sequence)
        try:
            return self._deliver(name, sequence, messages, marker_ttl_ms, tried)
        except BaseException as error:
            if tried:
                self._maps.note_unanswered(name, sequence, tried)
            if isinstance(error, _Interrupted):
                sizes = [len(record) for _, _, record in messages]
                raise PushInterrupted.of(error.args[0], name, sizes) from error.args[0]
            if isinstance(error, redis.ResponseError):
                with refusals_named():
                    raise
            raise

    def _deliver(
        self,
        name: str,
        sequence: str,
        messages: Sequence[OutgoingRecord],
        marker_ttl_ms: int,
        tried: list[PartitionMap],
    ) -> list[PushReply] | None:
        """Send messages by the maps that were tried before, and then by the present one.

        The list `tried` gets each map before a message is sent by it.
        """
        older = iter([*tried])
        first = next(older, None)
        queue = self._queues(name, False) if first is None else self._queue_of(name, first)
        replies = self._route(queue, sequence, messages, marker_ttl_ms, tried)
        routings = 0
        while replies and (left := [at for at, reply in enumerate(replies) if reply.status == "misrouted"]):
            homes = next(older, None)
            if homes is not None:
                queue = self._queue_of(name, homes)
            elif routings == ROUTINGS:
                raise PartitionsChanging(
                    f"queue {name!r} had another number of partitions at each of {ROUTINGS} attempts "
                    f"to send {len(left)} messages, of which none is stored: send them again"
                )
            else:
                routings += 1
                queue = self._queues(name, True)
            again = [messages[at] for at in left]
            routed = self._route(queue, sequence, again, marker_ttl_ms, tried)
            for at, reply in zip(left, routed or read_push_reply(len(again), again), strict=True):
                replies[at] = reply
        if self._options.confirm_replicas:
            repeats = replies is not None and any(each.status == "seen" for each in replies)
            self.check_confirmed(self._exchange(_ask_last, self.confirmation(repeats)))
        return replies

    def _route(
        self,
        queue: PartitionedQueue,
        sequence: str,
        messages: Sequence[OutgoingRecord],
        marker_ttl_ms: int,
        tried: list[PartitionMap],
    ) -> list[PushReply] | None:
        """Send messages to the partitions of their tenants, as far as this process knows them.

        The return value is that of :meth:`deliver`.
        """
        if queue.homes not in tried:
            tried.append(queue.homes)
        if queue.homes.total > 1 and len(messages) > 1:
            return self._route_batch(queue, sequence, messages, marker_ttl_ms)
        call = self.call_for(queue, sequence, messages, marker_ttl_ms)
        answer = self._exchange(ask_script, call)
        return None if type(answer) is int else call.parse(answer)

    def call_for(
        self,
        queue: PartitionedQueue,
        sequence: str,
        messages: Sequence[OutgoingRecord],
        marker_ttl_ms: int,
    ) -> ScriptCall[list[PushReply]]:
        """Return the push of one message, or of several ones to a queue of one partition.

        The arguments after `queue` are those of :meth:`deliver`.
        """
        if queue.homes.total == 1:
            home, moving = queue.partitions[0], False
        else:
            _, task_id, record = messages[0]  # a buffered one has other names
            home, moving = queue.route(record, task_id)
        return self._call(home, sequence, messages, marker_ttl_ms, moving)

    def _route_batch(
        self,
        queue: PartitionedQueue,
        sequence: str,
        messages: Sequence[OutgoingRecord],
        marker_ttl_ms: int,
    ) -> list[PushReply] | None:
        routed: dict[tuple[int, bool], tuple[Queue, list[int]]] = {}
        for place, (_, task_id, record) in enumerate(messages):
            home, moving = queue.route(record, task_id)
            key = home.partition.keys.partition, moving
            routed.setdefault(key, (home, []))[1].append(place)
        calls = [
            self._call(home, sequence, [messages[place] for place in places], marker_ttl_ms, moving)
            for (_, moving), (home, places) in routed.items()
        ]
        replies: dict[int, PushReply] = {}
        answers = self._exchange(_ask_together, calls)
        if all(type(answer) is int for answer in answers):
            return None
        for (_, places), call, answer in zip(routed.values(), calls, answers, strict=True):
            replies.update(zip(places, call.parse(answer), strict=True))
        return [replies[place] for place in range(len(messages))]

    def _call(
        self,
        home: Queue,
        sequence: str,
        messages: Sequence[OutgoingRecord],
        marker_ttl_ms: int,
        moving: bool,
    ) -> ScriptCall[list[PushReply]]:
        # Numbers that a partition has seen under another map, or of other tenants, say nothing about these.
        homes = home.partition.homes.text
        producer = sequence if homes == "1" else f"{sequence}.{homes}{MOVING * moving}"
        marker = self._markers.get((home.partition, moving)) if sequence == self._sequence else ""
        if not marker:
            marker = home.partition.keys.producer(producer)
            if sequence == self._sequence:
                self._markers[home.partition, moving] = marker
        self._pushed_with[marker] = marker_ttl_ms
        return home.partition.push(
            messages,
            producer=producer,
            marker_ttl_ms=marker_ttl_ms,
            head_start_us=home.head_start_us,
            wall_us=int(self._clock.wall() * 1_000_000),
            moving=moving,
        )

    def confirmation(self, repeats: bool) -> list[tuple[Any, ...]]:
        """Return the commands that wait for replicas to confirm the last push on the same connection.

        Args:
            repeats: Messages were stored before, perhaps over another connection.
        """
        # WAIT waits for the writes of its own connection, and a message that was seen is not a write.
        writes = [("PEXPIRE", *each) for each in self._pushed_with.items()] if repeats else []
        self._pushed_with.clear()
        return [*writes, ("WAIT", self._options.confirm_replicas, self._confirm_timeout_ms())]

    def check_confirmed(self, confirmed: int) -> None:
        """Check how many replicas have confirmed a push.

        Raises:
            TooFewReplicas: They are fewer than ``dq_confirm_replicas``.
        """
        replicas, timeout_ms = self._options.confirm_replicas, self._confirm_timeout_ms()
        if confirmed < replicas:
            longer = "; a longer dq_publish_timeout or socket_timeout gives them more time"
            raise TooFewReplicas(
                f"dq_confirm_replicas = {replicas}, but {confirmed} replicas confirmed the message within "
                f"{timeout_ms} ms. It is stored on its master and will run, unless the master is "
                "lost first; a second call is a second message. Start replicas ('celery dq doctor' names the "
                f"masters that lack them), or lower the setting{longer * (timeout_ms < CONFIRM_TIMEOUT_MS)}"
            )

    def _confirm_timeout_ms(self) -> int:
        socket_timeout_s = self._pool().connection_kwargs.get("socket_timeout")
        if socket_timeout_s is None:
            return CONFIRM_TIMEOUT_MS
        # WAIT with a timeout of 0 would wait for ever.
        return max(1, min(CONFIRM_TIMEOUT_MS, int(socket_timeout_s * 1000 * CONFIRM_SHARE)))

    def _exchange(self, converse: Callable[[PipelinedConnection, T], R], requests: T) -> R:
        """Lend the connection to a function that reads each answer; close it when one may be left.

        A time limit or an interrupt may strike between a command and its answer. The next push would take
        that answer for its own.
        """
        connection = self._connection or self._open()
        try:
            return converse(connection, requests)
        except redis.ResponseError as error:
            if isinstance(error, NodeClosedConnection):
                raise _Interrupted(error) from error
            raise  # it was the answer
        except BaseException as error:
            self.close()
            if isinstance(error, redis.ConnectionError):
                raise _Interrupted(error) from error
            raise

    def _open(self) -> PipelinedConnection:
        connection = PipelinedConnection(self._pool(), may_repeat=True)  # a batch is stored once
        try:
            connection.open()
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def close(self) -> None:
        """Return the connection to its pool; the next push takes another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def retire(self, client: redis.Redis) -> None:
        """Shorten the lifetime of the producer's markers, because none of its messages will be sent again.

        Raises:
            redis.RedisError: Redis did not answer; the markers keep their usual lifetime.
        """
        if commands := self.retirement():
            with client.pipeline(transaction=False) as pipe:
                for _, marker, life_ms in commands:
                    pipe.pexpire(marker, life_ms)
                pipe.execute()

    def retirement(self) -> list[tuple[str, str, int]]:
        """Return the commands of :meth:`retire`, and forget the markers."""
        commands = [("PEXPIRE", marker, RETIRED_MARKER_MS) for marker in self._markers.values()]
        self._markers.clear()
        return commands


def _ask_together(connection: PipelinedConnection, calls: Sequence[ScriptCall[Any]]) -> list[Any]:
    """Send the calls together. When one is refused, its error is raised, and the others were executed."""
    answers = run_on(calls, connection, check_health=True)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _ask_last(connection: PipelinedConnection, commands: Sequence[tuple[Any, ...]]) -> int:
    """Send the commands one after another, and return the last answer, a number."""
    answers = [connection.ask(command) for command in commands]
    return int(answers[-1])


logger = shown_logger(__name__)

#: Maximum number of attempts to send a batch.
BATCH_ATTEMPTS = 4


class RedisPublishBatch(PublishBatch):
    """A batch with one push for many messages of a queue."""

    _waiting: list[StampedMessage]

    def flush(self) -> None:
        """Send all messages in order, in one push per run of messages of one queue and producer.

        Raises:
            OperationalError: Unanswered messages stay in the batch; flushing again is safe.
            BacklogFull: All messages were answered, and there was no room for some of them.
        """
        refused: BacklogFull | None = None
        with library_errors(self.channel.connection.client):
            while self._waiting:
                waiting, run = self._waiting[:1000], 1
                queue, sequence = waiting[0][:2]
                while run < len(waiting) and waiting[run][:2] == (queue, sequence):
                    run += 1
                try:
                    self._push(waiting[:run])
                except BacklogFull as error:
                    if refused is not None:
                        error.task_ids = refused.task_ids + error.task_ids
                    refused = error
                del self._waiting[:run]
        if refused is not None:
            raise refused

    def _push(self, messages: list[StampedMessage]) -> None:
        # Kombu can retry a publish, but not a batch, which it discards when it opens a new channel.
        if not any(self._answered(messages) for _ in range(BATCH_ATTEMPTS - 1)):
            self.channel.publisher.push(messages)

    def _answered(self, messages: list[StampedMessage]) -> bool:
        try:
            self.channel.publisher.push(messages)
        except self.channel.connection_errors as exc:
            logger.info(
                "A batch of %d messages for queue %s was not answered (%s); it is sent again.",
                len(messages),
                messages[0].queue,
                exc,
                extra={"event": "batch_sent_again", "queue": messages[0].queue},
            )
            return False
        return True
