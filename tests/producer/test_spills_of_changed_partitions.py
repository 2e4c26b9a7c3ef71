"""Messages on the disk of a producer, while tenants of their queue move to other partitions."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_dq import TenantMoving
from celery_dq.transport.message_record import dedup_key_of, tenant_of
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.broker.proxy import Proxy
from tests.dq_command import run_dq
from tests.producer.conftest import MakeApp
from tests.producer.test_spill_log import Child

TENANTS = [f"shop-{number}" for number in range(12)]
#: A tenant with several shares, whose calls have dedup keys.
HEAVY = "heavy"
#: Calls of each tenant before the broker is away, and with those that only the disk has.
DELIVERED, ALL = 6, 18
#: Number of different dedup keys. Calls of some of them wait in the broker.
KEYS = 9

#: Buffers calls of each tenant with the numbers on a line, and waits for the broker as long as the line says.
PRODUCER = """
import sys
from celery import Celery
import celery_dq

url, folder, heavy, keys, *tenants = sys.argv[1:]
app = Celery("shop", broker=url)
app.conf.update(dq_buffer=True, dq_buffer_folder=folder, task_default_queue="push")
app.conf.dq_queues = {"push": {"partitions": 4}}
celery_dq.setup(app)

@app.task(name="plain", tenant="{tenant}")
def plain(tenant): ...

@app.task(name="keyed", tenant="{tenant}", dedup={"key": "{key}", "verdict": "later"})
def keyed(tenant, key): ...

for line in sys.stdin:
    begin, end, timeout = map(int, line.split())
    for number in range(begin, end):
        for tenant in tenants:
            plain.apply_async((tenant,), task_id=f"{tenant}/{number}")
        keyed.apply_async((heavy, number % int(keys)), task_id=f"{heavy}/{number}")
    print(app.dq.buffer.flush(timeout), flush=True)
"""


class SpillWorld:
    """A producer behind a proxy, an operator beside it, and a ledger of what runs.

    Args:
        app: The app of the operator, whom no fault touches.
        adopter: The app of a process that adopts messages, behind the proxy.
        proxy: The proxy.
        producer: The process of the producer.
    """

    def __init__(self, app: Any, adopter: Any, proxy: Proxy, producer: Child) -> None:
        self.app = app
        self.queue = app.dq.queues["push"]
        self._adopter = adopter
        self._proxy = proxy
        self._producer = producer
        self._held: list[tuple[Any, Any, str]] = []
        #: Tenant, or dedup key of the heavy one -> numbers of its calls as they ran, and their partitions.
        self.ran: defaultdict[str, list[int]] = defaultdict(list)
        self.places: defaultdict[str, list[int]] = defaultdict(list)

    def call(self, begin: int, end: int, timeout_s: int = 60) -> int:
        """Let the producer call each task with these numbers; return how many calls its buffer still has."""
        stdin = self._producer.process.stdin
        assert stdin is not None
        stdin.write(f"{begin} {end} {timeout_s}\n")
        stdin.flush()
        return int(self._producer.line())

    def cut_off(self) -> None:
        """Take the broker away from the producer."""
        self._proxy.cut_requests, self._proxy.cuts_left = b"*", sys.maxsize
        self._proxy.cut_all()

    def adopt(self, way: str) -> None:
        """Let the producer go on, or kill it and let another process send its messages."""
        self._proxy.cuts_left = 0
        if way == "same process":
            assert self.call(0, 0) == 0
            return
        self._producer.kill()
        if way == "next process":
            self._adopter.dq.buffer.replay()
            assert self._adopter.dq.buffer.flush(60) == 0
            return
        done = run_dq(self._adopter, "spill", "replay", "--yes").output
        assert re.fullmatch(r"[1-9]\d* sent, 0 left\.\n", done), done

    @property
    def homes(self) -> PartitionMap:
        """The map of the queue."""
        with self.app.dq._broker.open("push") as opened:
            homes: PartitionMap = opened.homes
            return homes

    def claim(self, want: int = 500) -> int:
        """Claim messages in all partitions, without an end of those that run; return how many it got."""
        before = len(self._held)
        with self.app.dq._broker.open("push") as (partitions, client):
            for partition in partitions:
                for entry in partition.claim("w", lease_ms=600_000, want=want).run(client).entries:
                    tenant, key = tenant_of(entry.record), dedup_key_of(entry.record)
                    if entry.reason:  # a declined call, which has the result of another one
                        partition.ack("w", finish=[entry.tag]).run(client)
                        continue
                    name = tenant if key is None else key
                    number = partition.keys.partition
                    here = {each.keys.partition for each, _, held in self._held if held == name}
                    assert here <= {number}, f"{name} runs in two partitions"
                    self.ran[name].append(int(task_id_of(entry.id).rpartition("/")[2]))
                    self.places[name].append(number)
                    self._held.append((partition, entry.tag, name))
        return len(self._held) - before

    def end(self) -> None:
        """End the tasks that run."""
        with self.app.dq._broker.channel() as channel:
            for partition, tag, _ in self._held:
                assert partition.ack("w", finish=[tag]).run(channel.client) == 0
        self._held.clear()

    def run_all(self) -> None:
        """Run all that waits, and complete a change that is under way."""
        while self._held or self.claim():
            self.end()
            self.queue.set_partitions(self.homes.count, timeout=0)
        self.queue.set_partitions(self.homes.count, timeout=0)
        assert self.queue.snapshot().waiting == 0


@pytest.fixture
def world(proxy: Proxy, dq_url: str, make_app: MakeApp, tmp_path: Path) -> Iterator[SpillWorld]:
    url, folder = proxy.url(dq_url), tmp_path / "spill"
    producer = Child(PRODUCER, url, folder, HEAVY, KEYS, *TENANTS)
    app, adopter = make_app(dq_queues={"push": {"partitions": 4}}), make_app(url)
    app.dq.quotas.set("push", HEAVY, rate=None, spread=2)
    yield SpillWorld(app, adopter, proxy, producer)
    producer.kill()


def change_number(world: SpillWorld) -> None:
    """Change the number of partitions twice, while messages wait."""
    for count in (9, 5):
        world.queue.set_partitions(count, timeout=30)


def begin_new_number(world: SpillWorld) -> None:
    """Change the number while tasks run, so that tenants still move."""
    world.claim(want=4)
    with pytest.raises(TenantMoving):
        world.queue.set_partitions(9, timeout=0)


def begin_new_spread(world: SpillWorld) -> None:
    """Change the spread while messages with dedup keys wait, so that the tenant still moves."""
    with pytest.raises(TenantMoving):
        world.app.dq.quotas.set("push", HEAVY, spread=4, timeout=0)


@pytest.mark.parametrize("change", [change_number, begin_new_number, begin_new_spread])
@pytest.mark.parametrize("way", ["same process", "next process", "command"])
def test_spilled_messages_find_the_homes_of_a_changed_queue(world: SpillWorld, change: Any, way: str) -> None:
    assert world.call(0, DELIVERED) == 0
    world.cut_off()
    assert world.call(DELIVERED, ALL, 0) > 0
    change(world)
    running = {*world.ran}
    world.adopt(way)
    world.run_all()
    for tenant in TENANTS:
        assert world.ran.pop(tenant) == [*range(ALL)]
        assert world.places[tenant][-1] == world.homes.home(tenant)
    assert len(world.ran) == KEYS
    for key, numbers in world.ran.items():
        assert world.places[key][-1] == world.homes.place(HEAVY, key)
        moved = len(set(world.places[key])) == 2
        assert moved <= (change is begin_new_spread)
        # A call that waits covers the next one of its key, unless that belongs to another partition by now.
        assert numbers == [numbers[0], numbers[0] + KEYS][: 1 + (moved or key in running)]
