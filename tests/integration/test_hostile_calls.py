"""``app.dq`` with wrong types, empty texts and huge numbers; and the size of one command of a huge read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_dq.errors import DQError, InvalidQuota, InvalidRequest, InvalidTenant
from celery_dq.inspector.redis_values import CHUNK, MOST

COUNTS = [-1, 0, MOST + 1, 10**30, 1.5, "5", True, None]
TEXTS = ["", None, 5, b"x", "\udcff"]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "call",
    [
        lambda dq, count: dq.queues["push"].peek(count),
        lambda dq, count: dq.queues["push"].peek(count, tenant="a"),
        lambda dq, count: dq.queues["push"].peek(count, delayed=True),
        lambda dq, count: dq.queues["push"].tenants(count),
        lambda dq, count: dq.dead_letters["push"].list(count),
        lambda dq, count: dq.dedup["push"].list(count),
        lambda dq, count: dq.dedup["push"].repetition(count),
        lambda dq, count: dq.dedup["push"].repetition(1, sample=count),
    ],
)
def test_a_count_that_is_none(shop: Any, call: Callable[[Any, Any], Any], count: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"= .*: give a whole number from 1 to 1000000"):
        call(shop.dq, count)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "call",
    [
        lambda dq, text: dq.queues[text],
        lambda dq, text: dq.dead_letters[text],
        lambda dq, text: dq.dedup[text],
        lambda dq, text: dq.quotas.get(text),
        lambda dq, text: dq.quotas.set(text, "a", rate=1),
        lambda dq, text: dq.quotas.pause(text, "a"),
        lambda dq, text: dq.queues["push"].find(text),
        lambda dq, text: dq.queues["push"].cancel(text),
        lambda dq, text: dq.queues["push"].cancel_task_name(text),
        lambda dq, text: dq.queues["push"].move(text, tenant="a"),
        lambda dq, text: dq.find(text),
        lambda dq, text: dq.dead_letters["push"].edit(text),
        lambda dq, text: dq.dedup["push"].inspect(text),
        lambda dq, text: dq.dedup["push"].release(text),
        lambda dq, text: dq.revoke([text]),
    ],
)
def test_a_name_or_an_id_that_is_none(shop: Any, call: Callable[[Any, Any], Any], text: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"= .*(give a text, not empty|not valid Unicode)"):
        call(shop.dq, text)


@pytest.mark.parametrize("tenant", [1.5, b"x", ["a"], "a\n", "x" * 300, "\udcff"])
@pytest.mark.parametrize(
    "call",
    [
        lambda dq, tenant: dq.queues["push"].explain(tenant),
        lambda dq, tenant: dq.queues["push"].peek(tenant=tenant),
        lambda dq, tenant: dq.queues["push"].cancel_tenant(tenant),
        lambda dq, tenant: dq.queues["push"].move("other", tenant=tenant),
        lambda dq, tenant: dq.queues["push"].has_tenant(tenant),
        lambda dq, tenant: dq.quotas.get("push", tenant),
        lambda dq, tenant: dq.quotas.set("push", tenant, rate=1),
        lambda dq, tenant: dq.quotas.remove("push", tenant),
        lambda dq, tenant: dq.quotas.resume("push", tenant),
        lambda dq, tenant: dq.dedup["push"].release("k", tenant=tenant),
    ],
)
def test_a_tenant_that_is_none(shop: Any, call: Callable[[Any, Any], Any], tenant: Any) -> None:
    with pytest.raises(InvalidTenant, match="tenant"):
        call(shop.dq, tenant)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"rate": "50"}, "text without a unit"),
        ({"rate": "fast"}, "fast"),
        ({"weigth": 2}, "did you mean 'weight'"),
        ({"burst": 0}, "burst"),
        ({"rate": []}, "from 0.000001 to 100000"),
        ({"rate": float("nan")}, "is not a rate"),
        ({"rate": 10**400}, "is not"),
        ({"burst": "many"}, "from 1 to 1000000"),
        ({"weight": None}, "from 0.001 to 1000"),
        ({"concurrency": "4"}, "from 1 to 1000000"),
        ({"paused": 1}, "True or False"),
        ({"zeal": 1}, "known are rate"),
    ],
)
def test_a_quota_that_is_none(shop: Any, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidQuota, match=words):
        shop.dq.quotas.set("push", "a", **parts)
    with pytest.raises(InvalidQuota, match=words):
        shop.dq.quotas.set_default("push", **parts)
    assert shop.dq.quotas.list("push") == {}


@pytest.mark.parametrize("options", [{}, {"partitions": 4, "spread_above_per_s": 150}])
def test_a_quota_without_a_part(shop: Any, options: dict[str, int]) -> None:
    shop.conf.dq_queues = {"push": options}
    words = "name at least one of rate, burst, weight, concurrency, max_waiting, when_full, paused, spread"
    with pytest.raises(InvalidRequest, match=words):
        shop.dq.quotas.set("push", "a")
    with pytest.raises(InvalidRequest, match=words):
        shop.dq.quotas.set_default("push")
    assert shop.dq.quotas.list("push") == {}


@pytest.mark.parametrize("count", ["3", 0, 5000, 1.5, True])
def test_a_number_of_partitions_that_is_none(shop: Any, count: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"partitions = {count!r}: give a whole number from 1 to 4096$"):
        shop.dq.queues["push"].set_partitions(count)


def test_arguments_that_report_nothing_or_too_much(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    calls: list[Callable[[], Any]] = [
        lambda: queue.move("other"),
        lambda: queue.move("other", task_id="x", tenant="a"),
        lambda: queue.peek(tenant="a", delayed=True),
        lambda: shop.dq.explain(),
        lambda: shop.dq.explain(task_id=""),
        lambda: shop.dq.dead_letters["push"].list(5, -1),
    ]
    for call in calls:
        with pytest.raises(DQError):
            call()


def test_a_huge_read_is_many_commands(shop: Any, redis_url: str) -> None:
    amount = CHUNK + 200
    with shop.producer_or_acquire() as producer:
        for number in range(amount):
            tenant = f"t{number}" if number % 2 else "loud"
            shop.send_task("notify", (tenant,), tenant=tenant, producer=producer)
    queue = shop.dq.queues["push"]
    with redis.Redis.from_url(redis_url) as client, client.monitor() as monitor:
        assert len(queue.peek(MOST)) == amount
        assert len(queue.peek(amount - 7)) == amount - 7
        assert len(queue.peek(MOST, tenant="loud")) == amount // 2
        assert len(queue.tenants(MOST)) == amount // 2 + 1
        shop.dq.dedup["push"].repetition(1, sample=MOST)
        with redis.Redis.from_url(redis_url) as other:
            other.echo("the-end-of-this-test")
        longest = 0
        while "the-end-of-this-test" not in (command := monitor.next_command()["command"]):
            # The source of a script, which a server gets once, has as many words as it likes.
            if not command.startswith("EVAL "):
                longest = max(longest, len(command.split()))
    assert CHUNK < longest <= CHUNK + 4
    for number in (1, 2):
        shop.send_task("notify", ("late",), tenant="late", countdown=100 * number)
    assert [each.tenant for each in queue.peek(MOST, delayed=True)] == ["late"] * 2


def test_one_of_each_tenant_in_turn(shop: Any) -> None:
    for tenant in ["a"] * 6 + ["b"] * 3 + ["c"]:
        shop.send_task("notify", (tenant,), tenant=tenant)
    served = "".join(each.tenant for each in shop.dq.queues["push"].peek(9))
    assert served == "abcabab" + "aa"
    assert "".join(each.tenant for each in shop.dq.queues["push"].peek(4)) == "abca"
