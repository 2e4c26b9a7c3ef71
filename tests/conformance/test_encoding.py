"""Bodies, headers and properties arrive as they were sent."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from kombu import Connection, Consumer, Message

from tests.conformance.kombu_queue import KombuQueue, drain_until

TEXT = "Grüße, мир, 世界, 🎉 \u0000\u2028"
BINARY = bytes(range(256)) * 4


@pytest.mark.parametrize("compression", [None, "gzip", "bzip2"])
@pytest.mark.parametrize(
    ("serializer", "body"),
    [
        ("json", {"text": TEXT, "list": [1, 2.5, None, True]}),
        ("json", TEXT),
        ("json", 0),
        ("pickle", {"bytes": BINARY, "set": {1, 2}, "when": datetime.datetime(2024, 2, 29, 12, 30)}),
    ],
)
def test_serialised_bodies(
    kombu_queue: KombuQueue, serializer: str, body: Any, compression: str | None
) -> None:
    kombu_queue.publish(body, serializer=serializer, compression=compression)
    kombu_queue.consume(ack=True, accept=["json", "pickle"])
    assert kombu_queue.drain(1) == [body]


def test_a_raw_binary_body(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish(BINARY, serializer=None, content_type="application/data", content_encoding="binary")
    kombu_queue.consume(ack=True)
    kombu_queue.drain(1)
    message = kombu_queue.received[0]
    body: Any = message.body
    assert body == BINARY
    assert (message.content_type, message.content_encoding) == ("application/data", "binary")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16"])
def test_a_text_body_in_its_encoding(kombu_queue: KombuQueue, encoding: str) -> None:
    kombu_queue.publish(
        "Größe".encode(encoding), serializer=None, content_type="text/plain", content_encoding=encoding
    )
    kombu_queue.consume(ack=True, accept=["text/plain"])
    kombu_queue.drain(1)
    assert kombu_queue.received[0].decode() == "Größe"
    assert kombu_queue.received[0].content_encoding == encoding


@pytest.mark.parametrize("body", ["", "plain", TEXT])
def test_a_raw_text_body(kombu_queue: KombuQueue, body: str) -> None:
    kombu_queue.publish(body, serializer="raw")
    kombu_queue.consume(ack=True, accept=None)
    kombu_queue.drain(1)
    got = kombu_queue.received[0].body
    assert (got.decode() if isinstance(got, bytes) else got) == body


def test_headers_and_properties(kombu_queue: KombuQueue) -> None:
    headers = {"text": TEXT, "nested": {"list": [1, None, {"a": "b"}]}, "": "empty", "number": 3.5}
    properties = {
        "correlation_id": "corr-é",
        "reply_to": "reply.queue",
        "message_id": "m-1",
        "app_id": "shop",
        "type": "order",
        "user_id": "me",
        "cluster_id": "c",
        "timestamp": 1700000000,
    }
    kombu_queue.publish("x", headers=headers, **properties)
    kombu_queue.consume(ack=True)
    kombu_queue.drain(1)
    message = kombu_queue.received[0]
    assert {key: message.headers[key] for key in headers} == headers
    assert {key: message.properties[key] for key in properties} == properties
    assert message.content_type == "application/json"


def test_unknown_properties_pass_through(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish("x", shop_colour="blue")
    kombu_queue.consume(ack=True)
    kombu_queue.drain(1)
    assert kombu_queue.received[0].properties["shop_colour"] == "blue"


def test_delivery_info_names_the_way(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish("x")
    kombu_queue.consume(ack=True)
    kombu_queue.drain(1)
    info = kombu_queue.received[0].delivery_info
    assert (info["exchange"], info["routing_key"]) == ("", kombu_queue.queue.name)
    assert kombu_queue.received[0].delivery_tag


def test_delivery_tags_are_distinct(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish(*range(10))
    kombu_queue.consume(ack=True)
    kombu_queue.drain(10)
    assert len({message.delivery_tag for message in kombu_queue.received}) == 10


def test_a_content_type_that_is_not_accepted_is_refused(
    connection: Connection, kombu_queue: KombuQueue
) -> None:
    kombu_queue.publish({1, 2}, serializer="pickle")
    kombu_queue.publish("fine")
    errors: list[tuple[Any, BaseException]] = []
    fine: list[Any] = []

    def on_decode_error(message: Message, error: BaseException) -> None:
        errors.append((message.content_type, error))
        message.ack()

    def on_task(body: Any, message: Message) -> None:
        fine.append(body)
        message.ack()

    consumer = Consumer(
        kombu_queue.channel,
        queues=[kombu_queue.queue],
        callbacks=[on_task],
        on_decode_error=on_decode_error,
        accept=["json"],
    )
    with consumer:
        drain_until(connection, lambda: bool(fine))
    assert [content_type for content_type, _ in errors] == ["application/x-python-serialize"]
