"""Queue arguments of RabbitMQ that this broker ignores with a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from kombu import Connection, Queue

from tests.brokers import DQ


@pytest.fixture
def channel(redis_url: str) -> Any:
    DQ.prepare()
    with Connection(redis_url.replace("redis://", "dq-redis://", 1)) as connection:
        yield connection.default_channel


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expires": 60}, "'kept' is declared with expires = 60000"),
        ({"message_ttl": 60}, "give each message an expiration"),
        ({"max_length": 5}, "nothing here bounds a queue"),
        ({"max_length_bytes": 5}, "nothing here bounds a queue"),
        ({"queue_arguments": {"x-dead-letter-exchange": "dead"}}, "app.dq.dead_letters"),
        ({"expires": 60, "durable": False}, "give auto_delete=True"),
    ],
)
def test_an_argument_without_effect_is_a_warning(channel: Any, options: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        Queue("kept", **options)(channel).declare()


def test_the_broker_in_zookeeper_warns_too(hosts: str) -> None:
    DQ.prepare()
    with (
        Connection(f"dq-zookeeper://{hosts}") as connection,
        pytest.warns(UserWarning, match="'kept' is declared with expires = 60000"),
    ):
        Queue("kept", expires=60)(connection.default_channel).declare()


@pytest.mark.parametrize(
    "options", [{}, {"max_priority": 9}, {"expires": 60, "auto_delete": True}, {"durable": False}]
)
def test_other_queues_are_declared_without_a_warning(channel: Any, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Queue("plain", **options)(channel).declare()
