"""Calls to a queue whose number of partitions the process does not know yet."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.keys import PartitionKeys
from celery_dq.transport.redis.store.home import home_of
from celery_dq.transport.redis.store.move_calls import set_map
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.proxy import Proxy
from tests.producer.conftest import Stored

TENANTS = [f"shop-{number}" for number in range(20)]
KEYS = [PartitionKeys("online", "celery", number) for number in range(4)]


@pytest.fixture
def app(distant_app: Any) -> Any:
    def work(a: Any = 0) -> None: ...

    distant_app.task(name="plain", shared=False, tenant="{a}")(work)
    distant_app.task(name="keyed", shared=False, tenant="{a}", dedup={"key": "{a}"})(work)
    return distant_app


def give_partitions(stored: Stored) -> None:
    """Empty the queue and give it four partitions, as an operator does while producers run."""
    stored.client.flushdb()
    for keys in KEYS:
        Partition(keys, load_scripts()).declare_partitions(PartitionMap(4), "follow").run(stored.client)


def test_a_call_to_a_partition_that_does_not_exist_is_refused(
    app: Any, stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    give_partitions(stored)
    app.tasks["plain"].apply_async((1,), queue="celery/70", buffered=True)
    assert app.dq.buffer.flush(30) == 0
    assert "name one from celery/0 to celery/3" in caplog.text


@pytest.mark.parametrize("loses_answer", [False, True])
@pytest.mark.parametrize("way", ["template", "dedup", "buffer"])
def test_a_call_finds_the_home_of_its_tenant(
    app: Any, proxy: Proxy, stored: Stored, quick: list[Any], way: str, loses_answer: bool
) -> None:
    task, options = app.tasks["keyed" if way == "dedup" else "plain"], {"buffered": way == "buffer"}
    for tenant in TENANTS[:3]:
        task.apply_async((tenant,), **options)
    assert app.dq.buffer.flush(30) == 0
    give_partitions(stored)
    if loses_answer:
        proxy.drop_answers_to, proxy.drops_left = b".4\r\n", 2
    results = {tenant: task.apply_async((tenant,), **options) for tenant in TENANTS}
    assert app.dq.buffer.flush(30) == 0
    assert bool(proxy.dropped) is loses_answer
    assert len(quick) >= len(TENANTS)
    for number, keys in enumerate(KEYS):
        ids = {result.id.encode() for tenant, result in results.items() if home_of(tenant, 4) == number}
        assert set(stored.client.hkeys(keys.messages)) == ids
    if way == "dedup":
        again = task.apply_async((TENANTS[0],), **options)
        assert again.covering == results[TENANTS[0]].id


def waiting_in(stored: Stored, count: int) -> list[str]:
    """The message ids in all partitions, each as often as it is stored."""
    keys = [PartitionKeys("online", "celery", number) for number in range(count)]
    return sorted(each.decode() for partition in keys for each in stored.client.hkeys(partition.messages))


@pytest.mark.parametrize("asks_again", [False, True], ids=["the push", "the look for the map"])
def test_a_batch_that_two_maps_divide_is_stored_once(
    app: Any, proxy: Proxy, stored: Stored, asks_again: bool
) -> None:
    """A part of it is accepted by the map before, and the answer to the rest is lost."""
    give_partitions(stored)
    first = [app.tasks["plain"].apply_async((tenant,), buffered=True).id for tenant in TENANTS]
    assert app.dq.buffer.flush(30) == 0
    before = PartitionMap(4)
    # The others accept messages by the map before until a client tells them the new one.
    now = before.begin(7)
    assert set_map(Partition(KEYS[0], load_scripts()), before, now).run(stored.client) == now
    proxy.drop_answers_to, proxy.drops_left = b"restore" if asks_again else b".7<4#1", 1
    second = [app.tasks["plain"].apply_async((tenant,), buffered=True).id for tenant in TENANTS]
    assert app.dq.buffer.flush(30) == 0
    assert proxy.dropped == 1
    assert waiting_in(stored, 7) == sorted(first + second)
