"""One message, as kombu's Redis transport stores it: reading and writing."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Callable, Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kombu.message import Message as KombuMessage
from kombu.utils.json import dumps, loads

from celery_dq.compat.celery_calls import arguments_of
from celery_dq.errors import DQError, InvalidMessage, described
from celery_dq.protocols import DEDUP_HEADER, DEDUP_PROPERTY, DELIVERIES_HEADER, QUEUE_HEADER, TOKEN_HEADER
from celery_dq.transport import envelope
from celery_dq.transport.in_flight import shown_eta
from celery_dq.transport.message_record import DedupSection, MessageRecord

__all__ = ["Priorities", "StockReader", "as_restored", "as_stock_message"]

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
            headers.
        accept: Content types that the workers decode.
        priorities: How priorities are converted.
    """

    def __init__(
        self, tenant_of: Callable[..., str], accept: AbstractSet[str], priorities: Priorities
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
        known = int(min(max(given, 0), 9)) if isinstance(given, (int, float)) and given == given else 0
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
            return self._tenant_of(task, None, args, kwargs, headers)
        except DQError as exc:
            raise InvalidMessage(f"it has no tenant: {exc}") from exc
        except Exception as exc:
            raise InvalidMessage(f"its body is not that of a task: {described(exc)}") from exc


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        message = loads(raw)
    except Exception as exc:
        raise InvalidMessage(f"it is not JSON: {described(exc)}") from exc
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("headers"), dict)
        or not isinstance(message.get("properties"), dict)
        or not isinstance(message.get("body"), str)
        or not isinstance(message.get("content-type"), str)
        or not isinstance(message.get("content-encoding"), str)
    ):
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
