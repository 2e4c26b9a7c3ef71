"""Puts messages into partitions, once each.

A publisher is a *lane*: it belongs to one channel, has one call in flight and
stamps every message once with its name and the next number. The stamp stays on
the message (in its properties) when kombu publishes it again after a lost
connection, and the push script changes nothing for a number that it has seen.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import redis
from redis.exceptions import NoScriptError

from celery_dq.clock import Clock
from celery_dq.errors import InvalidMessage, TooFewReplicas
from celery_dq.hooks import DEDUP, DedupTicket
from celery_dq.options.sections import Options
from celery_dq.transport import envelope
from celery_dq.transport.redis.partition import Call
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.record import Record
from celery_dq.transport.redis.replies import Outgoing, Pushed
from celery_dq.transport.redis.wire import Wire
from celery_dq.transport.tenant import check_priority, check_tenant

logger = logging.getLogger(__name__)

#: The property that carries the stamps of a message: queue → (lane, number, task id), or with a fourth: the
#: milliseconds for which the lane's number is remembered.
STAMPS = "dq_stamps"
#: Properties that the transport makes anew at delivery.
_MADE_AT_DELIVERY = ("delivery_tag", "body_encoding", "priority", "tenant", STAMPS, DEDUP)
#: How often a batch is sent until somebody answers.
BATCH_ATTEMPTS = 4
#: A time in µs from which on a double would lose digits: in the year 2255.
LATEST_US = 9_000_000_000_000_000
#: Milliseconds that a push waits for replicas to confirm.
CONFIRM_TIMEOUT_MS = 2_000
#: Milliseconds that the markers of a lane live after it was closed in good order.
RETIRED_MARKER_MS = 60_000


@dataclass(frozen=True)
class Stamped:
    """A message ready to be pushed."""

    lane: str
    outgoing: Outgoing
    ticket: DedupTicket | None = None
    marker_ttl_ms: int | None = None


def stamp(message: dict[str, Any], queue: str, lane: str, number: Callable[[], int], now_us: int) -> Stamped:
    """Check *message*, build its record, and stamp it unless it was stamped before.

    Arguments:
        message: what kombu's ``prepare_message`` made.
        queue: where it goes.
        lane: name of the publisher.
        number: returns the lane's next number for this queue.
        now_us: wall time, for a relative expiration.

    Raises:
        InvalidMessage: its tenant, priority or times are unusable. Nothing was sent.
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
    ticket: DedupTicket | None = properties.get(DEDUP)
    record = Record(
        tenant=check_tenant(properties.get("tenant", "")),
        task=task if isinstance(task, str) else "",
        priority=check_priority(properties.get("priority")),
        due_us=_due(headers.get("eta")),
        expires_us=_expires(headers.get("expires"), properties.get("expiration"), now_us),
        envelope=_envelope(message, headers, properties, queue),
        body=body,
        dedup=ticket.section if ticket is not None else b"",
    )
    stamps = properties.setdefault(STAMPS, {})
    known = stamps.get(queue)
    if known is None:
        known = stamps[queue] = (lane, number(), task_id or uuid.uuid4().hex)
    marker_ttl_ms = known[3] if len(known) > 3 else None
    return Stamped(known[0], Outgoing(known[1], known[2], record.pack()), ticket, marker_ttl_ms)


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
    """Return an ISO 8601 text or a datetime as µs since the epoch; without a zone it is UTC."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value[:-1] + "+00:00" if value.endswith("Z") else value)
        if value.tzinfo is None:
            value = value.replace(tzinfo=timezone.utc)
        # 0 means that there is none; what was before 1970 is past all the same.
        instant_us = max(int(value.timestamp() * 1_000_000), 1)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise InvalidMessage(
            f"{name} = {value!r} is not a time: give a datetime or an ISO 8601 text"
        ) from None
    if instant_us >= LATEST_US:
        raise InvalidMessage(f"{name} = {value} is too far away: the year 2255 is the last; leave it out")
    return instant_us


class Publisher:
    """The lane of one channel.

    Arguments:
        pool: where its connection comes from.
        options: lifetime of markers, replicas to wait for.
        clock: wall time, for relative expirations.
    """

    def __init__(self, pool: Callable[[], redis.ConnectionPool], options: Options, clock: Clock) -> None:
        self._pool = pool
        self._options = options
        self._clock = clock
        self._pid = 0
        self._lane = ""
        self._numbers: dict[str, int] = {}
        self._markers: set[str] = set()
        self._wire: Wire | None = None

    def _be_ours(self) -> None:
        """After a fork parent and child must not number messages, nor read answers, in one lane."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lane = uuid.uuid4().hex
            self._numbers = {}
            self._markers = set()
            self.close()

    def stamp(self, queue: Queue, message: dict[str, Any]) -> Stamped:
        """See :func:`stamp`."""
        self._be_ours()
        key = queue.key

        def number() -> int:
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
            return number

        return stamp(message, queue.name, self._lane, number, int(self._clock.wall() * 1_000_000))

    def number(self, queue: Queue, task_id: str, record: bytes, ticket: DedupTicket | None = None) -> Stamped:
        """Stamp a message whose record is made already, its dedup section included."""
        self._be_ours()
        key = queue.key
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        return Stamped(self._lane, Outgoing(number, task_id, record), ticket)

    def push(self, queue: Queue, messages: Sequence[Stamped]) -> list[Pushed]:
        """Send *messages*, all of one lane, and wait for the answer.

        Raises:
            redis.RedisError: no answer, or the server refused; sending again is safe.
            TooFewReplicas: it is stored, but fewer replicas than asked for have it; sending again is safe.
        """
        lane = messages[0].lane
        self._be_ours()
        if lane == self._lane:
            self._markers.add(queue.partition.keys.producer(lane))
        outgoing = [message.outgoing for message in messages]
        call, answer = self._deliver(queue, lane, outgoing, messages[0].marker_ttl_ms)
        pushed = call.parse(answer)
        for message, result in zip(messages, pushed, strict=True):
            if message.ticket is not None:
                message.ticket.told(*result)
        return pushed

    def deliver(self, queue: Queue, lane: str, messages: Sequence[Outgoing]) -> None:
        """Send messages that somebody else has numbered, and wait for the answer; raises as :meth:`push`."""
        self._be_ours()
        self._deliver(queue, lane, messages)

    def _deliver(
        self, queue: Queue, lane: str, messages: Sequence[Outgoing], marker_ttl_ms: int | None = None
    ) -> tuple[Call[list[Pushed]], Any]:
        options = self._options
        call = queue.partition.push(
            messages,
            producer=lane,
            marker_ttl_ms=marker_ttl_ms or options.producer_marker_ttl_us // 1000,
            head_start_us=queue.head_start_us,
        )
        try:
            answer = self._ask(call)
            if options.confirm_replicas:
                self._confirm(options.confirm_replicas)
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            self.close()
            raise
        return call, answer

    def _ask(self, call: Call[list[Pushed]]) -> Any:
        wire = self._open()
        # Only here, where waiting is the point, may redis-py check the connection's health.
        wire.connection.send_command(*call.command())
        try:
            return wire.read()
        except NoScriptError:
            wire.send(call.command(full=True))
            return wire.read()

    def _confirm(self, replicas: int) -> None:
        wire = self._open()
        wire.send(("WAIT", replicas, CONFIRM_TIMEOUT_MS))
        confirmed = int(wire.read())
        if confirmed < replicas:
            raise TooFewReplicas(
                f"dq_confirm_replicas = {replicas}, but only {confirmed} replicas had the message within "
                f"{CONFIRM_TIMEOUT_MS} ms: it is stored on the master and possibly sent"
            )

    def _open(self) -> Wire:
        if self._wire is None:
            self._wire = Wire(self._pool())
        self._wire.open()
        return self._wire

    def close(self) -> None:
        """Give the connection back; the next push takes a new one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def retire(self, client: redis.Redis) -> None:
        """The lane ends in good order: nothing of it will be sent again, so its markers may go soon.

        Raises:
            redis.RedisError: no answer; the markers then live as long as any.
        """
        if self._markers:
            with client.pipeline(transaction=False) as pipe:
                for marker in self._markers:
                    pipe.pexpire(marker, RETIRED_MARKER_MS)
                pipe.execute()
            self._markers.clear()


class PublishBatch:
    """Kombu's ``Producer.batch()``: one push for many messages of a queue.

    Arguments:
        channel: the channel that publishes.
        max_size: messages after which it flushes by itself.
    """

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[tuple[Queue, Stamped]] = []

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Accept one message: it is checked now and sent with the others."""
        return self.channel.basic_publish(message, _publish_batch=self, **kwargs)

    def add(self, queue: Queue, stamped: Stamped) -> None:
        """Called by the channel once it knows where the message goes."""
        self._waiting.append((queue, stamped))
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Send what waits, in order, neighbours of one queue and lane together.

        Raises:
            redis.RedisError: what was not answered stays here; flushing again is safe.
        """
        while self._waiting:
            queue, first = self._waiting[0]
            run = 1
            while (
                run < len(self._waiting)
                and run < 1000
                and self._waiting[run][0] is queue
                and self._waiting[run][1].lane == first.lane
            ):
                run += 1
            self._push(queue, [stamped for _, stamped in self._waiting[:run]])
            del self._waiting[:run]

    def _push(self, queue: Queue, messages: list[Stamped]) -> None:
        # Kombu can retry a publish, but not a batch: with a new channel it gives the batch up.
        if not any(self._answered(queue, messages) for _ in range(BATCH_ATTEMPTS - 1)):
            self.channel.publisher.push(queue, messages)

    def _answered(self, queue: Queue, messages: list[Stamped]) -> bool:
        try:
            self.channel.publisher.push(queue, messages)
        except self.channel.connection_errors as exc:
            logger.info("A batch for queue %s is sent again: %s.", queue.name, exc)
            return False
        return True

    def discard(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def close(self) -> None:
        """Nothing to give back: the connection is the channel's."""
