"""Dedup on brokers that give no verdicts: the worker requests them from a coordinator."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest
import redis
from celery import Celery, chain, group
from celery.exceptions import TaskRevokedError
from celery.worker import state

from celery_dq.dedup import dedup
from celery_dq.dedup.machine import Verdict
from celery_dq.errors import ConfigurationError, CoveringRunUnknown, InvalidKey, InvalidRequest
from celery_dq.keys import DedupKeys
from celery_dq.other_brokers import dedup_locks
from celery_dq.other_brokers.dedup_locks import DedupLocksStep
from celery_dq.testing import waiting
from tests.dedup.conftest import redis_coordinator
from tests.dedup.worker import Shop

wait_until = partial(waiting.wait_until, timeout_s=40)


@pytest.fixture(params=["redis", "amqp"])
def broker_url(request: pytest.FixtureRequest, redis_url: str) -> str:
    return redis_url if request.param == "redis" else request.getfixturevalue("rabbitmq_server").url()


@pytest.fixture
def shop(broker_url: str, redis_url: str) -> Iterator[Shop]:
    queue = f"cache-{uuid.uuid4().hex}"
    shop = Shop(broker_url, redis_url, dq_lease=6, worker_prefetch_multiplier=1, task_default_queue=queue)
    yield shop
    with shop.app.connection_for_write() as connection:
        connection.default_channel.queue_delete(queue)
    shop.close()
    with redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: client.keys("*lock:*") == [], what=lambda: str(client.keys("*lock*")))
    assert shop.overlaps == []


def running(shop: Shop, count: int) -> None:
    wait_until(lambda: len(shop.runs) == count, what=lambda: f"ran {shop.runs}")


def has(verdicts: list[Verdict], count: int) -> bool:
    return len(verdicts) == count


def test_one_runs_one_waits_the_rest_is_covered(shop: Shop, verdicts: list[Verdict]) -> None:
    refresh = shop.task("refresh")
    with shop.working(concurrency=2):
        first = refresh.delay(1, version=1)
        running(shop, 1)
        second = refresh.delay(1, version=2)
        wait_until(lambda: len(verdicts) == 2)
        third = refresh.delay(1, version=3)
        wait_until(lambda: len(verdicts) == 3)
        assert verdicts == [Verdict.ACCEPT, Verdict.BLOCK, Verdict.DECLINE]
        # Waiting calls hold no slot of the pool: another key runs at once.
        other = refresh.delay(2, version=9)
        running(shop, 2)
        shop.open(2)
        assert other.get(timeout=40) == [2, 9]
        shop.open(1, 2)
        assert first.get(timeout=40) == [1, 1]
        assert second.get(timeout=40) == third.get(timeout=40) == [1, 2]
        assert shop.ran() == [1, 9, 2]
        assert shop.tokens[2] > shop.tokens[0] > 0


def test_the_prefetch_count_is_the_same_after_waiting_calls(shop: Shop, verdicts: list[Verdict]) -> None:
    refresh = shop.task("refresh")
    with shop.working() as worker:
        qos = worker.consumer.qos
        before = qos.value
        first = refresh.delay(1, version=1)
        running(shop, 1)
        waiting = []
        # One call waits, and the last one replaces it. The others are covered, and one of them is revoked.
        for version, rule in enumerate(({}, {}, {}, {"on_duplicate": "replace"}), 2):
            waiting.append(refresh.apply_async((1,), {"version": version}, dedup=rule))
            wait_until(partial(has, verdicts, version))
        wait_until(lambda: qos.value == before + 4, what=lambda: f"{before} + 4; it is {qos.value}")
        state.revoked.add(waiting[2].id)
        shop.open(1, 2)
        assert first.get(timeout=40) == [1, 1]
        for each in (waiting[0], waiting[1], waiting[3]):
            assert each.get(timeout=40) == [1, 5]
        with pytest.raises(TaskRevokedError):
            waiting[2].get(timeout=40)
        wait_until(lambda: qos.value == before, what=lambda: f"{before}; it is {qos.value}")
        # Celery sends the ack to the broker in the next turn of its loop.
        assert shop.task("note").delay(1).get(timeout=40) == 1
        assert qos.prev == before
    state.revoked.discard(waiting[2].id)


def test_a_follower_of_a_replaced_call_gets_the_result_of_the_later_one(
    shop: Shop, verdicts: list[Verdict]
) -> None:
    refresh = shop.task("refresh")
    with shop.working():
        refresh.delay(1, version=1)
        running(shop, 1)
        calls: list[Any] = [
            ({}, Verdict.BLOCK),
            ({}, Verdict.DECLINE),
            ({"on_duplicate": "replace"}, Verdict.BLOCK),
        ]
        results = []
        for version, (rule, verdict) in enumerate(calls, 2):
            results.append(refresh.apply_async((1,), {"version": version}, dedup=rule))
            wait_until(partial(has, verdicts, version))
            assert verdicts[-1] is verdict
        shop.open(1, 2)
        assert [each.get(timeout=40) for each in results] == [[1, 4]] * 3
        assert shop.ran() == [1, 4]


def test_a_covering_run_without_a_result_is_not_waited_for_for_ever(
    shop: Shop, verdicts: list[Verdict]
) -> None:
    refresh = shop.task("refresh")
    with shop.working():
        refresh.apply_async((1,), ignore_result=True)
        running(shop, 1)
        follower = refresh.apply_async((1,), dedup={"waiting": 0})
        wait_until(lambda: len(verdicts) == 2)
        shop.open(1)
        with pytest.raises(CoveringRunUnknown):
            follower.get(timeout=40)


def test_chains_and_groups_of_duplicates(shop: Shop) -> None:
    refresh, note = shop.task("refresh"), shop.task("note")
    with shop.working():
        blocker = refresh.delay(1, version=0)
        running(shop, 1)
        chains = [chain(refresh.s(1, version), note.s()).apply_async() for version in (1, 2)]
        together = group(refresh.s(1, version) for version in (3, 4)).apply_async()
        shop.open(1, 6)
        assert blocker.get(timeout=40) == [1, 0]
        values = [each.get(timeout=40) for each in chains]
        assert together.get(timeout=40)
        assert all(value[0] == 1 for value in values)


@pytest.mark.parametrize("countdown", [0.0, 0.3])
def test_retries_keep_the_key(shop: Shop, verdicts: list[Verdict], countdown: float) -> None:
    failing = shop.task("failing")
    with shop.working():
        first = failing.delay(1, countdown=countdown)
        running(shop, 1)
        tail = failing.apply_async((1,), task_id=uuid.uuid4().hex)
        wait_until(lambda: len(verdicts) == 2)
        shop.open(1, 6)
        assert first.get(timeout=40) == tail.get(timeout=40) == "done"
        assert [each for each, _ in shop.runs] == [first.id] * 3 + [tail.id] * 3


@pytest.fixture
def in_shanghai() -> Iterator[None]:
    """The zone of this machine is eight hours ahead of UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Asia/Shanghai")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_shanghai")
@pytest.mark.parametrize("broker_url", ["redis"], indirect=True)
def test_the_key_of_a_retry_is_renewed_until_it_is_due(
    shop: Shop, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far less than the difference between the two zones.
    monkeypatch.setattr(dedup_locks, "RETRY_GRACE", 0.5)
    coordinator = redis_coordinator(redis.Redis.from_url(redis_url))
    leases: dict[int, list[float]] = {sku: [] for sku in range(4)}

    def waits(sku: int) -> bool:
        now = coordinator.inspect(f"{shop.queue}|failing(sku={sku})")
        return now is not None and now.head is not None and not now.head.token

    def renewed(sku: int) -> bool:
        now = coordinator.inspect(f"{shop.queue}|failing(sku={sku})")
        assert now is not None
        assert now.head is not None
        assert not now.head.token
        leases[sku].append(now.head.lease)
        return leases[sku][-1] > min(leases[sku])

    with shop.working():
        due = datetime.now(timezone.utc) + timedelta(seconds=7)
        naive = due.replace(tzinfo=None)  # Celery takes it as UTC
        times: list[dict[str, Any]] = [
            {"countdown": 7},
            *({"countdown": None, "eta": eta} for eta in (naive, naive.isoformat(), due)),
        ]
        results = [shop.task("failing").delay(sku, **when) for sku, when in enumerate(times)]
        for sku in leases:
            shop.open(sku, 3)
        wait_until(lambda: all(waits(sku) for sku in leases), what=lambda: f"{times} to wait")
        # Each is checked in each turn.
        wait_until(lambda: sum(map(renewed, leases)) == len(leases))
        # The test need not wait for the retries that are left.
        shop.app.control.revoke([result.id for result in results])
        wait_until(lambda: all(result.state == "REVOKED" for result in results))
    assert shop.ran() == [0] * len(leases)


def test_a_revoked_task_that_waits_leaves_its_place(
    shop: Shop, verdicts: list[Verdict], redis_url: str
) -> None:
    refresh = shop.task("refresh")
    coordinator = redis_coordinator(redis.Redis.from_url(redis_url))

    def no_call_waits() -> bool:
        now = coordinator.inspect(f"{shop.queue}|refresh(sku=1)")
        return now is not None and now.tail is None

    with shop.working():
        refresh.delay(1, version=1)
        running(shop, 1)
        tail = refresh.delay(1, version=2)
        wait_until(lambda: len(verdicts) == 2)
        shop.app.control.revoke(tail.id)
        wait_until(lambda: tail.state == "REVOKED")
        # The worker has released the lock, long before its lease would have ended.
        wait_until(no_call_waits)
        third = refresh.delay(1, version=3)
        wait_until(lambda: verdicts == [Verdict.ACCEPT, Verdict.BLOCK, Verdict.BLOCK])
        covered = refresh.delay(1, version=4)
        wait_until(lambda: verdicts[3:] == [Verdict.DECLINE])
        shop.app.control.revoke(covered.id)
        wait_until(lambda: covered.state == "REVOKED")
        shop.open(1, 2)
        assert third.get(timeout=40) == [1, 3]


def test_a_run_that_lasts_too_long_is_evicted(shop: Shop, lost: list[Any]) -> None:
    refresh = shop.task("refresh")
    with shop.working():
        head = refresh.apply_async((1,), {"version": 1}, dedup={"timeout": 0.2})
        running(shop, 1)
        tail = refresh.delay(1, version=2)
        running(shop, 2)
        assert shop.overlaps == [1]
        assert shop.tokens[1] > shop.tokens[0]
        shop.overlaps.clear()
        shop.open(1, 2)
        assert tail.get(timeout=40)[0] == 1
    # The loss is reported once, though a renewal and the end of the run both notice it.
    assert lost == [(f"{shop.queue}|refresh(sku=1)", head.id, shop.tokens[0])]


@pytest.mark.parametrize("broker_url", ["redis"], indirect=True)
def test_a_run_that_fails_reports_no_lost_lock(shop: Shop, lost: list[Any]) -> None:
    @dedup(key="{sku}")
    def fail(sku: Any) -> None:
        raise KeyError(sku)

    always_failing = shop.app.task(shared=False, name="always_failing")(fail)
    with shop.working(), pytest.raises(KeyError):
        always_failing.delay(1).get(timeout=40)
    assert lost == []


def test_claims_can_be_looked_at_and_taken_away(shop: Shop, verdicts: list[Verdict]) -> None:
    refresh, claims, key = shop.task("refresh"), shop.app.dq.dedup[shop.queue], "refresh(sku=1)"
    assert claims.list() == []
    assert claims.inspect(key) is claims.release(key) is None
    with shop.working():
        head = refresh.apply_async((1,), {"version": 1}, dedup={"timeout": 60})
        running(shop, 1)
        tail = refresh.delay(1, version=2)
        wait_until(lambda: len(verdicts) == 2)
        covered = refresh.delay(1, version=3)
        wait_until(lambda: len(verdicts) == 3)
        found = claims.inspect(key)
        assert [each.key for each in claims.list()] == [key]
        assert (found.head, found.heir, found.tail, found.running) == (head.id, "", tail.id, True)
        assert (found.token, found.timeout_s, found.followers) == (shop.tokens[0], 60, 0)
        assert found.age_s > 0
        assert found.worker
        assert claims.verdicts() == {"accept": 1, "block": 1, "decline": 1}
        assert claims.release(key) == head.id
        # The waiting call runs, beside the old run.
        running(shop, 2)
        assert shop.tokens[1] > shop.tokens[0]
        assert shop.overlaps == [1]
        shop.overlaps.clear()
        shop.open(1, 2)
        assert covered.get(timeout=40)[0] == 1
    with pytest.raises(InvalidRequest, match="leave it out"):
        claims.inspect(key, tenant="t")
    with pytest.raises(ConfigurationError, match="cannot be looked at"):
        claims.repetition(4)
    assert shop.queue in shop.app.dq.dedup


def test_unwanted_results_are_dropped(shop: Shop, verdicts: list[Verdict]) -> None:
    refresh = shop.task("refresh")
    with shop.working():
        refresh.apply_async((1,), ignore_result=True)
        running(shop, 1)
        for count in (2, 3, 4):
            refresh.apply_async((1,), ignore_result=True)
            wait_until(partial(has, verdicts, count))
        assert verdicts[2:] == [Verdict.DECLINE] * 2
        shop.open(1, 2)
        running(shop, 2)


def refusals(client: Any) -> int:
    found = client.info("errorstats")["errorstat_WRONGTYPE"]
    # redis-py 5.0 does not parse it.
    return int(found["count"] if isinstance(found, dict) else found.removeprefix("count="))


def test_a_coordinator_that_does_not_answer_is_asked_again(
    shop: Shop, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis.from_url(redis_url) as client, shop.working():
        claim = DedupKeys("online").dedup_lock(f"{shop.queue}|refresh(sku=1)")
        client.set(claim, "not a claim")
        first = shop.task("refresh").delay(1, version=1)
        wait_until(lambda: "cannot be requested (ResponseError: WRONGTYPE" in caplog.text)
        assert shop.runs == []
        before = refusals(client)
        wait_until(lambda: refusals(client) > before)
        client.delete(claim)
        shop.open(1)
        assert first.get(timeout=40) == [1, 1]


@pytest.mark.logged_error("was not released; it ends with its lease")
@pytest.mark.logged_error("its dedup lock cannot be requested")
@pytest.mark.parametrize("broker_url", ["redis"], indirect=True)
def test_a_key_with_another_value_stops_neither_other_keys_nor_the_worker(
    shop: Shop, redis_url: str, verdicts: list[Verdict], caplog: pytest.LogCaptureFixture
) -> None:
    refresh = shop.task("refresh")
    with redis.Redis.from_url(redis_url) as client, shop.working():
        heads = [refresh.delay(sku, version=1) for sku in (1, 2)]
        running(shop, 2)
        # Of each key, one call waits behind the head, and one wants the result of that call.
        waiting = [[refresh.delay(sku, version=version) for version in (2, 3)] for sku in (1, 2)]
        wait_until(lambda: has(verdicts, 6))
        damaged = DedupKeys("online").dedup_lock(f"{shop.queue}|refresh(sku=1)")
        client.set(damaged, "not a claim")
        shop.open(1)
        assert heads[0].get(timeout=40) == [1, 1]
        wait_until(lambda: "cannot be requested (ResponseError: WRONGTYPE" in caplog.text)
        shop.open(2, 2)
        assert [each.get(timeout=40) for each in (heads[1], *waiting[1])] == [[2, 1], [2, 2], [2, 2]]
        client.delete(damaged)
        shop.open(1, 2)
        assert waiting[0][0].get(timeout=40) == [1, 2]
        assert waiting[0][1].get(timeout=40) in ([1, 2], [1, 3])


def test_arguments_without_a_key_fail_their_task(shop: Shop) -> None:
    # An app without the task sends no key.
    with shop.working(), Celery("other", broker=shop.app.conf.broker_url, set_as_current=False) as other:
        other.send_task("refresh", (), task_id="wrong", queue=shop.queue)
        with pytest.raises(InvalidKey, match="missing a required argument"):
            shop.app.AsyncResult("wrong").get(timeout=40)


def test_in_one_process_without_redis(verdicts: list[Verdict]) -> None:
    shop = Shop("memory://", "cache+memory://", dq_lease=1)
    with shop.working():
        shop.task("refresh").delay(1, version=1)
        running(shop, 1)
        for version in (2, 3):
            shop.task("refresh").apply_async((1,), {"version": version}, ignore_result=True)
        wait_until(lambda: len(verdicts) == 3)
        claims = shop.app.dq.dedup["cache"]
        assert claims.verdicts() == {"accept": 1, "block": 1, "decline": 1}
        (found,) = claims.list()
        assert (found.key, found.head, found.running) == ("refresh(sku=1)", shop.runs[0][0], True)
        shop.open(1, 2)
        running(shop, 2)
    assert shop.overlaps == []


def test_a_broker_without_a_place_for_claims_is_an_error() -> None:
    shop = Shop("amqp://nowhere", "rpc://")
    consumer: Any = type("Consumer", (), {})()
    consumer.app, consumer.hostname, consumer.conninfo = shop.app, "h", shop.app.connection_for_read()
    with pytest.raises(ConfigurationError, match="set dq_dedup_url"):
        DedupLocksStep(consumer)


def test_a_call_that_loses_its_place_behind_a_run_waits_again(
    shop: Shop, redis_url: str, verdicts: list[Verdict]
) -> None:
    refresh = shop.task("refresh")
    with shop.working():
        head = refresh.delay(1, version=1)
        running(shop, 1)
        tail = refresh.delay(1, version=2)
        wait_until(lambda: len(verdicts) == 2)
        with redis.Redis.from_url(redis_url) as client:
            # Simulate the end of its lease. The present run began before this call, so it does not cover it.
            key = DedupKeys("online").dedup_lock(f"{shop.queue}|refresh(sku=1)")
            assert client.hdel(key, "tail") == 1
            wait_until(lambda: len(verdicts) == 3)
        assert verdicts == [Verdict.ACCEPT, Verdict.BLOCK, Verdict.BLOCK]
        shop.open(1, 2)
        assert head.get(timeout=40) == [1, 1]
        assert tail.get(timeout=40) == [1, 2]
        assert shop.ran() == [1, 2]
