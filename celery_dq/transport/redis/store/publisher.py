"""Publishes messages into partitions, exactly once each.

A publisher is a *producer sequence*: it belongs to one channel, and has one call in flight. It stamps every
message once with its producer id and the next number. The stamp stays in the properties of the message when
kombu publishes it again after a lost connection. The push script ignores a number that it has seen.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import redis
from redis.exceptions import NoScriptError

from celery_dq.clock import Clock
from celery_dq.compat.kombu_publishing import library_errors
from celery_dq.errors import InvalidMessage, TooFewReplicas
from celery_dq.options.sections import Options
from celery_dq.per_process import OwnerProcess
from celery_dq.protocols import COUNTDOWN, DEDUP_PROPERTY, DedupRequest
from celery_dq.transport import envelope
from celery_dq.transport.redis.store.partition import ScriptCall
from celery_dq.transport.redis.store.pipelined_connection import PipelinedConnection
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.record import RedisRecord
from celery_dq.transport.redis.store.refusals import refusals_named
from celery_dq.transport.redis.store.replies import OutgoingRecord, PushReply
from celery_dq.transport.tenant import check_priority, check_tenant

logger = logging.getLogger(__name__)

#: The property that carries the stamps of a message: queue → (producer id, number, task id). An optional
#: fourth item is the lifetime of the producer's marker, in milliseconds.
STAMPS = "dq_stamps"
#: Properties that the transport sets at delivery, so that they are not stored.
_MADE_AT_DELIVERY = ("delivery_tag", "body_encoding", "priority", "tenant", STAMPS, DEDUP_PROPERTY, COUNTDOWN)
#: Maximum number of attempts to send a batch.
BATCH_ATTEMPTS = 4
#: The first time, in µs, that a double would not hold exactly: in the year 2255.
LATEST_US = 9_000_000_000_000_000
#: Milliseconds that a push waits for replicas to confirm.
CONFIRM_TIMEOUT_MS = 2_000
#: Lifetime, in milliseconds, of a producer's markers after it was closed without an error.
RETIRED_MARKER_MS = 60_000


@dataclass(frozen=True)
class StampedMessage:
    """A message ready to be pushed.

    Attributes:
        sequence: Producer id.
        outgoing: Number, task id and packed record.
        request: Receives the verdict on a call with a dedup key; None without a key.
        marker_ttl_ms: Lifetime of the producer's marker, in milliseconds; None for the setting.
    """

    sequence: str
    outgoing: OutgoingRecord
    dedup: DedupRequest | None = None
    marker_ttl_ms: int | None = None


def stamp(
    message: dict[str, Any], queue: str, sequence: str, number: Callable[[], int], now_us: int
) -> StampedMessage:
    """Check *message*, build its record, and stamp it unless it was stamped before.

    Args:
        message: Message made by ``prepare_message`` of kombu.
        queue: Name of the target queue.
        sequence: Producer id.
        number: Returns the producer's next number for this queue.
        now_us: Wall time in microseconds, for a relative expiration.

    Returns:
        The stamped message.

    Raises:
        InvalidMessage: The tenant, the priority or a time of the message is unusable. Nothing was sent.
    """
    headers, properties = message["headers"], message["properties"]
    body = message["body"]
    if not isinstance(body, str):
        body = bytes(body)
    task_id = headers.get("id") or properties.get("message_id") or ""
    if task_id and not (isinstance(task_id, str) and len(task_id.encode()) <= 200):
        raise InvalidMessage(
            f"task_id = {str(task_id)[:60]!r}… is not a text of at most 200 bytes: choose a shorter one"
        )
    task = headers.get("task") or ""
    request: DedupRequest | None = properties.get(DEDUP_PROPERTY)
    record = RedisRecord(
        tenant=check_tenant(properties.get("tenant", "")),
        task=task if isinstance(task, str) else "",
        priority=check_priority(properties.get("priority")),
        due_us=_due(headers.get("eta")),
        expires_us=_expires(headers.get("expires"), properties.get("expiration"), now_us),
        envelope=_envelope(message, headers, properties, queue),
        body=body,
        dedup=request.section if request is not None else b"",
        counted=bool(properties.get(COUNTDOWN)),
    )
    stamps = properties.setdefault(STAMPS, {})
    known = stamps.get(queue)
    if known is None:
        known = stamps[queue] = (sequence, number(), task_id or uuid.uuid4().hex)
    marker_ttl_ms = known[3] if len(known) > 3 else None
    return StampedMessage(known[0], OutgoingRecord(known[1], known[2], record.pack()), request, marker_ttl_ms)


def _envelope(
    message: dict[str, Any], headers: dict[str, Any], properties: dict[str, Any], queue: str
) -> bytes:
    kept = {key: value for key, value in properties.items() if key not in _MADE_AT_DELIVERY}
    info = kept.get("delivery_info")
    if isinstance(info, dict):
        info = {key: value for key, value in info.items() if key != "redelivered"}
        if info.get("exchange") == "":
            del info["exchange"]
        if info.get("routing_key") == queue:
            del info["routing_key"]
        if info:
            kept["delivery_info"] = info
        else:
            del kept["delivery_info"]
    try:
        return envelope.pack(headers, kept, message["content-type"], message["content-encoding"])
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidMessage(f"a header or property cannot be written as JSON: {exc}") from exc


def _due(eta: Any) -> int:
    return 0 if eta is None else _instant_us("eta", eta)


def _expires(expires: Any, expiration: Any, now_us: int) -> int:
    if expires is not None:
        return _instant_us("expires", expires)
    if expiration is None:
        return 0
    try:
        return now_us + int(float(expiration) * 1000)
    except (TypeError, ValueError, OverflowError):
        raise InvalidMessage(f"expiration = {expiration!r} is not a number of milliseconds") from None


def _instant_us(name: str, value: Any) -> int:
    """Return an ISO 8601 text or a datetime as µs since the epoch. A value without a time zone is UTC."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value[:-1] + "+00:00" if value.endswith("Z") else value)
        if value.tzinfo is None:
            value = value.replace(tzinfo=timezone.utc)
        # 0 means that there is no time, so times before 1970 become 1.
        instant_us = max(int(value.timestamp() * 1_000_000), 1)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise InvalidMessage(
            f"{name} = {value!r} is not a time: give a datetime or an ISO 8601 text"
        ) from None
    if instant_us >= LATEST_US:
        raise InvalidMessage(f"{name} = {value} is too far away: the year 2255 is the last; leave it out")
    return instant_us


class RedisPublisher:
    """The producer sequence of one channel.

    Args:
        pool: Returns the pool that the connection is taken from.
        options: Lifetime of markers, number of replicas to wait for.
        clock: Source of wall time, for relative expirations and countdowns.
    """

    def __init__(self, pool: Callable[[], redis.ConnectionPool], options: Options, clock: Clock) -> None:
        self._pool = pool
        self._options = options
        self._clock = clock
        self._connection: PipelinedConnection | None = None
        self._begin()

    def _begin(self) -> None:
        self._owner = OwnerProcess()
        self._sequence = uuid.uuid4().hex
        self._numbers: dict[str, int] = {}
        self._markers: set[str] = set()

    def _reset_after_fork(self) -> None:
        """Start a new producer sequence after a fork: parent and child must not share numbers or answers."""
        if not self._owner.is_current:
            self._begin()
            self.close()

    def stamp(self, queue: Queue, message: dict[str, Any]) -> StampedMessage:
        """Stamp *message* with the next number of this producer; see :func:`stamp`."""
        self._reset_after_fork()
        key = queue.key

        def number() -> int:
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
            return number

        return stamp(message, queue.name, self._sequence, number, int(self._clock.wall() * 1_000_000))

    def number(
        self, queue: Queue, task_id: str, record: bytes, request: DedupRequest | None = None
    ) -> StampedMessage:
        """Stamp a message whose record is already packed.

        Args:
            queue: Target queue.
            task_id: Task id.
            record: Packed record, with its dedup section.
            request: Receives the verdict on a call with a dedup key.
        """
        self._reset_after_fork()
        key = queue.key
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        return StampedMessage(self._sequence, OutgoingRecord(number, task_id, record), request)

    def push(self, queue: Queue, messages: Sequence[StampedMessage]) -> list[PushReply]:
        """Send *messages*, all of one producer, and wait for the answer.

        Args:
            queue: Target queue.
            messages: Stamped messages.

        Returns:
            The answers of the push script, in the order of the messages.

        Raises:
            redis.RedisError: Redis did not answer; sending again is safe.
            BrokerRefused: The server refused the messages; nothing was stored.
            TooFewReplicas: The messages are stored, but on fewer replicas than required; sending again is
                safe.
        """
        sequence = messages[0].sequence
        self._reset_after_fork()
        if sequence == self._sequence:
            self._markers.add(queue.partition.keys.producer(sequence))
        outgoing = [message.outgoing for message in messages]
        call, answer = self._deliver(queue, sequence, outgoing, messages[0].marker_ttl_ms)
        pushed = call.parse(answer)
        for message, result in zip(messages, pushed, strict=True):
            if message.dedup is not None:
                message.dedup.receive_verdict(*result)
        return pushed

    def deliver(self, queue: Queue, sequence: str, messages: Sequence[OutgoingRecord]) -> None:
        """Send messages that the caller has numbered, and wait for the answer.

        Raises the errors of :meth:`push`.

        Args:
            queue: Target queue.
            sequence: Producer id of the messages.
            messages: Numbers, task ids and packed records.
        """
        self._reset_after_fork()
        self._deliver(queue, sequence, messages)

    def _deliver(
        self,
        queue: Queue,
        sequence: str,
        messages: Sequence[OutgoingRecord],
        marker_ttl_ms: int | None = None,
    ) -> tuple[ScriptCall[list[PushReply]], Any]:
        options = self._options
        call = queue.partition.push(
            messages,
            producer=sequence,
            marker_ttl_ms=marker_ttl_ms or options.producer_marker_ttl_us // 1000,
            head_start_us=queue.head_start_us,
            wall_us=int(self._clock.wall() * 1_000_000),
        )
        try:
            with refusals_named():
                answer = self._ask(call)
                if options.confirm_replicas:
                    self._confirm(options.confirm_replicas)
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            self.close()
            raise
        return call, answer

    def _ask(self, call: ScriptCall[list[PushReply]]) -> Any:
        connection = self._open()
        # Here redis-py may check the connection's health, because this call blocks anyway.
        connection.connection.send_command(*call.command())
        try:
            return connection.read()
        except NoScriptError:
            connection.send(call.command(full=True))
            return connection.read()

    def _confirm(self, replicas: int) -> None:
        connection = self._open()
        connection.send(("WAIT", replicas, CONFIRM_TIMEOUT_MS))
        confirmed = int(connection.read())
        if confirmed < replicas:
            raise TooFewReplicas(
                f"dq_confirm_replicas = {replicas}, but only {confirmed} replicas had the message within "
                f"{CONFIRM_TIMEOUT_MS} ms: it is stored on the master and possibly sent"
            )

    def _open(self) -> PipelinedConnection:
        if self._connection is None:
            self._connection = PipelinedConnection(self._pool())
        self._connection.open()
        return self._connection

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
        if self._markers:
            with client.pipeline(transaction=False) as pipe:
                for marker in self._markers:
                    pipe.pexpire(marker, RETIRED_MARKER_MS)
                pipe.execute()
            self._markers.clear()


class RedisPublishBatch:
    """The batch of ``Producer.batch()`` of kombu: one push for many messages of a queue.

    Args:
        channel: The channel that publishes.
        max_size: Number of messages after which the batch is flushed.
    """

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[tuple[Queue, StampedMessage]] = []

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Add one message to the batch; it is checked now and sent with the others."""
        return self.channel.basic_publish(message, _publish_batch=self, **kwargs)

    def add(self, queue: Queue, stamped: StampedMessage) -> None:
        """Add a stamped message; called by the channel for each queue that the message is routed to."""
        self._waiting.append((queue, stamped))
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Send all messages in order, in one push per run of messages of one queue and producer.

        Raises:
            OperationalError: Unanswered messages stay in the batch; flushing again is safe.
        """
        with library_errors(self.channel.connection.client):
            while self._waiting:
                queue, first = self._waiting[0]
                run = 1
                while (
                    run < len(self._waiting)
                    and run < 1000
                    and self._waiting[run][0] is queue
                    and self._waiting[run][1].sequence == first.sequence
                ):
                    run += 1
                self._push(queue, [stamped for _, stamped in self._waiting[:run]])
                del self._waiting[:run]

    def _push(self, queue: Queue, messages: list[StampedMessage]) -> None:
        # Kombu can retry a publish, but not a batch, which it discards when it opens a new channel.
        if not any(self._answered(queue, messages) for _ in range(BATCH_ATTEMPTS - 1)):
            self.channel.publisher.push(queue, messages)

    def _answered(self, queue: Queue, messages: list[StampedMessage]) -> bool:
        try:
            self.channel.publisher.push(queue, messages)
        except self.channel.connection_errors as exc:
            logger.info(
                "A batch of %d messages for queue %s was not answered (%s); it is sent again.",
                len(messages),
                queue.name,
                exc,
                extra={"event": "batch_sent_again", "queue": queue.name},
            )
            return False
        return True

    def discard(self) -> None:
        """Discard the messages that are not yet sent."""
        self._waiting.clear()

    def close(self) -> None:
        """Do nothing, because the connection belongs to the channel."""
