"""Parent and forked child publish independently: they share no task id, lane or marker."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Connection, Producer, Queue

from celery_dq.keys import PartitionKeys
from celery_dq.transport.aliases import register_transports
from tests.children import in_child
from tests.producer.conftest import MakeApp, Stored


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "direct"])
@pytest.mark.parametrize("way", ["task", "name"])
def test_parent_and_child_have_no_task_id_in_common(
    make_app: MakeApp, stored: Stored, buffered: bool, way: str
) -> None:
    app: Any = make_app(dq_buffer=buffered)

    def work(a: int = 0) -> None: ...

    task = app.task(name="plain", shared=False)(work)
    call = task.delay if way == "task" else lambda a: app.send_task("elsewhere", (a,))

    def calls() -> list[str]:
        return [call(number).id for number in range(20)]

    def calls_of_child() -> list[str]:
        app._after_fork()
        made = calls()
        assert app.dq.buffer.flush(30) == 0
        return made

    before = calls()  # ids are made in advance, many at a time
    child = in_child(calls_of_child)
    after = calls()
    assert app.dq.buffer.flush(30) == 0
    made = [*before, *child, *after]
    assert len(set(made)) == len(made) == 60
    assert sorted(stored.ids("celery")) == sorted(made)


@pytest.fixture
def connection(dq_url: str) -> Any:
    register_transports()
    return Connection(dq_url)


def markers(stored: Stored) -> dict[str, int]:
    """Return the markers of publishers in Redis, with their remaining milliseconds."""
    prefix = PartitionKeys("online", "q").prefix
    keys = [key.decode() for key in stored.client.scan_iter(count=1000)]
    return {key: stored.client.pttl(key) for key in keys if key.startswith(f"{prefix}producer:")}


@pytest.mark.parametrize("publishes", [True, False], ids=["publishes", "only closes"])
def test_a_forked_child_leaves_its_parents_marker(
    connection: Connection, stored: Stored, publishes: bool
) -> None:
    channel: Any = connection.channel()
    producer = Producer(channel, routing_key="q")
    producer.publish({}, declare=[Queue("q")])
    (mine,) = markers(stored)

    def child() -> list[str]:
        if publishes:
            producer.publish({})
            channel.publisher.retire(stored.client)
        connection.close()
        return sorted(set(markers(stored)) - {mine})

    others = in_child(child)
    left = markers(stored)
    assert len(others) == publishes
    # A publisher that closes shortens the lifetime of its markers; this one has not closed.
    assert left[mine] > 600_000
    assert all(left[other] <= 60_000 for other in others)
    producer.publish({})
    assert set(markers(stored)) == {mine, *others}
    connection.close()
    assert markers(stored)[mine] <= 60_000
    assert stored.count("q") == 2 + publishes
