"""Dedup on the tenant broker, with a real worker."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis
from celery import chain, chord, group
from celery.beat import Scheduler

from celery_dq.dedup.machine import Verdict
from celery_dq.dedup.signals import verdict_given
from celery_dq.errors import DuplicateCall, InvalidKey
from celery_dq.keys import PartitionKeys
from celery_dq.testing import waiting
from tests.dedup.worker import Shop

wait_until = partial(waiting.wait_until, timeout_s=40)
KEYS = PartitionKeys("online", "cache")


@pytest.fixture
def shop(redis_url: str) -> Iterator[Shop]:
    shop = Shop(redis_url.replace("redis://", "dq-redis://"), redis_url, dq_lease=10)
    yield shop
    shop.close()


def running(shop: Shop, count: int) -> None:
    wait_until(lambda: len(shop.runs) == count, what=lambda: f"ran {shop.runs}")


@pytest.fixture
def no_claim_left(shop: Shop, redis_url: str) -> Iterator[None]:
    """Check that after the test only the counters of dedup are in Redis."""
    yield
    with redis.Redis.from_url(redis_url) as client:

        def empty() -> bool:
            keys = (
                KEYS.dedup_locks,
                KEYS.dedup_members,
                KEYS.blocked,
                KEYS.following,
                KEYS.evictions,
                KEYS.messages,
            )
            return client.exists(*keys) == 0 and not client.keys(KEYS.followers("*"))

        wait_until(empty, what=lambda: str(client.keys("*")))
    assert shop.overlaps == []


pytestmark = pytest.mark.usefixtures("no_claim_left")


class TestVerdicts:
    def test_accept_decline_block(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        first = refresh.delay(1, version=1)
        assert first.verdict is Verdict.ACCEPT
        # The first call waits, so it covers a second call with equal arguments in another form.
        second = refresh.apply_async(kwargs={"sku": 1, "version": 2})
        assert (second.verdict, second.id, second.covering) == (Verdict.DECLINE, first.id, first.id)
        assert refresh.delay("1").verdict is Verdict.ACCEPT
        with shop.working():
            running(shop, 2)
            # The first call runs, and may have read old data: one call may wait, and covers the next.
            third = refresh.delay(1, version=3)
            assert (third.verdict, third.covering) == (Verdict.BLOCK, first.id)
            fourth = refresh.delay(1, version=4)
            assert (fourth.verdict, fourth.id) == (Verdict.DECLINE, third.id)
            shop.open(1, 2)
            shop.open("1")
            assert second.get(timeout=40) == [1, 1]
            assert fourth.get(timeout=40) == [1, 3]
            assert sorted(shop.ran()) == [0, 1, 3]
            assert shop.tokens[2] > max(shop.tokens[:2]) > 0

    def test_the_tail_takes_no_slot(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        with shop.working(concurrency=2):
            refresh.delay(1)
            running(shop, 1)
            assert refresh.delay(1).verdict is Verdict.BLOCK
            refresh.delay(2)
            running(shop, 2)
            for sku in (1, 1, 2):
                shop.open(sku)
            running(shop, 3)

    def test_replace(self, shop: Shop) -> None:
        latest = shop.task("latest")
        first = latest.delay(1, version=1)
        second = latest.delay(1, version=2)
        assert second.verdict is Verdict.ACCEPT
        with shop.working():
            running(shop, 1)
            third, fourth = latest.delay(1, version=3), latest.delay(1, version=4)
            assert third.verdict is fourth.verdict is Verdict.BLOCK
            shop.open(1, 2)
            assert fourth.get(timeout=40) == [1, 4]
            # The replaced calls get the result of the call that took their place.
            assert first.get(timeout=40) == second.get(timeout=40) == [1, 2]
            assert third.get(timeout=40) == [1, 4]
            assert shop.ran() == [2, 4]

    def test_raise(self, shop: Shop) -> None:
        strict = shop.task("strict")
        strict.delay(1)
        awaited = set(shop.app.backend.result_consumer.subscribed_to)
        for options in ({}, {"countdown": 0.0}):
            match = r"strict: .* covers this call \(strict\(sku=1\)\)"
            with pytest.raises(DuplicateCall, match=match) as caught:
                strict.apply_async((1,), **options)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        # No consumer waits for the result of a declined call.
        assert shop.app.backend.result_consumer.subscribed_to == awaited
        with shop.working():
            shop.open(1)
            running(shop, 1)

    def test_per_call(self, shop: Shop) -> None:
        refresh, note = shop.task("refresh"), shop.task("note")
        first = refresh.delay(1, version=1)
        alone = refresh.apply_async((2,), {"version": 2}, dedup={"key": "constant"})
        assert alone.verdict is Verdict.ACCEPT
        assert note.apply_async((1,), dedup={"key": "{value}"}).verdict is Verdict.ACCEPT
        assert note.apply_async((1,), dedup={"key": "{value}"}).verdict is Verdict.DECLINE
        assert not hasattr(refresh.apply_async((3,), dedup=False), "verdict")
        with shop.working():
            for sku in (1, 2, 3):
                shop.open(sku)
            first.get(timeout=40)
            running(shop, 4)

    def test_no_call_waits(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        with shop.working():
            first = refresh.apply_async((1,), dedup={"waiting": 0})
            running(shop, 1)
            second = refresh.apply_async((1,), dedup={"waiting": 0})
            assert (second.verdict, second.id) == (Verdict.DECLINE, first.id)
            shop.open(1)

    def test_tenants_do_not_share_keys(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        verdicts = [refresh.apply_async((1,), tenant=each).verdict for each in ("a", "b", "a")]
        assert verdicts == [Verdict.ACCEPT, Verdict.ACCEPT, Verdict.DECLINE]
        shop.open(1, 2)
        shop.overlaps = []
        with shop.working(concurrency=1):
            running(shop, 2)

    def test_the_children_of_a_task_are_those_that_run(self, shop: Shop) -> None:
        with shop.working():
            first = shop.task("refresh").delay(1)
            running(shop, 1)
            tail = shop.task("refresh").delay(1)
            caller = shop.task("caller").delay(1)
            caller.get(timeout=40)
            assert [child.id for child in caller.children] == [tail.id]
            shop.open(1, 2)
            assert first.get(timeout=40) == tail.get(timeout=40)

    def test_an_unusable_argument_is_named(self, shop: Shop) -> None:
        with pytest.raises(InvalidKey, match=r"task refresh: sku is of type builtins\.object"):
            shop.task("refresh").delay(object())

    def test_signal_and_counters(self, shop: Shop) -> None:
        received: list[tuple[str, Verdict]] = []

        def receive(sender: str, verdict: Verdict, key: str, **_: Any) -> None:
            received.append((key, verdict))

        verdict_given.connect(receive)
        try:
            shop.task("refresh").delay(1)
            shop.task("refresh").delay(1)
        finally:
            verdict_given.disconnect(receive)
        assert received == [("refresh(sku=1)", Verdict.ACCEPT), ("refresh(sku=1)", Verdict.DECLINE)]
        assert shop.app.dq.dedup["cache"].verdicts() == {"accept": 1, "decline": 1}
        with shop.working():
            shop.open(1)
            running(shop, 1)

    def test_repetition_of_a_waiting_call(self, shop: Shop) -> None:
        note = shop.task("note")
        for value in (1, 1, 2, 3, 1, {"b": 1, "a": 2}, {"a": 2, "b": 1}):
            note.delay(value)
        report = shop.app.dq.dedup["cache"].repetition(consumers=2)
        assert (report.kind.value, report.calls, report.keys, report.repeated) == ("high", 7, 4, 2)
        assert shop.app.dq.queues["cache"].purge() == 7

    def test_send_task_from_a_process_that_does_not_know_the_task(self, shop: Shop, redis_url: str) -> None:
        first = shop.app.send_task("refresh", (1,))
        assert first.verdict is Verdict.ACCEPT
        assert shop.app.send_task("refresh", kwargs={"sku": 1}).id == first.id
        with shop.working():
            shop.open(1)
            assert first.get(timeout=40) == [1, 0]

    def test_beat(self, shop: Shop) -> None:
        beat = Scheduler(shop.app, schedule={}, lazy=True)
        beat.update_from_dict({"r": {"task": "refresh", "schedule": 1.0, "args": (1,)}})
        verdicts = [beat.apply_async(beat.schedule["r"]).verdict for _ in range(3)]
        assert verdicts == [Verdict.ACCEPT, Verdict.DECLINE, Verdict.DECLINE]
        with shop.working():
            shop.open(1)
            running(shop, 1)

    def test_eager_calls_just_run(self, shop: Shop) -> None:
        shop.app.conf.task_always_eager = True
        shop.open(1, 3)
        refresh = shop.task("refresh")
        for result in (refresh.delay(1), refresh.delay(1), refresh.apply((1,))):
            assert result.get() == [1, 0]
            assert (result.verdict, result.covering) == (Verdict.ACCEPT, result.id)


class TestCanvas:
    def test_a_duplicate_with_a_link_gets_the_covering_result(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        first = refresh.delay(1, version=1)
        second = refresh.apply_async((1,), {"version": 2}, link=shop.task("note").s())
        assert (second.verdict, second.id) == (Verdict.DECLINE, first.id)
        with shop.working():
            shop.open(1)
            wait_until(lambda: ("note", [1, 1]) in shop.runs)
            assert shop.ran().count([1, 1]) == 1

    @pytest.mark.parametrize("serializer", ["json", "pickle"])
    def test_chains_of_duplicates_both_go_on(self, shop: Shop, serializer: str) -> None:
        shop.app.conf.update(task_serializer=serializer, accept_content=["json", serializer])
        refresh, note = shop.task("refresh"), shop.task("note")
        both = [chain(refresh.s(1, version), note.s(version)) for version in (1, 2)]
        chains: list[Any] = [each.apply_async() for each in both]
        with shop.working():
            shop.open(1)
            assert [each.get(timeout=40) for each in chains] == [[1, 1], [1, 1]]
            assert chains[1].parent.get(timeout=40) == [1, 1]
            assert [run for run in shop.runs if run[0] != "note"] == [(chains[0].parent.id, 1)]

    def test_a_group_of_duplicates_is_ready(self, shop: Shop) -> None:
        result = group(shop.task("refresh").s(1, version) for version in range(4)).apply_async()
        with shop.working():
            shop.open(1)
            assert result.get(timeout=40) == [[1, 0]] * 4
            assert len(shop.runs) == 1

    def test_a_chord_of_duplicates_fires_once(self, shop: Shop) -> None:
        header = [shop.task("refresh").s(sku, version) for sku, version in ((1, 1), (1, 2), (2, 3))]
        result = chord(header)(shop.task("note").s())
        with shop.working():
            shop.open(1)
            shop.open(2)
            assert result.get(timeout=40) == [[1, 1], [1, 1], [2, 3]]

    def test_followers_of_a_failure_fail(self, shop: Shop) -> None:
        results = [shop.task("broken").apply_async((1,), task_id=each) for each in ("a", "b")]
        with shop.working():
            shop.open(1)
            for each in results:
                with pytest.raises(ValueError, match="1"):
                    each.get(timeout=40)


class TestRepeating:
    @pytest.mark.parametrize("countdown", [0.0, 0.3])
    def test_retries_keep_the_key(self, shop: Shop, countdown: float) -> None:
        failing = shop.task("failing")
        with shop.working():
            first = failing.delay(1, countdown=countdown)
            running(shop, 1)
            tail = failing.apply_async((1,), task_id="tail")
            assert tail.verdict is Verdict.BLOCK
            shop.open(1, 6)
            assert first.get(timeout=40) == tail.get(timeout=40) == "done"
            # All attempts of the first call come before those of the tail.
            assert [each for each, _ in shop.runs] == [first.id] * 3 + ["tail"] * 3

    def test_autoretry(self, shop: Shop) -> None:
        with shop.working():
            first = shop.task("auto").delay(1)
            shop.open(1, 2)
            assert first.get(timeout=40) == "done"
            assert shop.ran() == [0, 1]

    def test_replace_keeps_the_key(self, shop: Shop) -> None:
        with shop.working():
            first = shop.task("replaced").delay(1)
            running(shop, 1)
            tail = shop.task("replaced").delay(1)
            assert tail.verdict is Verdict.BLOCK
            shop.open(1, 4)
            assert first.get(timeout=40) == tail.get(timeout=40) == [1, 1]
            assert shop.ran() == [0, 1, 0, 1]


class TestEnds:
    def test_a_revoked_head_promotes_the_tail(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        first = refresh.delay(1, version=1)
        shop.app.control.revoke(first.id)
        second = refresh.delay(1, version=2)
        assert second.verdict is Verdict.ACCEPT
        with shop.working():
            shop.open(1)
            assert second.get(timeout=40) == [1, 2]
            assert shop.ran() == [2]
            wait_until(lambda: first.state == "REVOKED")

    def test_an_expired_head_promotes_the_tail(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        first = refresh.apply_async((1,), expires=0.001)
        with shop.working():
            wait_until(lambda: first.state == "REVOKED")
            second = refresh.delay(1, version=2)
            assert second.verdict is Verdict.ACCEPT
            shop.open(1)
            assert second.get(timeout=40) == [1, 2]

    def test_a_revoked_tail_leaves_its_place(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        with shop.working():
            refresh.delay(1, version=1)
            running(shop, 1)
            tail = refresh.delay(1, version=2)
            shop.app.control.revoke(tail.id)
            third = refresh.delay(1, version=3)
            assert third.verdict is Verdict.BLOCK
            shop.open(1, 2)
            assert third.get(timeout=40) == [1, 3]
            assert shop.ran() == [1, 3]

    def test_a_head_that_runs_too_long_is_evicted(self, shop: Shop, lost: list[Any]) -> None:
        refresh = shop.task("refresh")
        with shop.working(), redis.Redis.from_url(shop.app.conf.result_backend) as client:
            wait_until(lambda: client.pubsub_channels("*evicted*"))
            head = refresh.apply_async((1,), {"version": 1}, dedup={"timeout": 2})
            running(shop, 1)
            # The tail is called before the head's timeout.
            tail = refresh.delay(1, version=2)
            assert tail.verdict is Verdict.BLOCK
            running(shop, 2)
            assert shop.tokens[1] > shop.tokens[0]
            # A pool of threads cannot end a task, so the two overlap.
            assert shop.overlaps == [1]
            assert shop.app.dq.dedup["cache"].verdicts()["evict"] == 1
            wait_until(lambda: lost == [("refresh(sku=1)", head.id, shop.tokens[0])])
            shop.overlaps = []
            shop.open(1, 2)
            assert tail.get(timeout=40)[1] == 2

    def test_a_blocked_call_is_explained(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        with shop.working():
            first = refresh.delay(1, version=1)
            running(shop, 1)
            tail = refresh.delay(1, version=2)
            follower = refresh.apply_async((1,), {"version": 3}, task_id="follower")
            assert follower.verdict is Verdict.DECLINE
            why = shop.app.dq.explain(task_id=tail.id)
            assert (
                f"waits for the end of {first.id}, which holds its dedup lock refresh(sku=1)" in why.sentence
            )
            assert f"gets the result of {tail.id}" in shop.app.dq.explain(task_id="follower").sentence
            shop.open(1, 2)
            assert follower.get(timeout=40) == [1, 2]

    def test_a_message_that_moves_asks_again(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        moved = refresh.apply_async((1,), {"version": 1}, queue="other")
        refresh.delay(1, version=2)
        assert shop.app.dq.queues["other"].move("cache", task_id=moved.id) == 1
        assert shop.app.dq.dedup["other"].list() == []
        with shop.working():
            shop.open(1)
            assert moved.get(timeout=40) == [1, 2]
            assert shop.ran() == [2]

    def test_released_by_an_operator(self, shop: Shop) -> None:
        refresh = shop.task("refresh")
        first = refresh.delay(1, version=1)
        with shop.working():
            running(shop, 1)
            (claim,) = shop.app.dq.dedup["cache"].list()
            assert (claim.key, claim.tenant, claim.head, claim.tail) == ("refresh(sku=1)", "", first.id, "")
            assert claim.running
            assert claim.token == shop.tokens[0]
            assert shop.app.dq.dedup["cache"].release("refresh(sku=1)") == first.id
            assert shop.app.dq.dedup["cache"].inspect("refresh(sku=1)") is None
            shop.open(1)
