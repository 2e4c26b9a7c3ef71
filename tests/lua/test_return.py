from __future__ import annotations

import json
import math
from typing import Any

import pytest

from celery_dq.clock import SystemClock
from celery_dq.transport.in_flight import InFlightMessages
from celery_dq.transport.partition_replies import DeliveryTag
from tests.lua.partition_scripts import LEASE_MS, PartitionScripts, make_record, tags_of


def fill(scripts: PartitionScripts, tenant: str, count: int) -> None:
    scripts.push(*(f"{tenant}{i:04d}" for i in range(count)), tenant=tenant)


def dead_info(scripts: PartitionScripts, message_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(scripts.client.hget(scripts.keys.dead_info, message_id))
    return found


def test_resigning_gives_everything_back_and_ends_the_lease(scripts: PartitionScripts) -> None:
    fill(scripts, "", 6)
    before = scripts.waiting()
    scripts.take(5)
    assert scripts.partition.resign("c1", limit=2).run(scripts.client) == 3
    assert scripts.client.zscore(scripts.keys.leases, "c1") is not None
    assert scripts.partition.resign("c1").run(scripts.client) == 0
    assert scripts.waiting() == before
    assert scripts.slots("") == 0
    # The tenant has a backlog, so its claims are still counted.
    assert scripts.left_over() == {"messages", "tenant:", "turn", "wake", "running"}


def test_a_tag_given_twice_counts_once(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    tag = scripts.claim(2).entries[0].tag
    assert scripts.finish(tag, tag) == 1
    assert scripts.state("held") == 1
    assert scripts.slots("") == 1


@pytest.mark.parametrize("mode", ["unstarted", "requeue", "crashed"])
def test_a_settled_message_is_dropped_when_released(scripts: PartitionScripts, mode: str) -> None:
    scripts.push("a")
    tag = scripts.claim().entries[0].tag
    scripts.settle(tag)
    assert scripts.release(tag, mode=mode) == 0
    assert scripts.left_over() == {"leases"}


def test_a_settled_message_is_dropped_when_its_consumer_is_lost(scripts: PartitionScripts) -> None:
    scripts.push("a")
    scripts.settle(scripts.claim().entries[0].tag)
    assert scripts.client.hget(scripts.keys.messages, "a") == b"\0c1"
    scripts.lose()
    assert scripts.reap() == 1
    assert scripts.take() == []


class TestSuspects:
    def test_are_claimed_alone(self, scripts: PartitionScripts) -> None:
        fill(scripts, "b", 4)
        scripts.take(2)
        scripts.lose()
        assert scripts.reap() == 2
        fill(scripts, "a", 1)
        first = scripts.claim(10)
        assert [(entry.id, entry.deliveries) for entry in first.entries] == [("b0000", 1)]
        assert (first.suspect, first.more) == (True, True)
        # It is the other tenant's turn; the second suspect ends that batch.
        second = scripts.claim(10)
        assert [entry.id for entry in second.entries] == ["a0000"]
        assert (second.suspect, second.more) == (False, True)
        assert scripts.take(10) == ["b0001"]
        assert scripts.take(10) == ["b0002", "b0003"]

    def test_are_dead_after_so_many_deliveries(self, scripts: PartitionScripts) -> None:
        scripts.push("a", tenant="t")
        for _ in range(3):
            assert [e.reason for e in scripts.claim(max_deliveries=3).entries] == [""]
            scripts.lose()
            assert scripts.reap(max_deliveries=3) == 1
        claimed = scripts.claim(max_deliveries=3)
        assert [(e.id, e.deliveries, e.reason) for e in claimed.entries] == [("a", 3, "dead:max_deliveries")]
        assert claimed.suspect is False
        assert scripts.client.hget(scripts.keys.dead, "a") == make_record("t")
        info = dead_info(scripts, "a")
        assert abs(info.pop("at") - scripts.now_us()) < 60e6
        assert info == {
            "reason": "max_deliveries",
            "worker": "c1",
            "deliveries": 3,
            "tenant": "t",
            "task": "shop.tasks.notify",
        }
        assert scripts.slots("t") == 0
        scripts.finish(claimed.entries[0].tag)
        assert scripts.left_over() == {"leases", "dead", "dead_info", "dead_index"}

    def test_a_lower_maximum_holds_for_waiting_calls(self, scripts: PartitionScripts) -> None:
        scripts.push("a", "b")
        for _ in range(2):
            scripts.release(scripts.claim().entries[0].tag, mode="crashed")
        claimed = scripts.claim(2, max_deliveries=2)
        assert [(e.id, e.reason) for e in claimed.entries] == [("b", ""), ("a", "dead:max_deliveries")]

    def test_no_maximum(self, scripts: PartitionScripts) -> None:
        scripts.push("a")
        for i in range(12):
            (entry,) = scripts.claim(max_deliveries=0).entries
            assert (entry.deliveries, entry.reason) == (i, "")
            scripts.release(entry.tag, mode="crashed", max_deliveries=0)

    def test_a_discard_that_crashes_its_worker_ends(self, scripts: PartitionScripts) -> None:
        scripts.push("a")
        scripts.partition.cancel(["a"]).run(scripts.client)
        for _ in range(4):
            (entry,) = scripts.claim(max_deliveries=2).entries
            assert entry.reason == "cancelled"
            scripts.release(entry.tag, mode="crashed", max_deliveries=2)
        assert scripts.take() == []
        assert dead_info(scripts, "a")["reason"] == "discard"
        assert scripts.left_over() == {"leases", "dead", "dead_info", "dead_index"}


class TestReaping:
    def test_is_chunked(self, scripts: PartitionScripts) -> None:
        for consumer in ("c1", "c2", "c3"):
            fill(scripts, consumer, 5)
            scripts.take(5, consumer)
            scripts.lose(consumer)
        assert [scripts.reap(limit=4) for _ in range(5)] == [4, 4, 4, 3, 0]
        assert scripts.left_over() >= {"tenant:c1", "tenant:c2", "tenant:c3"}
        assert not any(key.startswith("held:") for key in scripts.left_over())
        assert scripts.client.zrange(scripts.keys.leases, 0, -1) == [b"reaper"]
        assert scripts.state("held") == 0

    def test_a_consumer_that_comes_back_holds_no_old_messages(self, scripts: PartitionScripts) -> None:
        fill(scripts, "", 6)
        tags = tags_of(scripts.claim(5).entries)
        scripts.lose()
        assert scripts.reap(limit=2) == 2
        assert (
            scripts.partition.heartbeat("c1", lease_ms=LEASE_MS, limit=1).run(scripts.client).alive is False
        )
        assert scripts.finish(*tags) == 5
        assert len(scripts.claim().entries) == 1
        while scripts.reap(limit=2):
            pass
        assert scripts.client.hlen(scripts.keys.held("c1")) == 1
        assert len(scripts.waiting()) == 5

    def test_expired_but_not_reaped_goes_on(self, scripts: PartitionScripts) -> None:
        scripts.push("a")
        tag = scripts.claim().entries[0].tag
        scripts.lose()
        assert scripts.partition.heartbeat("c1", lease_ms=LEASE_MS).run(scripts.client)[:2] == (True, 0)
        assert scripts.finish(tag) == 0

    def test_unknown_consumer_is_not_alive(self, scripts: PartitionScripts) -> None:
        assert scripts.partition.heartbeat("c9", lease_ms=LEASE_MS).run(scripts.client).alive is False
        assert scripts.partition.heartbeat("c9", lease_ms=LEASE_MS).run(scripts.client).alive is True

    def test_heartbeat_reports_when_the_next_lease_ends(self, scripts: PartitionScripts) -> None:
        assert (
            scripts.partition.heartbeat("c9", lease_ms=LEASE_MS).run(scripts.client).next_end_s
            == LEASE_MS / 1000
        )
        fill(scripts, "", 3)
        scripts.partition.claim("short", lease_ms=20_000, want=3).run(scripts.client)
        assert 0 < scripts.partition.heartbeat("c9", lease_ms=LEASE_MS).run(scripts.client).next_end_s <= 20
        scripts.lose("short")
        # There is more to take back than one call may.
        assert (
            scripts.partition.heartbeat("c9", lease_ms=LEASE_MS, limit=2).run(scripts.client).next_end_s < 0
        )
        assert (
            scripts.partition.heartbeat("c9", lease_ms=LEASE_MS, limit=0).run(scripts.client).next_end_s
            == math.inf
        )
        assert (
            scripts.partition.heartbeat("c9", lease_ms=LEASE_MS, limit=2).run(scripts.client).next_end_s > 20
        )

    def test_heartbeat_reports_which_claims_came_before_it(self, scripts: PartitionScripts) -> None:
        scripts.push("a", "b", "c")
        ledger = InFlightMessages(SystemClock(), lease_s=15.0)
        earlier = [scripts.claim().entries[0] for _ in range(2)]
        renewed = scripts.partition.heartbeat("c9", lease_ms=LEASE_MS).run(scripts.client)
        for entry in (*earlier, *scripts.claim().entries):
            ledger.add("p", entry.id, entry.claim)
        # The answer of a heartbeat may be read after that of a later claim.
        assert ledger.lose_lease("p", frozenset(), renewed.claim) == 2
        assert ledger.count_of("p") == 1

    def test_heartbeat_tidies(self, scripts: PartitionScripts) -> None:
        scripts.client.zadd(scripts.keys.limiter, {f"t{i}": i for i in range(1, 30)})
        scripts.reap(limit=0)
        assert scripts.client.zcard(scripts.keys.limiter) == 29
        scripts.client.zadd(scripts.keys.tombstones, {"gone": 1, "there": scripts.now_us() + 10_000_000})
        scripts.reap(limit=20)
        assert scripts.client.zcard(scripts.keys.limiter) == 9
        scripts.reap(limit=20)
        assert scripts.left_over() == {"tombstones", "leases"}
        assert scripts.client.zrange(scripts.keys.tombstones, 0, -1) == [b"there"]

    def test_heartbeat_of_an_empty_partition_ends_lost_leases_and_repairs_the_count(
        self, scripts: PartitionScripts
    ) -> None:
        scripts.lose("lost")
        scripts.client.hset(scripts.keys.state, mapping={"held": 3, "next_look_owner": "lost"})
        assert scripts.reap() == 0
        assert scripts.client.zrange(scripts.keys.leases, 0, -1) == [b"reaper"]
        # Without a lost lease there is less to look at.
        scripts.client.hset(scripts.keys.state, mapping={"held": 3, "next_look_owner": "reaper"})
        scripts.reap()
        assert scripts.client.hmget(scripts.keys.state, "held", "next_look_owner") == [b"0", b""]

    @pytest.mark.parametrize("key", ["limiter", "tombstones"])
    def test_heartbeat_of_an_empty_partition_tidies(self, scripts: PartitionScripts, key: str) -> None:
        scripts.client.zadd(getattr(scripts.keys, key), {"gone": 1})
        scripts.reap()
        assert scripts.left_over() == {"leases"}


class TestComingBack:
    """A consumer whose own lease is nearly over reaps no other one: perhaps the server was away."""

    @pytest.fixture
    def tags(self, scripts: PartitionScripts) -> dict[str, DeliveryTag]:
        """The messages of c1 and c2, both of which were away."""
        scripts.push("a", "b")
        tags = {each: scripts.claim(1, each).entries[0].tag for each in ("c1", "c2")}
        for each in tags:
            scripts.lose(each)
        return tags

    @pytest.mark.parametrize("claims_first", [False, True])
    def test_takes_nothing_from_another_that_may_be_coming_back(
        self, scripts: PartitionScripts, tags: dict[str, DeliveryTag], claims_first: bool
    ) -> None:
        if claims_first:
            assert scripts.claim(0, "c1").alive is True
        # The second heartbeat: requests that got no answer have piled up.
        assert [scripts.reap("c1"), scripts.reap("c1"), scripts.reap("c2")] == [0, 0, 0]
        assert [scripts.finish(tags[each], consumer=each) for each in tags] == [0, 0]

    def test_takes_abandoned_messages_when_a_lease_has_passed(
        self, scripts: PartitionScripts, tags: dict[str, DeliveryTag]
    ) -> None:
        heartbeat = scripts.partition.heartbeat("c1", lease_ms=LEASE_MS)
        assert 0 < heartbeat.run(scripts.client).next_end_s <= LEASE_MS / 1000
        left_ms = scripts.client.pttl(scripts.keys.reap_grace("c1"))
        assert 0 < left_ms <= LEASE_MS + 1
        scripts.client.set(scripts.keys.reap_grace("c1"), scripts.now_us())
        assert heartbeat.run(scripts.client).reaped == 1
        assert scripts.finish(tags["c1"]) == 0
        assert scripts.take() == ["b"]

    def test_a_new_consumer_takes_lost_messages_at_once(
        self, scripts: PartitionScripts, tags: dict[str, DeliveryTag]
    ) -> None:
        assert scripts.reap("c1") == 0
        assert scripts.reap("c3") == 1
        assert scripts.finish(*tags.values()) == 1

    def test_late_is_a_consumer_with_little_of_its_lease_left(
        self, scripts: PartitionScripts, tags: dict[str, DeliveryTag]
    ) -> None:
        lease_us = LEASE_MS * 1000
        scripts.client.zadd(scripts.keys.leases, {"c1": scripts.now_us() + 0.3 * lease_us})
        assert scripts.reap("c1") == 0
        scripts.client.delete(scripts.keys.reap_grace("c1"))
        scripts.client.zadd(scripts.keys.leases, {"c1": scripts.now_us() + 0.5 * lease_us})
        assert scripts.reap("c1") == 1

    def test_does_everything_else(self, scripts: PartitionScripts, tags: dict[str, DeliveryTag]) -> None:
        scripts.push("later", due_us=scripts.now_us() + 10**9)
        scripts.client.zadd(scripts.keys.delayed, {"later": 1})
        scripts.client.zadd(scripts.keys.tombstones, {"gone": 1})
        scripts.reap("c1")
        assert scripts.waiting() == ["later"]
        assert not scripts.client.exists(scripts.keys.tombstones)


class TestDeadLetters:
    def test_of_a_failing_task(self, scripts: PartitionScripts) -> None:
        scripts.set_quota("t", concurrency=1)
        scripts.push("a", "b", tenant="t")
        tag = scripts.claim().entries[0].tag
        done = scripts.partition.dead_letter("c1", tag, reason='Fault("ä")', worker="w1").run(scripts.client)
        assert done == "dead"
        assert (dead_info(scripts, "a")["reason"], dead_info(scripts, "a")["worker"]) == ('Fault("ä")', "w1")
        assert scripts.take() == ["b"]

    def test_of_a_settled_message_needs_its_record(self, scripts: PartitionScripts) -> None:
        scripts.push("a")
        tag = scripts.claim().entries[0].tag
        scripts.settle(tag)
        call = scripts.partition.dead_letter
        assert call("c1", tag, reason="r", worker="w").run(scripts.client) == "no record"
        assert call("c1", tag, reason="r", worker="w", record=make_record()).run(scripts.client) == "dead"
        assert scripts.finish(tag) == 1

    def test_replay_edited(self, scripts: PartitionScripts) -> None:
        scripts.push("a")
        tag = scripts.claim().entries[0].tag
        scripts.partition.dead_letter("c1", tag, reason="r", worker="w").run(scripts.client)
        record = make_record("other", body=b"[1]")
        assert scripts.partition.replay("a", record=record).run(scripts.client) == "a"
        assert scripts.claim().entries[0].record == record

    def test_replay_for_a_consumer(self, scripts: PartitionScripts) -> None:
        scripts.push("a")
        tag = scripts.claim().entries[0].tag
        scripts.partition.dead_letter("c1", tag, reason="r", worker="w").run(scripts.client)
        call = scripts.partition.replay("a", consumer="mover", lease_ms=LEASE_MS)
        assert call.run(scripts.client) == "a"
        assert scripts.take() == []
        scripts.lose("mover")
        assert scripts.reap() == 1
        assert scripts.take() == ["a"]

    def test_a_dead_letter_is_never_overwritten(self, scripts: PartitionScripts) -> None:
        scripts.push("a")
        tag = scripts.claim().entries[0].tag
        scripts.partition.dead_letter("c1", tag, reason="r", worker="w").run(scripts.client)
        assert scripts.push_one("a") == "a~1"

    def test_forget(self, scripts: PartitionScripts) -> None:
        scripts.push("a", "b")
        for tag in tags_of(scripts.claim(2).entries):
            scripts.partition.dead_letter("c1", tag, reason="r", worker="w").run(scripts.client)
        assert scripts.partition.forget_dead(["a", "none"]).run(scripts.client) == 1
        assert scripts.client.zrange(scripts.keys.dead_index, 0, -1) == [b"b"]
