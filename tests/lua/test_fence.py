"""A fenced queue serves the current token and no other."""

from __future__ import annotations

import pytest
import redis

from celery_dq.transport.redis.store.partition import FenceReply
from tests.lua.partition_scripts import PartitionScripts, tags_of

OLD, NEW = "c1@1", "c2@2"


def fence(scripts: PartitionScripts, token: int, limit: int = 1000) -> FenceReply:
    return scripts.partition.fence(token, limit=limit).run(scripts.client)


def test_an_unfenced_queue_serves_each_consumer_without_a_token(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    assert scripts.take(1) == ["a"]
    assert not scripts.claim(1).fenced


def test_a_token_where_there_is_none_is_refused(scripts: PartitionScripts) -> None:
    # The server has lost the fence: its leader must put it up again.
    scripts.push("a")
    assert scripts.claim(1, "c1@4").fenced


def test_only_the_current_token_claims(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    assert fence(scripts, 1) == (True, 1, 0)
    for consumer in ("c1", "c1@2", "c1@0", "c1@", "@1x"):
        claimed = scripts.claim(1, consumer)
        assert claimed.fenced
        assert not claimed.entries
    assert scripts.take(1, OLD) == ["a"]


def test_a_higher_token_takes_everything_back_to_its_place(scripts: PartitionScripts) -> None:
    scripts.push("a", "b", "c", "d")
    fence(scripts, 1)
    held = scripts.claim(2, OLD)
    assert fence(scripts, 2) == (True, 2, 0)
    assert scripts.waiting() == ["a", "b", "c", "d"]
    assert scripts.slots("") == 0
    # From the second delivery on a message goes alone.
    assert [(each.id, each.deliveries) for each in scripts.claim(4, NEW).entries] == [("a", 1)]
    assert held.entries[0].id == "a"


def test_a_lower_token_changes_nothing(scripts: PartitionScripts) -> None:
    scripts.push("a")
    fence(scripts, 5)
    assert scripts.take(1, "c1@5") == ["a"]
    assert fence(scripts, 4) == (False, 5, 0)
    assert scripts.waiting() == []


def test_the_same_token_may_fence_again(scripts: PartitionScripts) -> None:
    scripts.push("a")
    fence(scripts, 5)
    entries = scripts.claim(1, "c1@5").entries
    assert fence(scripts, 5) == (True, 5, 0)
    assert scripts.finish(*tags_of(entries), consumer="c1@5") == 0
    assert scripts.left_over() == {"leases"}


def test_late_words_of_an_old_token_do_nothing_and_are_counted(scripts: PartitionScripts) -> None:
    scripts.push("a", "b", "c", "d")
    fence(scripts, 1)
    entries = scripts.claim(4, OLD).entries
    a, b, c, d = tags_of(entries)
    fence(scripts, 2)
    assert scripts.settle(a, consumer=OLD) == 1
    assert scripts.finish(b, consumer=OLD) == 1
    assert scripts.release(c, consumer=OLD) == 1
    assert scripts.partition.dead_letter(OLD, d, reason="r", worker="w").run(scripts.client) == "stale"
    assert scripts.claim(0, OLD, settle=[a], finish=[b]).stale == 2
    assert scripts.state("stale_acks") == 5
    assert scripts.partition.take(OLD, ["a"], lease_ms=1000).run(scripts.client) == []
    renewed = scripts.partition.heartbeat(OLD, lease_ms=1000).run(scripts.client)
    assert renewed.fenced
    assert not renewed.alive
    assert scripts.waiting() == ["a", "b", "c", "d"]


def test_a_settled_message_is_never_delivered_again(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    fence(scripts, 1)
    entries = scripts.claim(2, OLD).entries
    scripts.settle(entries[0].tag, consumer=OLD)
    fence(scripts, 2)
    assert scripts.take(2, NEW) == ["b"]


def test_consumers_from_before_the_fence_lose_their_messages(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    scripts.claim(1, "plain")
    fence(scripts, 1)
    assert scripts.waiting() == ["a", "b"]
    assert scripts.claim(1, "plain").fenced


def test_restores_in_chunks(scripts: PartitionScripts) -> None:
    scripts.push(*[f"m{i:02d}" for i in range(25)])
    scripts.claim(20, "plain")
    calls = 1
    while fence(scripts, 1, limit=7).remaining:
        calls += 1
        # The leader may begin meanwhile, so the fence stands from the first call on.
        assert scripts.claim(0, "plain").fenced
    assert calls >= 3
    assert len(scripts.waiting()) == 25
    assert scripts.waiting()[0] == "m00"


@pytest.mark.parametrize("verb", ["settle", "finish", "release", "dead_letter", "claim"])
def test_an_old_token_changes_nothing_while_a_fence_restores_in_chunks(
    scripts: PartitionScripts, verb: str
) -> None:
    scripts.push(*[f"m{i}" for i in range(10)])
    scripts.claim(5, "c1")
    tags = tags_of(scripts.claim(5, "c2").entries)
    # The first chunk is all that c1 held: the messages of c2 still stand under its name.
    assert fence(scripts, 1, limit=5).remaining == 1
    assert scripts.client.hlen(scripts.keys.held("c2")) == 5
    if verb == "dead_letter":
        call = scripts.partition.dead_letter("c2", tags[0], reason="r", worker="w")
        assert call.run(scripts.client) == "stale"
    elif verb == "claim":
        assert scripts.claim(1, "c2", settle=tags, finish=tags).stale == 10
    else:
        assert getattr(scripts, verb)(*tags, consumer="c2") == 5
    assert scripts.waiting() == [f"m{i}" for i in range(5)]
    while fence(scripts, 1, limit=5).remaining:
        pass
    assert scripts.waiting() == [f"m{i}" for i in range(10)]
    assert scripts.slots("") == 0


def test_a_leader_whose_lease_has_run_out_claims_nothing(scripts: PartitionScripts) -> None:
    scripts.push("a")
    fence(scripts, 3)
    scripts.client.hset(scripts.keys.leader, mapping={"token": 3, "until": scripts.now_us() - 1})
    assert scripts.claim(1, "c1@3").fenced
    scripts.client.hset(scripts.keys.leader, "until", scripts.now_us() + 60_000_000)
    assert scripts.take(1, "c1@3") == ["a"]


@pytest.mark.parametrize("elected", [True, False])
def test_a_fence_ends_only_without_a_living_leader(scripts: PartitionScripts, elected: bool) -> None:
    """With its lease in the partition, or with an election elsewhere and its lease as a consumer."""
    scripts.push("a", "b")
    fence(scripts, 5)
    assert scripts.take(1, "c1@5") == ["a"]
    if elected:
        scripts.lose("c1@5")
        scripts.client.hset(scripts.keys.leader, mapping={"token": 5, "until": scripts.now_us() + 60_000_000})
    assert fence(scripts, 0) == (False, 5, 0)
    assert scripts.claim(1).fenced
    scripts.lose("c1@5")
    scripts.client.hset(scripts.keys.leader, mapping={"token": 5, "until": scripts.now_us() - 1})
    assert fence(scripts, 0).accepted
    assert scripts.waiting() == ["a", "b"]
    assert scripts.claim(1, "c1@5").fenced
    assert not scripts.claim(1).fenced
    assert not scripts.client.exists(scripts.keys.leader)


def test_a_term_after_the_end_of_a_fence_needs_a_higher_token(scripts: PartitionScripts) -> None:
    fence(scripts, 5)
    for _ in range(2):  # the second end changes nothing
        assert fence(scripts, 0) == (True, 0, 0)
    assert fence(scripts, 5) == (False, 5, 0)
    assert fence(scripts, 6) == (True, 6, 0)
    assert fence(scripts, 6) == (True, 6, 0)


@pytest.mark.parametrize("token", [-1])
def test_a_token_is_not_negative(scripts: PartitionScripts, token: int) -> None:
    with pytest.raises(redis.ResponseError, match="DQINVALID"):
        fence(scripts, token)


def test_the_reaping_of_the_others_is_the_leaders(scripts: PartitionScripts) -> None:
    scripts.push("a")
    fence(scripts, 1)
    scripts.claim(1, OLD)
    fence(scripts, 2)
    assert scripts.take(1, NEW) == ["a"]
    scripts.lose(NEW)
    assert scripts.reap("c3@2") == 1
    assert scripts.waiting() == ["a"]


class TestContinuation:
    """A message that the running task publishes under its own id takes its place."""

    @pytest.mark.parametrize("settled", [False, True])
    def test_goes_before_later_messages(self, scripts: PartitionScripts, settled: bool) -> None:
        scripts.push("a", "b", "c")
        fence(scripts, 1)
        tag = scripts.claim(1, OLD).entries[0].tag
        if settled:
            scripts.settle(tag, consumer=OLD)
        assert scripts.push_one("a") == "a~1"
        scripts.finish(tag, consumer=OLD)
        assert scripts.waiting() == ["a~1", "b", "c"]

    def test_is_not_delayed(self, scripts: PartitionScripts) -> None:
        scripts.push("a", "b")
        fence(scripts, 1)
        tag = scripts.claim(1, OLD).entries[0].tag
        scripts.push("a", due_us=scripts.now_us() + 60_000_000)
        scripts.finish(tag, consumer=OLD)
        assert scripts.take(2, OLD) == ["a~1", "b"]

    def test_may_go_on_again_and_again(self, scripts: PartitionScripts) -> None:
        scripts.push("a", "b")
        fence(scripts, 1)
        for _ in range(12):
            entry = scripts.claim(1, OLD).entries[0]
            assert entry.id.partition("~")[0] == "a"
            scripts.push("a", due_us=scripts.now_us() + 60_000_000)
            scripts.finish(entry.tag, consumer=OLD)

    def test_is_nothing_special_without_a_leader(self, scripts: PartitionScripts) -> None:
        scripts.push("a", "b")
        tag = scripts.claim(1).entries[0].tag
        scripts.push("a")
        scripts.finish(tag)
        assert scripts.waiting() == ["b", "a~1"]

    def test_others_of_the_same_call_keep_their_own(self, scripts: PartitionScripts) -> None:
        scripts.push("a", "b")
        fence(scripts, 1)
        tag = scripts.claim(1, OLD).entries[0].tag
        scripts.push("x", "a", "y")
        scripts.finish(tag, consumer=OLD)
        assert scripts.waiting() == ["a~1", "b", "x", "y"]
