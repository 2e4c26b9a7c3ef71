from __future__ import annotations

from collections import Counter

import pytest

from tests.lua.partition_scripts import PartitionScripts, make_quota, tags_of


def fill(scripts: PartitionScripts, tenant: str, count: int) -> None:
    scripts.push(*(f"{tenant}{i:03d}" for i in range(count)), tenant=tenant)


def drain(scripts: PartitionScripts, batch: int) -> list[str]:
    taken: list[str] = []
    while ids := scripts.take(batch):
        taken += ids
    return taken


def test_equal_tenants_take_turns(scripts: PartitionScripts) -> None:
    for tenant in "abc":
        fill(scripts, tenant, 3)
    assert drain(scripts, 1) == ["a000", "b000", "c000", "a001", "b001", "c001", "a002", "b002", "c002"]


def test_weights_in_their_exact_sequence(scripts: PartitionScripts) -> None:
    """Start tags: a 0, .25, .5, .75, 1, ...; b 0, 1, 2; the name decides between equals."""
    scripts.set_quota("a", weight=4)
    fill(scripts, "a", 8)
    fill(scripts, "b", 3)
    expected = ["a000", "b000", "a001", "a002", "a003", "a004", "b001", "a005", "a006", "a007", "b002"]
    assert drain(scripts, 1) == expected


def test_a_shallow_tenant_does_not_cheat(scripts: PartitionScripts) -> None:
    """One that comes back after each message is served as often as one with backlog, not more."""
    fill(scripts, "deep", 40)
    served = Counter[str]()
    for i in range(20):
        scripts.push(f"shallow{i}", tenant="shallow")
        served[scripts.take(1)[0][:4]] += 1
    assert abs(served["deep"] - served["shal"]) <= 1


def test_of_unlimited_tenants_that_have_nothing_left_no_tags_are_kept(scripts: PartitionScripts) -> None:
    for i in range(100):
        scripts.push(f"m{i:03d}", tenant=f"t{i:03d}")
    assert len(scripts.take(60)) == 60
    assert not scripts.client.exists(scripts.keys.finish_tags)
    # A served tenant comes behind the unserved ones.
    scripts.push("again", tenant="t000")
    assert drain(scripts, 7)[-1] == "again"


def test_a_tenant_that_always_comes_back_has_its_weight(scripts: PartitionScripts) -> None:
    scripts.set_quota("b", weight=3)
    fill(scripts, "a", 20)
    scripts.push("b000", tenant="b")
    taken: list[str] = []
    while len(taken) < 40:
        (each,) = scripts.take(1)
        if each.startswith("b"):
            scripts.push(f"b{len(taken) + 1:03d}", tenant="b")
        taken.append(each[0])
    assert taken.count("b") == 30


def test_finish_tags_are_collected(scripts: PartitionScripts) -> None:
    scripts.partition.set_default_quota(make_quota(concurrency=1000)).run(scripts.client)
    for i in range(300):
        scripts.push(f"m{i:03d}", tenant=f"t{i:03d}")
    fill(scripts, "a", 400)
    seen = 0
    for _ in range(40):
        scripts.take(16)
        seen = max(seen, scripts.client.zcard(scripts.keys.finish_tags))
    assert seen > 100
    assert scripts.client.zcard(scripts.keys.finish_tags) <= 1


def test_removed_messages_are_passed_over_a_bounded_number_a_call(scripts: PartitionScripts) -> None:
    fill(scripts, "a", 150)
    scripts.client.hdel(scripts.keys.messages, *(f"a{i:03d}" for i in range(149)))
    first = scripts.claim(10)
    assert (first.entries, first.more) == ([], False)
    assert 0 < (first.next_look_s or 0) <= 0.002
    assert scripts.client.zcard(scripts.keys.tenant("a")) == 150 - 32
    assert [scripts.take(10) for _ in range(4)] == [[], [], [], ["a149"]]
    assert scripts.state("v") == 1.0


@pytest.mark.parametrize("junk", [b"", b"{}", b"\x01" * 27, b"\x02" + b"\x00" * 40])
def test_a_corrupt_record_becomes_a_dead_letter_and_blocks_no_other(
    scripts: PartitionScripts, junk: bytes
) -> None:
    fill(scripts, "a", 3)
    scripts.client.hset(scripts.keys.messages, "a001", junk)
    claimed = scripts.claim(3)
    assert [entry.id for entry in claimed.entries] == ["a000", "a002"]
    assert b'"reason":"corrupt"' in scripts.client.hget(scripts.keys.dead_info, "a001")
    assert scripts.client.hget(scripts.keys.dead, "a001") == junk
    scripts.finish(*tags_of(claimed.entries))
    assert scripts.left_over() == {"leases", "dead", "dead_info", "dead_index"}


def test_a_corrupt_delayed_record_becomes_a_dead_letter(scripts: PartitionScripts) -> None:
    scripts.push("a", due_us=scripts.now_us() + 60_000_000)
    scripts.client.hset(scripts.keys.messages, "a", "junk")
    scripts.client.zadd(scripts.keys.delayed, {"a": 1})
    assert scripts.take() == []
    assert scripts.left_over() == {"leases", "dead", "dead_info", "dead_index"}


def test_nothing_is_left_of_idle_tenants(scripts: PartitionScripts) -> None:
    for i in range(50):
        scripts.set_quota(f"t{i}", 1000, burst=50)
        scripts.push(f"m{i}", tenant=f"t{i}")
    entries = scripts.claim(100).entries
    assert len(entries) == 50
    scripts.finish(*tags_of(entries))
    scripts.client.delete(scripts.keys.quotas, scripts.keys.quota_info)
    while scripts.client.exists(scripts.keys.limiter):
        scripts.claim(0)
    assert scripts.left_over() == {"leases"}


def test_a_tenant_that_its_rate_lets_go_again_takes_turns_with_the_others(scripts: PartitionScripts) -> None:
    scripts.set_quota("rated", 20, burst=4)
    scripts.push(*(f"r{n}" for n in range(8)), tenant="rated")
    assert scripts.take(8) == ["r0", "r1", "r2", "r3"]
    scripts.push(*(f"l{n}" for n in range(24)), tenant="loud")
    assert len(scripts.take(20)) == 20
    # As if the rated tenant had waited until it has its whole burst again.
    scripts.client.zadd(scripts.keys.limiter, {"rated": 1})
    scripts.client.zadd(scripts.keys.throttled, {"rated": 1})
    assert sorted(each[0] for each in scripts.take(4)) == ["l", "l", "r", "r"]
