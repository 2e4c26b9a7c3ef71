"""A migration that is killed at any point is completed by the next one: nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from typing import Any

import redis

from celery_dq.app.api.migration_report import MigrationOptions
from tests.migration.test_migrate import hold, send

#: The question for live workers takes a second, and changes nothing.
OPTIONS = MigrationOptions(take_unacked=True)
BACK = MigrationOptions(priorities="same")


def migrate(shop: Any, *urls: str, options: MigrationOptions = OPTIONS) -> Any:
    with shop.dq.migration(*urls, options=options) as migration:
        migration.survey(read=False)
        return migration.run()


def killed_migration(shop: Any, *urls: str, requests: int, options: MigrationOptions = OPTIONS) -> bool:
    """Migrate in a child process that dies by SIGKILL after so many requests, before the last answer.

    The survey, which only reads, does not count.

    Args:
        shop: The app.
        urls: Source and target.
        requests: Number of requests.
        options: The choices.

    Returns:
        False if the child has lived to the end.
    """
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
        with shop.dq.migration(*urls, options=options) as migration:
            migration.survey(read=False)
            redis.connection.AbstractConnection.send_packed_command = send_and_die  # type: ignore[method-assign]
            migration.run()
    finally:
        os._exit(0)


def test_a_killed_migration_is_completed(stock: Any, shop: Any, raw: Any, redis_url: str) -> None:
    ids = send(stock, "a", "b", "c")
    hold(redis_url, 1).release()
    before = {key: raw.dump(key) for key in raw.scan_iter()}
    requests = 0
    while killed_migration(shop, redis_url, requests=(requests := requests + 1)):
        assert migrate(shop, redis_url).is_complete
        found = [each.id for each in shop.dq.queues["push"].peek(9)]
        assert Counter(found) == Counter(ids), f"killed at request {requests}"
        shop.dq.queues["push"].purge()
        raw.flushdb()
        for key, value in before.items():
            raw.restore(key, 0, value)
    assert requests > 20


def test_a_killed_migration_back_is_completed(stock: Any, shop: Any, raw: Any, redis_url: str) -> None:
    urls = (shop.conf.broker_url, redis_url)
    ids = send(shop, "a", "b", "a")
    ids += send(shop, "a", countdown=3600)
    with shop.dq.queues["push"]._broker.open("push") as (partitions, client):
        partitions[0].claim("dead", lease_ms=1, want=1).run(client)
        before = {key: client.dump(key) for key in client.scan_iter()}
        requests = 0
        while killed_migration(shop, *urls, requests=(requests := requests + 1), options=BACK):
            assert migrate(shop, *urls, options=BACK).is_complete
            found = [json.loads(each)["headers"]["id"] for each in raw.lrange("push", 0, -1)]
            assert Counter(found) == Counter(ids), f"killed at request {requests}"
            assert client.hlen(partitions[0].keys.messages) == 0
            assert client.zcard(partitions[0].keys.leases) == 0
            raw.flushdb()
            client.flushdb()
            for key, value in before.items():
                client.restore(key, 0, value)
    assert requests > 15
