from __future__ import annotations

import json
import math
from typing import Any

import pytest

from celery_dq.clock import SystemClock
from celery_dq.transport.redis.ledger import Ledger
from celery_dq.transport.redis.replies import Tag
from tests.lua.desk import LEASE_MS, Desk, make_record, tags_of


def fill(desk: Desk, tenant: str, count: int) -> None:
    desk.push(*(f"{tenant}{i:04d}" for i in range(count)), tenant=tenant)


def dead_info(desk: Desk, message_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(desk.client.hget(desk.keys.dead_info, message_id))
    return found


class TestPlace:
    @pytest.mark.parametrize("mode", ["unstarted", "requeue", "crashed"])
    def test_released_messages_come_back_to_their_old_place(self, desk: Desk, mode: str) -> None:
        desk.push("urgent", priority=5)
        fill(desk, "", 6)
        before = ["urgent", *desk.waiting()[1:]]
        entries = desk.claim(4).entries
        desk.release(entries[2].tag, entries[0].tag, entries[3].tag, mode=mode)
        assert desk.waiting() == [before[0], before[2], before[3], *before[4:]]

    def test_a_lost_consumer_s_messages_come_back_to_their_old_place(self, desk: Desk) -> None:
        fill(desk, "", 6)
        before = desk.waiting()
        desk.take(4)
        desk.lose()
        assert desk.reap() == 4
        assert desk.waiting() == before

    def test_resigning_gives_everything_back_and_ends_the_lease(self, desk: Desk) -> None:
        fill(desk, "", 6)
        before = desk.waiting()
        desk.take(5)
        assert desk.partition.resign("c1", limit=2).run(desk.client) == 3
        assert desk.client.zscore(desk.keys.leases, "c1") is not None
        assert desk.partition.resign("c1").run(desk.client) == 0
        assert desk.waiting() == before
        assert desk.left_over() == {"messages", "tenant:", "turn", "wake"}


class TestStaleTags:
    def test_of_an_older_claim_do_nothing(self, desk: Desk) -> None:
        """Even when the same consumer has claimed the message again."""
        desk.push("a")
        old = desk.claim().entries[0].tag
        desk.release(old, mode="unstarted")
        new = desk.claim().entries[0].tag
        assert old.id == new.id
        for verb in (desk.settle, desk.finish, desk.release):
            assert verb(old) == 1
        assert desk.partition.dead_letter("c1", old, reason="r", worker="w").run(desk.client) == "stale"
        claimed = desk.claim(0, settle=[old], finish=[old, Tag("77", "none")])
        assert claimed.stale == 3
        assert desk.client.hlen(desk.keys.held("c1")) == 1
        assert desk.finish(new) == 0
        assert desk.finish(new) == 1

    def test_of_another_consumer_do_nothing(self, desk: Desk) -> None:
        desk.push("a")
        tag = desk.claim().entries[0].tag
        assert desk.finish(tag, consumer="c2") == 1
        assert desk.finish(tag) == 0

    def test_a_tag_given_twice_counts_once(self, desk: Desk) -> None:
        desk.push("a", "b")
        tag = desk.claim(2).entries[0].tag
        assert desk.finish(tag, tag) == 1
        assert desk.state("held") == 1
        assert desk.slots("") == 1

    def test_settling_twice_is_settling_once(self, desk: Desk) -> None:
        desk.push("a")
        tag = desk.claim().entries[0].tag
        assert desk.settle(tag) == 0
        assert desk.settle(tag) == 0
        assert desk.finish(tag) == 0

    def test_after_reaping(self, desk: Desk) -> None:
        desk.push("a")
        tag = desk.claim().entries[0].tag
        desk.lose()
        desk.reap()
        assert desk.finish(tag) == 1
        assert desk.waiting() == ["a"]


class TestSettled:
    @pytest.mark.parametrize("mode", ["unstarted", "requeue", "crashed"])
    def test_is_dropped_when_released(self, desk: Desk, mode: str) -> None:
        desk.push("a")
        tag = desk.claim().entries[0].tag
        desk.settle(tag)
        assert desk.release(tag, mode=mode) == 0
        assert desk.left_over() == {"leases"}

    def test_is_dropped_when_its_consumer_is_lost(self, desk: Desk) -> None:
        desk.push("a")
        desk.settle(desk.claim().entries[0].tag)
        assert desk.client.hget(desk.keys.messages, "a") == b"\0c1"
        desk.lose()
        assert desk.reap() == 1
        assert desk.take() == []

    def test_depth_counts_neither_held_nor_settled(self, desk: Desk) -> None:
        fill(desk, "", 5)
        entries = desk.claim(3).entries
        desk.settle(entries[0].tag)
        assert desk.client.hlen(desk.keys.messages) - desk.state("held") == 2
        desk.finish(*tags_of(entries))
        assert desk.client.hlen(desk.keys.messages) - desk.state("held") == 2


class TestSuspects:
    def crash(self, desk: Desk, consumer: str = "c1") -> None:
        desk.lose(consumer)
        assert desk.reap() > 0

    def test_are_claimed_alone(self, desk: Desk) -> None:
        fill(desk, "b", 4)
        desk.take(2)
        self.crash(desk)
        fill(desk, "a", 1)
        first = desk.claim(10)
        assert [(entry.id, entry.deliveries) for entry in first.entries] == [("b0000", 1)]
        assert (first.suspect, first.more) == (True, True)
        # It is the other tenant's turn; the second suspect ends that batch.
        second = desk.claim(10)
        assert ([entry.id for entry in second.entries], second.suspect, second.more) == (
            ["a0000"],
            False,
            True,
        )
        assert desk.take(10) == ["b0001"]
        assert desk.take(10) == ["b0002", "b0003"]

    def test_are_dead_after_so_many_deliveries(self, desk: Desk) -> None:
        desk.push("a", tenant="t")
        for _ in range(3):
            assert [e.reason for e in desk.claim(max_deliveries=3).entries] == [""]
            desk.lose()
            assert desk.reap(max_deliveries=3) == 1
        claimed = desk.claim(max_deliveries=3)
        assert [(e.id, e.deliveries, e.reason) for e in claimed.entries] == [("a", 3, "dead:max_deliveries")]
        assert claimed.suspect is False
        assert desk.client.hget(desk.keys.dead, "a") == make_record("t")
        info = dead_info(desk, "a")
        assert abs(info.pop("at") - desk.now_us()) < 60e6
        assert info == {
            "reason": "max_deliveries",
            "worker": "c1",
            "deliveries": 3,
            "tenant": "t",
            "task": "shop.tasks.notify",
        }
        assert desk.slots("t") == 0
        desk.finish(claimed.entries[0].tag)
        assert desk.left_over() == {"leases", "dead", "dead_info", "dead_index"}

    def test_a_lower_maximum_holds_for_what_waits(self, desk: Desk) -> None:
        desk.push("a", "b")
        for _ in range(2):
            desk.release(desk.claim().entries[0].tag, mode="crashed")
        claimed = desk.claim(2, max_deliveries=2)
        assert [(e.id, e.reason) for e in claimed.entries] == [("a", "dead:max_deliveries"), ("b", "")]

    def test_no_maximum(self, desk: Desk) -> None:
        desk.push("a")
        for i in range(12):
            (entry,) = desk.claim(max_deliveries=0).entries
            assert (entry.deliveries, entry.reason) == (i, "")
            desk.release(entry.tag, mode="crashed", max_deliveries=0)

    @pytest.mark.parametrize("mode", ["unstarted", "requeue"])
    def test_release_never_counts(self, desk: Desk, mode: str) -> None:
        desk.push("a")
        for _ in range(8):
            (entry,) = desk.claim().entries
            assert entry.deliveries == 0
            desk.release(entry.tag, mode=mode)

    def test_a_discard_that_crashes_its_worker_ends(self, desk: Desk) -> None:
        desk.push("a")
        desk.partition.cancel(["a"]).run(desk.client)
        for _ in range(4):
            (entry,) = desk.claim(max_deliveries=2).entries
            assert entry.reason == "cancelled"
            desk.release(entry.tag, mode="crashed", max_deliveries=2)
        assert desk.take() == []
        assert dead_info(desk, "a")["reason"] == "discard"
        assert desk.left_over() == {"leases", "dead", "dead_info", "dead_index"}


class TestReaping:
    def test_is_chunked(self, desk: Desk) -> None:
        for consumer in ("c1", "c2", "c3"):
            fill(desk, consumer, 5)
            desk.take(5, consumer)
            desk.lose(consumer)
        assert [desk.reap(limit=4) for _ in range(5)] == [4, 4, 4, 3, 0]
        assert desk.left_over() >= {"tenant:c1", "tenant:c2", "tenant:c3"}
        assert not any(key.startswith("held:") for key in desk.left_over())
        assert desk.client.zrange(desk.keys.leases, 0, -1) == [b"reaper"]
        assert desk.state("held") == 0

    def test_who_comes_back_meanwhile_holds_nothing_old(self, desk: Desk) -> None:
        fill(desk, "", 6)
        tags = tags_of(desk.claim(5).entries)
        desk.lose()
        assert desk.reap(limit=2) == 2
        assert desk.partition.renew("c1", lease_ms=LEASE_MS, limit=1).run(desk.client).alive is False
        assert desk.finish(*tags) == 5
        assert len(desk.claim().entries) == 1
        while desk.reap(limit=2):
            pass
        assert desk.client.hlen(desk.keys.held("c1")) == 1
        assert len(desk.waiting()) == 5

    def test_expired_but_not_reaped_goes_on(self, desk: Desk) -> None:
        desk.push("a")
        tag = desk.claim().entries[0].tag
        desk.lose()
        assert desk.partition.renew("c1", lease_ms=LEASE_MS).run(desk.client)[:2] == (True, 0)
        assert desk.finish(tag) == 0

    def test_unknown_consumer_is_not_alive(self, desk: Desk) -> None:
        assert desk.partition.renew("c9", lease_ms=LEASE_MS).run(desk.client).alive is False
        assert desk.partition.renew("c9", lease_ms=LEASE_MS).run(desk.client).alive is True

    def test_heartbeat_tells_when_the_next_lease_ends(self, desk: Desk) -> None:
        assert desk.partition.renew("c9", lease_ms=LEASE_MS).run(desk.client).next_end_s == LEASE_MS / 1000
        fill(desk, "", 3)
        desk.partition.claim("short", lease_ms=20_000, want=3).run(desk.client)
        assert 0 < desk.partition.renew("c9", lease_ms=LEASE_MS).run(desk.client).next_end_s <= 20
        desk.lose("short")
        # There is more to take back than one call may.
        assert desk.partition.renew("c9", lease_ms=LEASE_MS, limit=2).run(desk.client).next_end_s < 0
        assert desk.partition.renew("c9", lease_ms=LEASE_MS, limit=0).run(desk.client).next_end_s == math.inf
        assert desk.partition.renew("c9", lease_ms=LEASE_MS, limit=2).run(desk.client).next_end_s > 20

    def test_heartbeat_tells_which_claims_came_before_it(self, desk: Desk) -> None:
        desk.push("a", "b", "c")
        ledger = Ledger(SystemClock(), lease_s=15.0)
        earlier = [desk.claim().entries[0] for _ in range(2)]
        renewed = desk.partition.renew("c9", lease_ms=LEASE_MS).run(desk.client)
        for entry in (*earlier, *desk.claim().entries):
            ledger.hold("p", entry.id, entry.claim)
        # The answer of a heartbeat may be read after that of a later claim.
        assert ledger.lose("p", frozenset(), renewed.claim) == 2
        assert ledger.holds_of("p") == 1

    def test_heartbeat_tidies(self, desk: Desk) -> None:
        desk.client.zadd(desk.keys.limiter, {f"t{i}": i for i in range(1, 30)})
        desk.reap(limit=0)
        assert desk.client.zcard(desk.keys.limiter) == 29
        desk.client.zadd(desk.keys.tombstones, {"gone": 1, "there": desk.now_us() + 10_000_000})
        desk.reap(limit=20)
        assert desk.client.zcard(desk.keys.limiter) == 9
        desk.reap(limit=20)
        assert desk.left_over() == {"tombstones", "leases"}
        assert desk.client.zrange(desk.keys.tombstones, 0, -1) == [b"there"]


class TestComingBack:
    """Who finds his own lease all but over takes nobody for dead: perhaps the server was away."""

    @pytest.fixture
    def tags(self, desk: Desk) -> dict[str, Tag]:
        """What c1 and c2 hold, both of whom were away."""
        desk.push("a", "b")
        tags = {each: desk.claim(1, each).entries[0].tag for each in ("c1", "c2")}
        for each in tags:
            desk.lose(each)
        return tags

    @pytest.mark.parametrize("claims_first", [False, True])
    def test_takes_nothing_from_another_who_may_be_coming_back(
        self, desk: Desk, tags: dict[str, Tag], claims_first: bool
    ) -> None:
        if claims_first:
            assert desk.claim(0, "c1").alive is True
        # The second heartbeat: requests that got no answer have piled up.
        assert [desk.reap("c1"), desk.reap("c1"), desk.reap("c2")] == [0, 0, 0]
        assert [desk.finish(tags[each], consumer=each) for each in tags] == [0, 0]

    def test_takes_what_nobody_came_back_for_when_a_lease_has_passed(
        self, desk: Desk, tags: dict[str, Tag]
    ) -> None:
        heartbeat = desk.partition.renew("c1", lease_ms=LEASE_MS)
        assert 0 < heartbeat.run(desk.client).next_end_s <= LEASE_MS / 1000
        left_ms = desk.client.pttl(desk.keys.lenient("c1"))
        assert 0 < left_ms <= LEASE_MS + 1
        desk.client.set(desk.keys.lenient("c1"), desk.now_us())
        assert heartbeat.run(desk.client).reaped == 1
        assert desk.finish(tags["c1"]) == 0
        assert desk.take() == ["b"]

    def test_who_is_new_takes_what_is_lost_at_once(self, desk: Desk, tags: dict[str, Tag]) -> None:
        assert desk.reap("c1") == 0
        assert desk.reap("c3") == 1
        assert desk.finish(*tags.values()) == 1

    def test_late_is_who_has_little_of_a_lease_left(self, desk: Desk, tags: dict[str, Tag]) -> None:
        lease_us = LEASE_MS * 1000
        desk.client.zadd(desk.keys.leases, {"c1": desk.now_us() + 0.3 * lease_us})
        assert desk.reap("c1") == 0
        desk.client.delete(desk.keys.lenient("c1"))
        desk.client.zadd(desk.keys.leases, {"c1": desk.now_us() + 0.5 * lease_us})
        assert desk.reap("c1") == 1

    def test_does_everything_else(self, desk: Desk, tags: dict[str, Tag]) -> None:
        desk.push("later", due_us=desk.now_us() + 10**9)
        desk.client.zadd(desk.keys.delayed, {"later": 1})
        desk.client.zadd(desk.keys.tombstones, {"gone": 1})
        desk.reap("c1")
        assert desk.waiting() == ["later"]
        assert not desk.client.exists(desk.keys.tombstones)


class TestDeadLetters:
    def test_of_a_failing_task(self, desk: Desk) -> None:
        desk.set_quota("t", concurrency=1)
        desk.push("a", "b", tenant="t")
        tag = desk.claim().entries[0].tag
        done = desk.partition.dead_letter("c1", tag, reason='Fault("ä")', worker="w1").run(desk.client)
        assert done == "dead"
        assert (dead_info(desk, "a")["reason"], dead_info(desk, "a")["worker"]) == ('Fault("ä")', "w1")
        assert desk.take() == ["b"]

    def test_of_a_settled_message_needs_its_record(self, desk: Desk) -> None:
        desk.push("a")
        tag = desk.claim().entries[0].tag
        desk.settle(tag)
        call = desk.partition.dead_letter
        assert call("c1", tag, reason="r", worker="w").run(desk.client) == "no record"
        assert call("c1", tag, reason="r", worker="w", record=make_record()).run(desk.client) == "dead"
        assert desk.finish(tag) == 1

    def test_replay(self, desk: Desk) -> None:
        desk.push("a", tenant="t")
        desk.release(desk.claim().entries[0].tag, mode="crashed")
        tag = desk.claim().entries[0].tag
        desk.partition.dead_letter("c1", tag, reason="r", worker="w").run(desk.client)
        assert desk.partition.replay("a").run(desk.client) == "a"
        assert desk.partition.replay("a").run(desk.client) is None
        (entry,) = desk.claim().entries
        assert (entry.deliveries, entry.record) == (0, make_record("t"))

    def test_replay_edited(self, desk: Desk) -> None:
        desk.push("a")
        tag = desk.claim().entries[0].tag
        desk.partition.dead_letter("c1", tag, reason="r", worker="w").run(desk.client)
        record = make_record("other", body=b"[1]")
        assert desk.partition.replay("a", record=record).run(desk.client) == "a"
        assert desk.claim().entries[0].record == record

    def test_replay_while_its_discard_is_not_delivered_yet(self, desk: Desk) -> None:
        desk.push("a")
        desk.release(desk.claim().entries[0].tag, mode="crashed", max_deliveries=1)
        assert desk.partition.replay("a").run(desk.client) == "a~1"
        assert [(e.id, e.reason) for e in desk.claim(5).entries] == [
            ("a", "dead:max_deliveries"),
            ("a~1", ""),
        ]

    def test_a_dead_letter_is_never_overwritten(self, desk: Desk) -> None:
        desk.push("a")
        tag = desk.claim().entries[0].tag
        desk.partition.dead_letter("c1", tag, reason="r", worker="w").run(desk.client)
        assert desk.push_one("a") == "a~1"

    def test_forget(self, desk: Desk) -> None:
        desk.push("a", "b")
        for tag in tags_of(desk.claim(2).entries):
            desk.partition.dead_letter("c1", tag, reason="r", worker="w").run(desk.client)
        assert desk.partition.forget_dead(["a", "none"]).run(desk.client) == 1
        assert desk.client.zrange(desk.keys.dead_index, 0, -1) == [b"b"]
