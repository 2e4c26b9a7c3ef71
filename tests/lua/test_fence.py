"""A fenced queue serves the current token and no other."""

from __future__ import annotations

import pytest
import redis

from celery_dq.transport.redis.fenced import Fenced
from tests.lua.desk import Desk, tags_of

OLD, NEW = "c1@1", "c2@2"


def fence(desk: Desk, token: int, limit: int = 1000) -> Fenced:
    return desk.partition.fence(token, limit=limit).run(desk.client)


def test_an_unfenced_queue_serves_everybody_without_a_token(desk: Desk) -> None:
    desk.push("a", "b")
    assert desk.take(1) == ["a"]
    assert not desk.claim(1).fenced


def test_who_names_a_token_where_there_is_none_is_refused(desk: Desk) -> None:
    # The server has lost the fence: its leader must put it up again.
    desk.push("a")
    assert desk.claim(1, "c1@4").fenced


def test_only_the_current_token_claims(desk: Desk) -> None:
    desk.push("a", "b")
    assert fence(desk, 1) == (True, 1, 0)
    for consumer in ("c1", "c1@2", "c1@0", "c1@", "@1x"):
        claimed = desk.claim(1, consumer)
        assert claimed.fenced
        assert not claimed.entries
    assert desk.take(1, OLD) == ["a"]


def test_a_higher_token_takes_everything_back_to_its_place(desk: Desk) -> None:
    desk.push("a", "b", "c", "d")
    fence(desk, 1)
    held = desk.claim(2, OLD)
    assert fence(desk, 2) == (True, 2, 0)
    assert desk.waiting() == ["a", "b", "c", "d"]
    assert desk.slots("") == 0
    # From the second delivery on a message goes alone.
    assert [(each.id, each.deliveries) for each in desk.claim(4, NEW).entries] == [("a", 1)]
    assert held.entries[0].id == "a"


def test_a_lower_token_changes_nothing(desk: Desk) -> None:
    desk.push("a")
    fence(desk, 5)
    assert desk.take(1, "c1@5") == ["a"]
    assert fence(desk, 4) == (False, 5, 0)
    assert desk.waiting() == []


def test_the_same_token_may_fence_again(desk: Desk) -> None:
    desk.push("a")
    fence(desk, 5)
    entries = desk.claim(1, "c1@5").entries
    assert fence(desk, 5) == (True, 5, 0)
    assert desk.finish(*tags_of(entries), consumer="c1@5") == 0
    assert desk.left_over() == {"leases"}


def test_late_words_of_an_old_token_do_nothing_and_are_counted(desk: Desk) -> None:
    desk.push("a", "b", "c", "d")
    fence(desk, 1)
    entries = desk.claim(4, OLD).entries
    a, b, c, d = tags_of(entries)
    fence(desk, 2)
    assert desk.settle(a, consumer=OLD) == 1
    assert desk.finish(b, consumer=OLD) == 1
    assert desk.release(c, consumer=OLD) == 1
    assert desk.partition.dead_letter(OLD, d, reason="r", worker="w").run(desk.client) == "stale"
    assert desk.claim(0, OLD, settle=[a], finish=[b]).stale == 2
    assert desk.partition.take(OLD, ["a"], lease_ms=1000).run(desk.client) == []
    renewed = desk.partition.renew(OLD, lease_ms=1000).run(desk.client)
    assert renewed.fenced
    assert not renewed.alive
    assert desk.waiting() == ["a", "b", "c", "d"]


def test_what_was_settled_is_never_delivered_again(desk: Desk) -> None:
    desk.push("a", "b")
    fence(desk, 1)
    entries = desk.claim(2, OLD).entries
    desk.settle(entries[0].tag, consumer=OLD)
    fence(desk, 2)
    assert desk.take(2, NEW) == ["b"]


def test_consumers_from_before_the_fence_lose_what_they_hold(desk: Desk) -> None:
    desk.push("a", "b")
    desk.claim(1, "plain")
    fence(desk, 1)
    assert desk.waiting() == ["a", "b"]
    assert desk.claim(1, "plain").fenced


def test_takes_back_in_chunks(desk: Desk) -> None:
    desk.push(*[f"m{i:02d}" for i in range(25)])
    desk.claim(20, "plain")
    calls = 1
    while fence(desk, 1, limit=7).remaining:
        calls += 1
        # The leader may begin meanwhile, so the fence stands from the first call on.
        assert desk.claim(0, "plain").fenced
    assert calls >= 3
    assert len(desk.waiting()) == 25
    assert desk.waiting()[0] == "m00"


def test_who_leads_by_a_lease_that_has_run_out_claims_nothing(desk: Desk) -> None:
    desk.push("a")
    fence(desk, 3)
    desk.client.hset(desk.keys.leader, mapping={"token": 3, "until": desk.now_us() - 1})
    assert desk.claim(1, "c1@3").fenced
    desk.client.hset(desk.keys.leader, "until", desk.now_us() + 60_000_000)
    assert desk.take(1, "c1@3") == ["a"]


@pytest.mark.parametrize("token", [0, -1])
def test_a_token_is_above_zero(desk: Desk, token: int) -> None:
    with pytest.raises(redis.ResponseError, match="DQINVALID"):
        fence(desk, token)


def test_the_reaping_of_the_others_is_the_leaders(desk: Desk) -> None:
    desk.push("a")
    fence(desk, 1)
    desk.claim(1, OLD)
    fence(desk, 2)
    assert desk.take(1, NEW) == ["a"]
    desk.lose(NEW)
    assert desk.reap("c3@2") == 1
    assert desk.waiting() == ["a"]


class TestContinuation:
    """What the running task publishes under its own id takes its place."""

    @pytest.mark.parametrize("settled", [False, True])
    def test_goes_before_what_came_after_it(self, desk: Desk, settled: bool) -> None:
        desk.push("a", "b", "c")
        fence(desk, 1)
        tag = desk.claim(1, OLD).entries[0].tag
        if settled:
            desk.settle(tag, consumer=OLD)
        assert desk.push_one("a") == "a~1"
        desk.finish(tag, consumer=OLD)
        assert desk.waiting() == ["a~1", "b", "c"]

    def test_is_not_delayed(self, desk: Desk) -> None:
        desk.push("a", "b")
        fence(desk, 1)
        tag = desk.claim(1, OLD).entries[0].tag
        desk.push("a", due_us=desk.now_us() + 60_000_000)
        desk.finish(tag, consumer=OLD)
        assert desk.take(2, OLD) == ["a~1", "b"]

    def test_may_go_on_again_and_again(self, desk: Desk) -> None:
        desk.push("a", "b")
        fence(desk, 1)
        for _ in range(12):
            entry = desk.claim(1, OLD).entries[0]
            assert entry.id.partition("~")[0] == "a"
            desk.push("a", due_us=desk.now_us() + 60_000_000)
            desk.finish(entry.tag, consumer=OLD)

    def test_is_nothing_special_where_nobody_leads(self, desk: Desk) -> None:
        desk.push("a", "b")
        tag = desk.claim(1).entries[0].tag
        desk.push("a")
        desk.finish(tag)
        assert desk.waiting() == ["b", "a~1"]

    def test_others_of_the_same_call_keep_their_own(self, desk: Desk) -> None:
        desk.push("a", "b")
        fence(desk, 1)
        tag = desk.claim(1, OLD).entries[0].tag
        desk.push("x", "a", "y")
        desk.finish(tag, consumer=OLD)
        assert desk.waiting() == ["a~1", "b", "x", "y"]
