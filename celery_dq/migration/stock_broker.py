"""The stock broker as the source of a migration: kombu's Redis transport, its keys and its messages.

A message goes through three places. ``stage`` takes it out of the list of its queue, so that no stock worker
receives it, and puts it into a list of its own. The target gets it from there, under a number. ``confirm``
removes it. A process that dies leaves the staged messages with their numbers; the next run sends them again
under the same numbers, and the target ignores the numbers that it has.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import uuid
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, TypeAlias

import redis
from kombu.message import Message as KombuMessage
from kombu.utils.json import dumps, loads

from celery_dq.compat.celery_calls import arguments_of
from celery_dq.errors import ConfigurationError, DQError, InvalidMessage, InvalidRequest, described
from celery_dq.inspector.queues import MIGRATION
from celery_dq.inspector.redis_values import text
from celery_dq.keys import MigrationKeys
from celery_dq.protocols import DEDUP_HEADER, DEDUP_PROPERTY, DELIVERIES_HEADER, QUEUE_HEADER, TOKEN_HEADER
from celery_dq.scripts.loader import ScriptSet
from celery_dq.transport import envelope
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.in_flight import shown_eta
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.tenant import NO_TENANT

#: ``inverted``: the order is kept, 0 becomes 9. ``same``: the numbers are kept.
Priorities: TypeAlias = Literal["inverted", "same"]


@dataclass(frozen=True)
class _MigratedDedup:
    """The dedup request of a call that was published to another broker; its caller waits for no verdict."""

    section: bytes

    def receive_verdict(self, status: str, message_id: str, covering: str, replaced: str) -> None:
        """Do nothing: a call that is covered by another one follows it, and gets its result."""


class StockReader:
    """Reads messages of the stock broker for the publisher of the tenant broker.

    Args:
        tenant_of: Returns the tenant of a task, by its name, the tenant that the call names, arguments and
            headers; None for a call that names none.
        accept: Content types that the workers decode.
        priorities: How priorities are converted.
    """

    def __init__(
        self, tenant_of: Callable[..., str | None], accept: AbstractSet[str], priorities: Priorities
    ) -> None:
        self._tenant_of = tenant_of
        self._accept = accept
        self._priorities = priorities

    def read(self, raw: bytes) -> dict[str, Any]:
        """Return a message in the form of kombu's ``prepare_message``.

        Raises:
            InvalidMessage: It is not a message of kombu, no worker could decode it, or its tenant is invalid.
        """
        message = _parsed(raw)
        headers, properties = message["headers"], message["properties"]
        message["body"] = body = _decoded_body(message)
        properties["priority"] = self._priority(properties.get("priority"))
        task = headers.get("task")
        if isinstance(task, str):
            content = self._content(message, body)
            if not properties.get("tenant"):
                properties["tenant"] = self._tenant(task, headers, properties, content)
        asked = headers.pop(DEDUP_HEADER, None)
        if asked:
            properties[DEDUP_PROPERTY] = _dedup(asked)
        for name in ("body_encoding", "delivery_tag"):
            properties.pop(name, None)
        return message

    def _priority(self, given: Any) -> int:
        # The same as in kombu, which chooses the list by it.
        try:
            known = min(max(int(given), 0), 9)
        except (TypeError, ValueError, OverflowError):
            known = 0
        return 9 - known if self._priorities == "inverted" else known

    def _content(self, message: dict[str, Any], body: str | bytes) -> Any:
        if message["content-type"] not in self._accept:
            raise InvalidMessage(
                f"its content type {message['content-type']!r} is not in accept_content of this app"
            )
        try:
            return KombuMessage(
                body=body,  # type: ignore[arg-type]  # its stubs know no bytes
                content_type=message["content-type"],
                content_encoding=message["content-encoding"],
                headers=message["headers"],
                accept=self._accept,
            ).payload
        except Exception as exc:
            raise InvalidMessage(f"its body cannot be decoded: {exc}") from exc

    def _tenant(self, task: str, headers: Any, properties: Any, content: Any) -> str:
        try:
            args, kwargs, _ = arguments_of((headers, properties, content))
            return self._tenant_of(task, None, args, kwargs, headers) or NO_TENANT
        except DQError as exc:
            raise InvalidMessage(f"it has no tenant: {exc}") from exc
        except Exception as exc:
            raise InvalidMessage(f"its body is not that of a task: {described(exc)}") from exc


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        message = loads(raw)
    except Exception as exc:
        raise InvalidMessage(f"it is not JSON: {described(exc)}") from exc
    parts = {"headers": dict, "properties": dict, "body": str, "content-type": str, "content-encoding": str}
    if not isinstance(message, dict) or not all(isinstance(message.get(part), parts[part]) for part in parts):
        raise InvalidMessage(
            "it is not a message of kombu, which has a body, headers, properties, and the type and encoding "
            "of the body"
        )
    return message


def _decoded_body(message: dict[str, Any]) -> str | bytes:
    body: str = message["body"]
    if message["properties"].get("body_encoding") != "base64":
        return body
    try:
        decoded = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidMessage(f"its body is not base64: {exc}") from exc
    if message["content-encoding"].lower() in ("utf-8", "us-ascii"):
        try:
            return decoded.decode()
        except UnicodeDecodeError:
            pass  # compressed
    return decoded


def _dedup(asked: Any) -> _MigratedDedup:
    try:
        section = DedupSection(
            str(asked["key"]),
            int(float(asked["timeout"] or 0) * 1_000_000),
            replace=asked["policy"] == "replace",
            waiting=bool(asked["waiting"]),
            follow=True,
            awaited=True,
        )
        return _MigratedDedup(section.pack())
    except Exception as exc:
        raise InvalidMessage(f"its dedup header cannot be read: {described(exc)}") from exc


def as_restored(value: bytes) -> tuple[bytes, str, str]:
    """Return an unacknowledged message as a list has it when kombu restores it, its exchange and routing key.

    Raises:
        InvalidMessage: It is not an unacknowledged message of kombu.
    """
    try:
        message, exchange, routing_key = json.loads(value)
        message["headers"]["redelivered"] = True
        message["properties"]["delivery_info"]["redelivered"] = True
        return dumps(message).encode(), str(exchange or ""), str(routing_key)
    except Exception as exc:
        raise InvalidMessage(f"it is not an unacknowledged message of kombu: {described(exc)}") from exc


def as_stock_message(raw: bytes, queue: str, priorities: Priorities) -> tuple[int, str]:
    """Return the priority of a record on the stock broker, and its message as a list has it.

    Args:
        raw: The record.
        queue: The queue, which a stock worker finds by the default exchange.
        priorities: How priorities are converted.

    Raises:
        InvalidMessage: The record cannot be read, or written in that form.
    """
    try:
        record = MessageRecord.unpack(raw)
        headers, properties, content_type, content_encoding = envelope.unpack(record.envelope)
        for name in (TOKEN_HEADER, QUEUE_HEADER, DELIVERIES_HEADER):
            headers.pop(name, None)
        if record.due_us:
            # A reschedule has changed the due time only.
            headers["eta"] = shown_eta(headers.get("eta"), record.due_us)
        if record.dedup:
            headers[DEDUP_HEADER] = DedupSection.unpack(record.dedup).header()
        if record.tenant:
            properties["tenant"] = record.tenant
        priority = 9 - record.priority if priorities == "inverted" else record.priority
        properties["priority"] = priority
        info = properties.setdefault("delivery_info", {})
        info["exchange"], info["routing_key"] = "", queue
        properties["body_encoding"] = "base64"
        properties["delivery_tag"] = str(uuid.uuid4())
        body = record.body.encode("utf-8", "surrogatepass") if isinstance(record.body, str) else record.body
        message: dict[str, Any] = {
            "body": base64.b64encode(body).decode(),
            "content-encoding": content_encoding,
            "content-type": content_type,
            "headers": headers,
            "properties": properties,
        }
        return priority, dumps(message)
    except Exception as exc:
        raise InvalidMessage(f"it cannot be read: {described(exc)}") from exc


#: The schemes of kombu's Redis transport.
STOCK_SCHEMES = ("redis", "rediss", "sentinel")
#: Seconds for which the workers may answer.
TIMEOUT_S = 1.0


def load_scripts() -> ScriptSet:
    """Read the scripts of the migration."""
    return ScriptSet(files(__package__) / "lua", "stage", "stage_unacked", "confirm", "forget", "receive")


class StockBroker:
    """The keys of kombu's Redis transport.

    Args:
        connection: A kombu connection with one of :data:`STOCK_SCHEMES`.

    Raises:
        redis.RedisError: The server does not answer, or refuses the connection.
    """

    def __init__(self, connection: Any) -> None:
        channel = connection.default_channel
        self.connection = connection
        #: A client without kombu's rewriting of keys, which covers some of the commands only.
        self.client: Any = redis.Redis(connection_pool=channel.pool)
        self._database = int(channel.pool.connection_kwargs.get("db") or 0)
        self._prefix: str = channel.global_keyprefix
        self._separator: str = channel.sep
        self._steps: tuple[int, ...] = tuple(channel.priority_steps)
        self._bindings = self._prefix + channel.keyprefix_queue
        self.unacked = self._prefix + channel.unacked_key
        self._unacked_index = self._prefix + channel.unacked_index_key
        self._keys = MigrationKeys(self._prefix)
        #: The producer id of the migration that this process has begun or joined.
        self._producer = ""
        self._scripts = load_scripts()

    # The queues.

    def queue_names(self, excluded_exchanges: Sequence[str]) -> set[str]:
        """Return the queues that are bound to an exchange.

        Args:
            excluded_exchanges: Exchanges of broadcasts, replies and events.
        """
        start, end = self._bindings.split("%s")
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", start) + "*"
        names: set[str] = set()
        for key in self.client.scan_iter(match=pattern, count=1000):
            exchange = text(key)[len(start) : len(text(key)) - len(end)]
            if exchange not in excluded_exchanges:
                names.update(queue for _, _, queue in self._bindings_of(exchange))
        return names

    def _bindings_of(self, exchange: str) -> Iterator[tuple[str, str, str]]:
        for member in self.client.smembers(self._bindings % exchange):
            parts = text(member).split(self._separator)
            if len(parts) == 3:
                yield parts[0], parts[1], parts[2]

    def queues_of(self, exchange: str, routing_key: str) -> list[str]:
        """Return the queues to which the broker routes a message."""
        if not exchange:
            return [routing_key]
        return sorted(
            queue
            for key, pattern, queue in self._bindings_of(exchange)
            if (re.match(pattern, routing_key) if pattern else key == routing_key)
        )

    def lists(self, queue: str) -> list[str]:
        """Return the keys of a queue, the most urgent priority first."""
        return [
            f"{self._prefix}{queue}{self._separator}{step}" if step else f"{self._prefix}{queue}"
            for step in self._steps
        ]

    def lengths(self, queues: Iterable[str]) -> dict[str, list[int]]:
        """Return the number of messages of each queue in each of its lists."""
        names = list(queues)
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            for key in self.lists(name):
                pipeline.llen(key)
        found = pipeline.execute()
        size = len(self._steps)
        return {name: found[place * size :][:size] for place, name in enumerate(names)}

    def oldest(self, key: str, count: int) -> list[bytes]:
        """Return the oldest messages of a list, the oldest first."""
        return list(reversed(self.client.lrange(key, -count, -1)))

    def messages(self, key: str, chunk: int) -> Iterator[bytes]:
        """Read all messages of a list in chunks, the oldest first."""
        end = -1
        while found := self.client.lrange(key, end - chunk + 1, end):
            yield from reversed(found)
            end -= len(found)

    def unacked_entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Read all unacknowledged messages with their delivery tags."""
        yield from self.client.hscan_iter(self.unacked, count=100)

    def unacked_messages(self, tags: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """Return the tags and values of those unacknowledged messages that are still there."""
        values = self.client.hmget(self.unacked, tags)
        return [(tag, value) for tag, value in zip(tags, values, strict=True) if value is not None]

    # The migration.

    def begin(self, target: str) -> str:
        """Begin a migration to a target, or join the one under way; return its producer id.

        Raises:
            ConfigurationError: A migration to another target was interrupted.
        """
        pipeline = self.client.pipeline(transaction=True)
        pipeline.hsetnx(self._keys.state, "target", target)
        pipeline.hsetnx(self._keys.state, "producer", f"migration:{uuid.uuid4().hex}")
        pipeline.hmget(self._keys.state, "target", "producer")
        known, producer = map(text, pipeline.execute()[-1])
        if known != target:
            if any(self.staged_counts().values()):
                raise ConfigurationError(
                    f"A migration to {known} was interrupted, and some messages may be there already: "
                    f"complete it before another one to {target}"
                )
            self._forget(producer)
            return self.begin(target)
        self._producer = producer
        return producer

    def staged_counts(self) -> dict[str, int]:
        """Return the number of staged messages of each queue that ever had some in this migration."""
        names = [
            text(field).partition(":")[2]
            for field in self.client.hkeys(self._keys.state)
            if field.startswith(b"sent:")
        ]
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            pipeline.llen(self._keys.staged(name))
        return dict(zip(names, pipeline.execute(), strict=True))

    def stage(self, key: str, queue: str, messages: Sequence[bytes]) -> int:
        """Take messages out of a list of a queue; return the number of those that were still there.

        Raises:
            InvalidRequest: Another process has completed the migration.
        """
        keys = (key, self._keys.staged(queue), self._keys.state)
        return self._checked(self._run("stage", keys, self._field(queue), *messages))

    def stage_unacked(self, queue: str, messages: Sequence[tuple[bytes, bytes]]) -> int:
        """Take unacknowledged messages, given with their delivery tags, as :meth:`stage` does."""
        keys = (self.unacked, self._unacked_index, self._keys.staged(queue), self._keys.state)
        flat = [part for message in messages for part in message]
        return self._checked(self._run("stage_unacked", keys, self._field(queue), *flat))

    def staged(self, queue: str, count: int) -> tuple[int, list[bytes]]:
        """Return how many messages of a queue the target has, and the oldest staged ones in order.

        Raises:
            InvalidRequest: Another process has completed the migration.
        """
        pipeline = self.client.pipeline(transaction=True)
        pipeline.hmget(self._keys.state, "producer", self._field(queue))
        pipeline.lrange(self._keys.staged(queue), -count, -1)
        (producer, sent), messages = pipeline.execute()
        self._checked(0 if producer == self._producer.encode() else -1)
        return int(sent or 0), messages[::-1]

    def all_staged(self, queue: str, chunk: int) -> Iterator[bytes]:
        """Read all staged messages of a queue in chunks, whichever migration has taken them."""
        return self.messages(self._keys.staged(queue), chunk)

    def confirm(self, queue: str, sent: int, count: int) -> bool:
        """Remove the oldest staged messages, which the target has; False if another process did it before."""
        keys = (self._keys.staged(queue), self._keys.state)
        return bool(self._run("confirm", keys, self._field(queue), sent, count))

    def complete(self) -> None:
        """End the migration if nothing is staged."""
        self._forget(self._producer)

    # The migration back.

    def known_consumer(self) -> str:
        """Return the name of migrations to here, as consumers of tenant brokers; "" before the first one."""
        return text(self.client.hget(self._keys.arrived, "consumer") or "")

    def begin_return(self, ttl_ms: int) -> str:
        """Name the consumer of migrations to here, unless it has a name; return it."""
        pipeline = self.client.pipeline(transaction=True)
        pipeline.hsetnx(self._keys.arrived, "consumer", f"{MIGRATION}{uuid.uuid4().hex}")
        pipeline.pexpire(self._keys.arrived, ttl_ms)
        pipeline.hget(self._keys.arrived, "consumer")
        return text(pipeline.execute()[-1])

    def receive(self, queue: str, batch: str, messages: Sequence[tuple[int, str]], ttl_ms: int) -> bool:
        """Put messages into the lists of a queue; False if this batch has arrived before.

        Args:
            queue: The queue.
            batch: The name of the batch, unique among all batches.
            messages: Priority and text of each message, in the order of their delivery.
            ttl_ms: For how long the name of the batch is remembered, in milliseconds.
        """
        # As in kombu, a priority below the first step is one of the last step.
        places = [bisect(self._steps, priority) or len(self._steps) for priority, _ in messages]
        flat = [part for place, (_, each) in zip(places, messages, strict=True) for part in (place, each)]
        keys = (self._keys.arrived, *self.lists(queue))
        return bool(self._scripts["receive"].run(self.client, keys, (batch, ttl_ms, *flat)))

    def _forget(self, producer: str) -> None:
        keys = (self._keys.state, *map(self._keys.staged, self.staged_counts()))
        self._scripts["forget"].run(self.client, keys, (producer,))

    def _run(self, script: str, keys: Sequence[str], *arguments: Any) -> int:
        return int(self._scripts[script].run(self.client, keys, (self._producer, *arguments)))

    def live_workers(self, app: Any) -> list[str]:
        """Return a text for each worker that seems to consume from the broker.

        The transport does not write down which worker has received a message. Two signs tell of a living
        worker: it answers a question by remote control, or one of its connections waits for messages. Each
        sign alone has a gap. A solo worker answers nothing while a task runs, and a worker whose pool is full
        may not wait for messages.

        Args:
            app: The Celery app, whose settings name the exchange of remote control.
        """
        try:
            clients = self.client.client_list()
        except redis.ResponseError as exc:
            return [f"unknown, because CLIENT LIST is refused ({exc})"]
        holders = [
            f"the connection {client.get('addr')}"
            for client in clients
            if client.get("cmd", "").lower() == "brpop" and int(client.get("db", 0)) == self._database
        ]
        # A connection of its own: it waits for answers as a worker waits for messages, and must not be taken
        # for one by the next question.
        with self.connection.clone() as asking:
            answers = app.control.inspect(timeout=TIMEOUT_S, connection=asking).stats() or {}
        # The workers of both brokers answer where both are in one database.
        return sorted(
            name
            for name, stats in answers.items()
            if (stats.get("broker") or {}).get("transport") not in TENANT_SCHEMES
        ) or sorted(holders)

    def _checked(self, reply: int) -> int:
        if reply < 0:
            raise InvalidRequest(
                "Another process has completed this migration meanwhile. Run the command again for the "
                "messages that have come since"
            )
        return reply

    @staticmethod
    def _field(queue: str) -> str:
        return f"sent:{queue}"
