"""Dedup keys of single calls, where no task has a dedup rule."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import redis
from celery import Task

from celery_dq.dedup.machine import Verdict
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import verdict_given
from celery_dq.errors import InvalidKey
from celery_dq.testing.waiting import wait_until
from tests.dedup.worker import Shop


@contextmanager
def plain_shop(broker_url: str, backend_url: str) -> Iterator[Shop]:
    """An app whose task, which waits at its barrier, has no dedup rule."""
    shop = Shop(broker_url, backend_url, dq_lease=10)
    for name in [name for name, task in shop.app.tasks.items() if rule_of(task) is not None]:
        shop.app.tasks.pop(name)

    def plain(task: Any, sku: Any, version: int = 0) -> Any:
        return shop.work(task, sku, version)

    shop.app.task(shared=False, name="plain", bind=True)(plain)
    yield shop
    shop.close()


@pytest.mark.parametrize("scheme", ["dq-redis", "redis"])
def test_they_exclude_each_other(redis_url: str, scheme: str) -> None:
    with plain_shop(redis_url.replace("redis://", f"{scheme}://"), redis_url) as shop, shop.working():
        plain = shop.task("plain")
        results = [plain.apply_async((1,), {"version": 1}, dedup={"key": "{sku}"})]
        wait_until(lambda: len(shop.runs) == 1, 30)
        results += [plain.apply_async((1,), {"version": n}, dedup={"key": "{sku}"}) for n in (2, 3)]
        other = plain.apply_async((2,))  # is received behind them
        wait_until(lambda: len(shop.runs) == 2, 30)
        shop.open(2)
        assert other.get(timeout=30) == [2, 0]
        shop.open(1, 3)
        assert [each.get(timeout=30) for each in results] == [[1, 1], [1, 2], [1, 2]]
        assert shop.overlaps == []


def test_a_receiver_learns_of_an_eviction(redis_url: str, lost: list[Any]) -> None:
    with (
        plain_shop(redis_url.replace("redis://", "dq-redis://"), redis_url) as shop,
        shop.working(),
        redis.Redis.from_url(redis_url) as client,
    ):
        plain = shop.task("plain")
        wait_until(lambda: client.pubsub_channels("*evicted*"), 30, what="an ear")
        head = plain.apply_async((1,), {"version": 1}, dedup={"key": "{sku}", "timeout": 0.2})
        wait_until(lambda: len(shop.runs) == 1, 30)
        tail = plain.apply_async((1,), {"version": 2}, dedup={"key": "{sku}"})
        assert tail.verdict is Verdict.BLOCK
        wait_until(
            lambda: [each[:2] for each in lost] == [("plain(sku=1)", head.id)], 30, what=lambda: str(lost)
        )
        shop.open(1, 2)
        assert tail.get(timeout=30) == [1, 2]


class Status(str, enum.Enum):
    PAID = "paid"


class Level(enum.IntEnum):
    HIGH = 2


#: Argument, the same as a worker reads it, and the option `dedup` of the call.
SENT: list[tuple[Any, Any, dict[str, Any]]] = [
    (Status.PAID, "paid", {"key": "{sku}"}),
    ([Level.HIGH], [2], {"key": "{sku}"}),
    ({1: {None: Status.PAID}}, {"1": {"null": "paid"}}, {"key": "{sku}"}),
    ((3, 4), [3, 4], {"key": "{sku}"}),
    (Status.PAID, Status.PAID, {"key": "{sku.name}", "name": "by attribute"}),
]


@pytest.mark.parametrize("scheme", ["dq-redis", "redis"])
@pytest.mark.parametrize("how", ["retry", "replace"])
def test_a_run_that_goes_on_has_the_key_of_its_message(redis_url: str, scheme: str, how: str) -> None:
    """The key is that of what is sent, and neither a retry nor a replacement makes it again."""
    blocked: list[str] = []

    def receive(verdict: Verdict, task_id: str, **_: Any) -> None:
        blocked.extend([task_id] * (verdict is Verdict.BLOCK))

    verdict_given.connect(receive)  # weakly, for as long as the test runs
    with plain_shop(redis_url.replace("redis://", f"{scheme}://"), redis_url) as shop:

        def run(task: Any, sku: Any, version: int = 0, *, of: int) -> Any:
            request = task.request
            first = not (version or request.retries or request.replaced_task_nesting)
            shop.work(task, of, version if version else int(not first))
            if first and how == "retry":
                raise task.retry(countdown=0)
            if first:
                raise task.replace(stubborn.s(*request.args, **request.kwargs))

        stubborn = shop.app.task(shared=False, name="stubborn", bind=True, max_retries=1)(run)
        with shop.working(concurrency=2 * len(SENT)):
            calls = [
                stubborn.apply_async((sku,), {"of": n}, dedup=rule) for n, (sku, _, rule) in enumerate(SENT)
            ]
            wait_until(lambda: len(shop.runs) == len(SENT), 30)
            for n, (_, sent, rule) in enumerate(SENT):
                later = stubborn.apply_async((sent, 10), {"of": n}, dedup=rule)
                wait_until(partial(blocked.__contains__, later.id), 30, what=f"{sent} waits")
                calls.append(later)
            for n in range(len(SENT)):
                shop.open(n)
            wait_until(lambda: len(shop.runs) == 2 * len(SENT), 30)
            if scheme == "dq-redis" or how == "retry":
                assert sorted(shop.ran()) == [0] * len(SENT) + [1] * len(SENT)
            for n in range(len(SENT)):
                shop.open(n, 2)
            for each in calls:
                each.get(timeout=30)
        assert shop.overlaps == []
        # On other brokers a replacement asks for the key as any call, and a waiting call may cover it.
        assert len(shop.runs) == 3 * len(SENT) or (scheme, how) == ("redis", "replace")


@pytest.mark.parametrize("scheme", ["dq-redis", "redis"])
def test_a_retry_of_a_call_without_a_key_has_none(redis_url: str, scheme: str) -> None:
    with plain_shop(redis_url.replace("redis://", f"{scheme}://"), redis_url) as shop:

        def run(task: Any, sku: Any) -> Any:
            shop.work(task, sku, task.request.retries)
            if task.request.retries == 0 and task.request.id == "excluded":
                raise task.retry(countdown=0)

        options = {"bind": True, "max_retries": 1, "dedup": {"key": "{sku}"}}
        keyed = shop.app.task(shared=False, name="keyed", **options)(run)
        with shop.working():
            excluded = keyed.apply_async((1,), task_id="excluded", dedup=False)
            wait_until(lambda: len(shop.runs) == 1, 30)
            keyed.delay(1)
            wait_until(lambda: len(shop.runs) == 2, 30)
            shop.open(1)
            wait_until(lambda: ("excluded", 1) in shop.runs, 30, what=lambda: str(shop.runs))
            shop.open(1, 2)
            excluded.get(timeout=30)


@pytest.mark.parametrize(
    "forged", ["text", {"key": 1}, {"key": "k", "policy": "x", "waiting": "y", "timeout": 1}]
)
def test_a_forged_header_fails_its_task_and_no_other(redis_url: str, forged: Any) -> None:
    with plain_shop(redis_url, redis_url) as shop, shop.working():
        plain = shop.task("plain")
        with pytest.raises(InvalidKey, match="dq_claim is not as celery-dq writes it"):
            plain.apply_async((1,), headers={"dq_claim": forged}).get(timeout=30)
        shop.open(2)
        assert plain.delay(2).get(timeout=30) == [2, 0]


if hasattr(Task, "retry_on_worker_lost"):  # since Celery 5.7

    @pytest.mark.parametrize("scheme", ["dq-redis", "redis"])
    @pytest.mark.parametrize("rule", [{}, {"on_duplicate": "replace"}, {"waiting": 0}], ids=str)
    def test_a_run_whose_process_is_lost_keeps_its_key_for_its_retry(
        redis_url: str, scheme: str, rule: dict[str, Any], verdicts: list[Verdict]
    ) -> None:
        with plain_shop(redis_url.replace("redis://", f"{scheme}://"), redis_url) as shop:

            def run(task: Any, sku: Any, version: int) -> Any:
                shop.work(task, sku, version)
                if version == 1 and not task.request.retries:
                    sys.exit()  # a pool of threads reports it as the loss of a process
                return [sku, version]

            options = {"bind": True, "retry_on_worker_lost": True, "default_retry_delay": 0}
            lost = shop.app.task(shared=False, name="lost", dedup={"key": "{sku}", **rule}, **options)(run)
            with shop.working():
                head = lost.delay(1, 1)
                wait_until(lambda: len(shop.runs) == 1, 30)
                later = lost.delay(1, 2)
                wait_until(lambda: len(verdicts) == 2, 30)
                shop.open(1, 3)
                assert head.get(timeout=30) == [1, 1]
                last = 1 if verdicts[1] is Verdict.DECLINE else 2
                assert later.get(timeout=30) == [1, last]
            assert shop.ran() == [1, 1, 2][: last + 1]
