"""The cost of a page for Redis does not grow with the tenants; queues and viewers share it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.http import QueryDict
from kombu import Queue

from celery_dq.contrib.django.dashboard.dead_letters import DeadLettersView
from celery_dq.contrib.django.dashboard.queues import QueueView
from celery_dq.contrib.django.dashboard.status import DedupLocksView
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import MAX_CHUNK
from tests.dashboard.shop import make_app
from tests.dq_command import run_dq

#: Tenants from which on the age of the oldest message is looked for among the next 4,000 only.
FEW, MANY = 5_000, 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def fill(app: Any, start: int, end: int) -> None:
    with app.dq._broker.open_home("push") as (partition, client):
        for first in range(start, end, MAX_CHUNK):
            records = (
                MessageRecord(f"m-{number:06}", "notify", 0, 0, 0, b"[0,{},{}]", "[[], {}, {}]").pack()
                for number in range(first, first + MAX_CHUNK)
            )
            outgoing = [OutgoingRecord(n, f"id-{first + n}", record) for n, record in enumerate(records, 1)]
            partition.push(outgoing, producer=f"filler-{first}").run(client)


def commands(server: RedisServer, app: Any, query: str) -> tuple[int, dict[str, Any]]:
    """Read the page of the queue; return the number of commands, those of scripts included, and the data."""
    with redis.Redis.from_url(server.url()) as client:
        app.dq.queues["push"].depth  # noqa: B018 - opens the connection and loads scripts
        client.config_resetstat()
        data = QueueView().read(app.dq, QueryDict(f"queue=push&{query}"), arguments=False)
        return sum(each["calls"] for each in client.info("commandstats").values()), data


def test_a_page_costs_as_much_with_60000_tenants_as_with_5000(server: RedisServer, project: None) -> None:
    app = make_app(server.url(scheme="dq-redis"))
    fill(app, 0, FEW)
    queries = ("", "after=eligible.0.4000", "state=eligible&after=eligible.0.4900", "q=m-0049")
    few = [commands(server, app, query) for query in queries]
    fill(app, FEW, MANY)
    many = [commands(server, app, query) for query in (*queries, "q=nowhere", "after=eligible.0.59900")]
    assert many[0][1]["row"].queue.eligible == MANY
    assert [len(data["tenants"]) for _, data in many] == [50, 50, 50, 50, 0, 50]
    # A search continues where the last one has ended, after a fixed number of names.
    assert (many[4][1]["looked_at"], many[4][1]["after"]) == (10_000, "eligible.0.10000")
    for query, (before, _), (after, _) in zip(queries, few, many, strict=False):
        assert abs(after - before) <= 10, query
    assert abs(many[5][0] - many[1][0]) <= 10
    app.pool.force_close_all()


#: A page or command over all of them may take a round trip per 64 queues for each thing that it reads.
MANY_QUEUES = 200


@pytest.mark.parametrize(
    "read",
    [
        lambda app: DeadLettersView().read(app.dq, QueryDict(), arguments=False),
        lambda app: DedupLocksView().read(app.dq, QueryDict(), arguments=False),
        lambda app: run_dq(app, "partitions"),
    ],
    ids=["dead letters", "dedup locks", "partitions"],
)
def test_queues_share_round_trips(quiet_redis_url: str, project: None, read: Callable[[Any], Any]) -> None:
    url = quiet_redis_url.replace("redis://", "dq-redis://", 1)
    app = make_app(url, dq_queues={f"queue-{number}": {} for number in range(MANY_QUEUES)})
    read(app)  # opens the connection and loads scripts
    with redis.Redis.from_url(quiet_redis_url) as client:
        before: Any = client.info("stats")
        read(app)
        after: Any = client.info("stats")
    assert after["total_reads_processed"] - before["total_reads_processed"] < MANY_QUEUES / 4
    app.pool.force_close_all()


def test_dedup_locks_of_another_broker_are_read_over_one_connection(
    quiet_redis_url: str, project: None
) -> None:
    names = [f"queue-{number}" for number in range(9)]
    app = make_app("memory://", dq_dedup_url=quiet_redis_url, task_queues=[Queue(name) for name in names])
    with redis.Redis.from_url(quiet_redis_url) as client:
        before: Any = client.info("stats")
        DedupLocksView().read(app.dq, QueryDict(), arguments=False)
        after: Any = client.info("stats")
    assert after["total_connections_received"] - before["total_connections_received"] == 1


def test_viewers_share_one_read(shop: Any, login: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, begun, go_on = [], threading.Event(), threading.Event()

    def read(self: Any, dq: Any, given: Any, *, arguments: bool) -> dict[str, Any]:
        reads.append(given)
        begun.set()
        assert go_on.wait(30)
        return {"leaders": []}

    from celery_dq import shared_reading
    from celery_dq.contrib.django.dashboard.status import LeadersView

    monkeypatch.setattr(LeadersView, "read", read)
    # A busy machine may stand still for longer.
    monkeypatch.setattr(shared_reading, "FRESH_S", 60.0)
    client = login("view_queues")
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(client.get("/dq/leaders/")))
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=lambda: answers.append(client.get("/dq/leaders/")))
    second.start()
    go_on.set()
    first.join()
    second.join()
    answers.append(client.get("/dq/leaders/"))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(reads) == 1
