"""A migration or move that is killed at any point is completed by the next: nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import pytest
import redis

from celery_dq.app.api.migration import MigrationOptions
from tests.migration.test_migrate import hold, send

#: The question for live workers takes a second, and changes nothing.
OPTIONS = MigrationOptions(take_unacked=True)
BACK = MigrationOptions(priorities="same")

Prepared: TypeAlias = "Callable[[], AbstractContextManager[Callable[[], Any]]]"


@contextmanager
def surveyed(shop: Any, *urls: str, options: MigrationOptions = OPTIONS) -> Iterator[Callable[[], Any]]:
    """Prepare a migration; a kill counts the requests of the rest."""
    with shop.dq.migration(*urls, options=options) as migration:
        migration.survey(read=False)
        yield migration.run


def completed_runs(client: Any, prepared: Prepared) -> Iterator[Any]:
    """Kill a process at its first request, then at its second, and so on; yield what the next run returns.

    Args:
        client: A client of the database from which a run takes messages.
        prepared: Prepares a run.
    """
    before = {key: client.dump(key) for key in client.scan_iter()}
    requests = 0
    while is_killed(prepared(), requests := requests + 1):
        with prepared() as run:
            yield run()
        client.flushdb()
        for key, value in before.items():
            client.restore(key, 0, value)


def is_killed(prepared: AbstractContextManager[Callable[[], Any]], requests: int) -> bool:
    """Return whether a child process dies by SIGKILL after so many requests, before the last answer."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = requests
    send_packed: Any = redis.connection.AbstractConnection.send_packed_command

    def send_and_die(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        is_last = left == 0
        send_packed(self, *args, **kwargs)  # this may connect, with requests of its own
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with prepared as run:
            redis.connection.AbstractConnection.send_packed_command = send_and_die  # type: ignore[method-assign]
            run()
    finally:
        os._exit(0)


def test_a_killed_migration_is_completed(stock: Any, shop: Any, raw: Any, redis_url: str) -> None:
    ids = send(stock, "a", "b", "c")
    hold(redis_url, 1).release()
    requests = 0
    for requests, report in enumerate(completed_runs(raw, partial(surveyed, shop, redis_url)), 1):
        assert report.is_complete
        found = [each.id for each in shop.dq.queues["push"].peek(9)]
        assert Counter(found) == Counter(ids), f"killed at request {requests}"
        shop.dq.queues["push"].purge()
    assert requests >= 20


def test_a_killed_migration_back_is_completed(stock: Any, shop: Any, raw: Any, redis_url: str) -> None:
    ids = send(shop, "a", "b", "a")
    ids += send(shop, "a", countdown=3600)
    prepared, requests = partial(surveyed, shop, shop.conf.broker_url, redis_url, options=BACK), 0
    with shop.dq.queues["push"]._broker.open("push") as (partitions, client):
        partitions[0].claim("dead", lease_ms=1, want=1).run(client)
        for requests, report in enumerate(completed_runs(client, prepared), 1):
            assert report.is_complete
            found = [json.loads(each)["headers"]["id"] for each in raw.lrange("push", 0, -1)]
            assert Counter(found) == Counter(ids), f"killed at request {requests}"
            assert client.hlen(partitions[0].keys.messages) == 0
            assert client.zcard(partitions[0].keys.leases) == 0
            raw.flushdb()
    assert requests >= 15


@pytest.mark.parametrize("options", [{}, {"countdown": 3600}])
def test_a_killed_move_is_completed(shop: Any, options: dict[str, Any]) -> None:
    ids = send(shop, *("a" if options else "aaa"), **options)
    push, other, requests = shop.dq.queues["push"], shop.dq.queues["other"], 0
    chosen = {"task_id": ids[0]} if options else {"tenant": "a"}
    with push._broker.open("push") as (_, client):
        move = partial(push.move, "other", **chosen)
        for requests, _ in enumerate(completed_runs(client, lambda: nullcontext(move)), 1):
            found = [each.id for each in other.peek() + other.peek(delayed=True)]
            assert found == ids, f"killed at request {requests}"
            assert (push.find(ids[0]), push.snapshot().held) == (None, 0)
    assert requests >= 10
