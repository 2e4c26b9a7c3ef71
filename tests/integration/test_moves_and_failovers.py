"""A failover right after a step of a change, which the promoted replica lacks, loses and doubles nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis
from kombu.exceptions import OperationalError

from celery_dq.app.api import map_change, tenant_moves
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store import move_calls
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.broker.proxy import Proxy
from tests.integration.partitioned_shop import COUNT, D, opened
from tests.integration.shop import send


class Failover(Proxy):
    """A master with one replica, which has a replica of its own; the clients see a server that fails over."""

    def __init__(self, master: RedisServer, replica: RedisServer) -> None:
        super().__init__(master.port)
        self._master, self._replica = master, replica
        self.is_over = False

    def detach(self) -> None:
        """Let the replica have all writes until now, and none that follows."""
        with redis.Redis(port=self._master.port) as client:
            client.set("last", 1)
            assert client.wait(1, 20_000) == 1
        self._replica.ask("REPLICAOF", "NO", "ONE")

    def complete(self) -> None:
        """Let the replica be the master of all clients."""
        self._target = self._replica.port
        self.is_over = True
        self.cut_all()

    def after(self, step: Callable[..., Any], chosen: Callable[..., bool]) -> Callable[..., Any]:
        """Return a step after whose first chosen call the master fails over."""

        def followed(*args: Any, **options: Any) -> Any:
            call = step(*args, **options)
            if not self.is_over and chosen(*args, **options):
                self.detach()
                parse = call.parse

                def fail_over(reply: Any) -> Any:
                    if not self.is_over:
                        self.complete()
                    return parse(reply)

                call.parse = fail_over
            return call

        return followed


@pytest.fixture
def failover() -> Iterator[Failover]:
    """Three servers in a row."""
    quick = {"repl-diskless-sync-delay": 0}
    with RedisServer(config=quick) as master, RedisServer(config=quick) as replica:
        replica.ask("REPLICAOF", "127.0.0.1", master.port)
        with RedisServer(config=quick) as last:
            last.ask("REPLICAOF", "127.0.0.1", replica.port)
            for each in (replica, last):
                wait_until(partial(_is_in_step, each))
            proxy = Failover(master, replica)
            with proxy:
                yield proxy


def _is_in_step(replica: RedisServer) -> bool:
    return "master_link_status:up" in str(replica.ask("INFO", "replication"))


@pytest.fixture
def broker_url(failover: Failover) -> str:
    return failover.url("redis://127.0.0.1/0")


def _is_named(source: Any, tenant: str, to: int, ids: Any = ()) -> bool:
    return bool(ids)


def _is_any(*args: Any, **options: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("module", "name", "chosen"),
    [
        (tenant_moves, "export_messages", _is_named),
        (tenant_moves, "import_messages", _is_any),
        (map_change, "set_map", _is_any),
        (map_change, "set_map", lambda first, before, now: now.before is None),
    ],
    ids=["export", "import", "begin", "end"],
)
def test_a_failover_after_a_step_that_replicas_lack_loses_and_doubles_nothing(
    wide: Any, failover: Failover, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, chosen: Any
) -> None:
    ids = send(wide, *[D] * 3)
    monkeypatch.setattr(module, name, failover.after(getattr(module, name), chosen))
    broker = wide.dq._broker
    careful = replace(broker.options, confirm_replicas=1)
    with suppress(OperationalError):  # a lost connection ends the command, which is run again
        map_change.set_partitions(broker, careful, "push", 2, timeout_s=30)
    assert failover.is_over
    with opened(wide) as (partitions, client):
        stored = [client.hget(each.keys.state, "partitions") or b"" for each in partitions]
        decided = int(stored[0].partition(b"#")[2] or 0)
        assert all(int(each.partition(b"#")[2] or 0) <= decided for each in stored), "partition 0 decides"
    ran = _run_all(wide)
    map_change.set_partitions(broker, careful, "push", 2, timeout_s=30)
    ran += _run_all(wide)
    assert sorted(ran) == sorted(ids)
    later = send(wide, D, *[f"other-{number}" for number in range(COUNT)])
    assert sorted(_run_all(wide)) == sorted(later)


def test_a_tenant_that_arrives_at_the_end_of_a_change_is_served_after_a_failover(
    wide: Any, failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = PartitionMap(2, COUNT)
    names = (f"late-{number}" for number in range(100))
    late = next(each for each in names if change.moves(each) and change.home(each) == 0)
    sent = send(wide, D)

    def arrives(*args: Any, everyone: bool = False) -> bool:
        if everyone:
            sent.extend(send(wide, late))
        return everyone

    monkeypatch.setattr(tenant_moves, "open_tenants", failover.after(move_calls.open_tenants, arrives))
    broker, is_complete = wide.dq._broker, False
    careful = replace(broker.options, confirm_replicas=1)
    while not is_complete:
        with suppress(OperationalError):
            is_complete = map_change.set_partitions(broker, careful, "push", 2).after == 2
    assert failover.is_over
    assert sorted(_run_all(wide)) == sorted(sent)


def _run_all(app: Any) -> list[str]:
    ran: list[str] = []
    with opened(app) as (partitions, client):
        for each in partitions:
            entries = each.claim("w", lease_ms=60_000, want=9).run(client).entries
            ran += [entry.id for entry in entries]
            each.ack("w", finish=[entry.tag for entry in entries]).run(client)
    return ran
