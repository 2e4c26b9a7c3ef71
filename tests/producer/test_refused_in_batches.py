"""A message of a batch that can never be sent costs none of its neighbours, and doubles none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Producer, Queue

from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.kombu_sender import KombuSender
from celery_dq.producer.sender import PublishDeferred, PublishRefused
from celery_dq.testing.servers import RedisServer
from celery_dq.wiring import register_transports
from tests.rabbitmq import RabbitMQServer

QUEUE = "refused-in-batches"


@pytest.fixture(params=["redis", "amqp", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    register_transports()
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.url(scheme="redis")
    if request.param == "amqp":
        rabbitmq: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
        return rabbitmq.url()
    return f"dq-sqlite:///{tmp_path / 'broker'}"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_message_leaves_its_neighbours_in_the_broker_once(url: str, place: int) -> None:
    with Connection(url) as connection:
        sender = KombuSender(lambda: Connection(url), Producer, lambda name: Queue(name))
        lane, batch = "", list[BufferedMessage]()
        for number in range(3):
            made = {
                "body": str(number),
                "headers": {"id": str(number)},
                "properties": {"delivery_mode": 2},
                "content-type": "application/json",
                "content-encoding": "utf-8",
            }
            packed = sender.address(made, "", QUEUE, [Queue(QUEUE)])
            lane, payload = packed.lane, b"damaged" if number == place else packed.payload
            batch.append(BufferedMessage(number, packed.id, payload))
        refused, parts = 0, [batch]
        while parts:  # as the flusher does
            part = parts.pop(0)
            try:
                sender.send(lane, "00", part)
            except PublishDeferred as error:
                parts.insert(0, part[error.sent :])
            except PublishRefused:  # nothing was stored
                refused += len(part) == 1
                parts[:0] = [part[:1], part[1:]] if len(part) > 1 else []
        sender.close()
        queue = Queue(QUEUE)(connection.default_channel)
        got: list[Any] = []
        while (message := queue.get(no_ack=True)) is not None:
            got.append(message.payload)
        queue.delete()
        assert refused == 1
        assert got == [number for number in range(3) if number != place]
