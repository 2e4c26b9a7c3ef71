"""Another program has written into the keys of one queue: the consumers of other queues go on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from celery_dq.errors import ConfigurationError
from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient, heartbeat
from tests.broker.test_changed_partitions import consumed
from tests.broker.test_partitions import AT_HOME, FOUR, declare

#: No heartbeat comes by itself before the end of the test.
LONG: dict[str, Any] = {"lease": 600, "watchdog": 0}
REPORTS = ("partitions_not_followed", "redis_refuses_began", "heartbeat_failed")


@pytest.fixture
def other(kombu_client: KombuClient) -> Iterator[KombuClient]:
    with contextlib.closing(KombuClient(kombu_client.url, "mail")) as other:
        yield other


@pytest.mark.parametrize(
    ("partition", "field", "foreign", "reports"),
    [
        (0, "partitions", "garbage", ["partitions_not_followed"]),
        (0, "partitions", "0", ["partitions_not_followed"]),
        (3, "partitions", "garbage", []),  # partition 0 has the map, which is written there again
        (0, "claim", "1.5", ["redis_refuses_began"]),
        (3, "claim", "1e5", ["redis_refuses_began"]),
    ],
)
def test_a_foreign_text_in_the_state_of_a_queue_stops_no_other_queue(
    kombu_client: KombuClient,
    other: KombuClient,
    caplog: pytest.LogCaptureFixture,
    partition: int,
    field: str,
    foreign: str,
    reports: list[str],
) -> None:
    declare(kombu_client, **FOUR)
    keys = PartitionKeys("online", "push", partition)
    with (
        kombu_client.connect(**LONG) as connection,
        kombu_client.consuming(connection) as own,
        other.consuming(connection) as got,
    ):
        process = connection.default_channel.identity
        kombu_client.drain_until(connection, lambda: consumed(kombu_client) == [0, 1, 2, 3])
        former = kombu_client.client.hget(keys.state, field) or b"0"
        kombu_client.client.hset(keys.state, field, foreign)
        for number in range(3):
            heartbeat(process)
            other.publish(number)
            other.drain(connection, got, number + 1)[-1].ack()
        records = [each for each in caplog.records if getattr(each, "event", "") in REPORTS]
        assert [each.event for each in records] == reports  # type: ignore[attr-defined]  # an extra field
        assert all("queue push" in each.getMessage() for each in records)
        kombu_client.client.hset(keys.state, field, former)
        heartbeat(process)
        kombu_client.publish("restored", tenant=AT_HOME[partition])
        kombu_client.drain(connection, own, 1)[0].ack()


def test_a_publisher_learns_which_key_holds_a_foreign_text(kombu_client: KombuClient) -> None:
    kombu_client.client.hset(kombu_client.keys.state, "partitions", "garbage")
    key = re.escape(kombu_client.keys.state)
    with pytest.raises(ConfigurationError, match=f"'garbage' is not.*{key}'; restore the number"):
        kombu_client.publish("refused")
    kombu_client.client.hdel(kombu_client.keys.state, "partitions")
    kombu_client.publish("accepted")
    wait_until(lambda: kombu_client.depth() == 1)
