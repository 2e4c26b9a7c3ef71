from __future__ import annotations

from collections import Counter

import pytest

from tests.lua.desk import Desk, make_quota, tags_of


def fill(desk: Desk, tenant: str, count: int) -> None:
    desk.push(*(f"{tenant}{i:03d}" for i in range(count)), tenant=tenant)


def drain(desk: Desk, batch: int) -> list[str]:
    taken: list[str] = []
    while ids := desk.take(batch):
        taken += ids
    return taken


def test_equal_tenants_take_turns(desk: Desk) -> None:
    for tenant in "abc":
        fill(desk, tenant, 3)
    assert drain(desk, 1) == ["a000", "b000", "c000", "a001", "b001", "c001", "a002", "b002", "c002"]


def test_weights_in_their_exact_sequence(desk: Desk) -> None:
    """Start tags: a 0, .25, .5, .75, 1, ...; b 0, 1, 2; the name decides between equals."""
    desk.set_quota("a", weight=4)
    fill(desk, "a", 8)
    fill(desk, "b", 3)
    expected = ["a000", "b000", "a001", "a002", "a003", "a004", "b001", "a005", "a006", "a007", "b002"]
    assert drain(desk, 1) == expected


@pytest.mark.parametrize("batch", [2, 3, 7, 32, 100])
def test_a_batch_is_what_single_claims_would_give(desk: Desk, batch: int) -> None:
    weights = {"a": 1, "b": 3, "c": 0.7, "ab": 1, "b\xff": 2}
    for tenant, weight in weights.items():
        desk.set_quota(tenant, weight=weight)
    counts = {"a": 30, "b": 17, "c": 25, "ab": 3, "b\xff": 40}

    def run(size: int) -> list[str]:
        for tenant, count in counts.items():
            fill(desk, tenant, count)
        # A late comer in the middle, so that finish tags count.
        taken = [each for _ in range(42 // size) for each in desk.take(size)]
        taken += desk.take(42 - len(taken))
        fill(desk, "ab", 5)
        taken += drain(desk, size)
        desk.client.flushdb()
        for tenant, weight in weights.items():
            desk.set_quota(tenant, weight=weight)
        return taken

    assert run(batch) == run(1)


def test_bytes_decide_between_equals_not_the_locale(desk: Desk) -> None:
    tenants = ["a", "B", "Z", "z", "ä", "\u00ff", "0", "_"]
    for tenant in tenants:
        fill(desk, tenant, 2)
    ordered = sorted(tenants, key=str.encode)
    assert desk.take(16) == [f"{tenant}{i:03d}" for i in range(2) for tenant in ordered]


def test_a_late_comer_gets_no_credit_for_the_past(desk: Desk) -> None:
    fill(desk, "a", 30)
    desk.take(10)
    fill(desk, "b", 10)
    assert Counter(each[0] for each in desk.take(10)) == {"a": 5, "b": 5}


def test_a_shallow_tenant_does_not_cheat(desk: Desk) -> None:
    """One that comes back after each message is served as often as one with backlog, not more."""
    fill(desk, "deep", 40)
    served = Counter[str]()
    for i in range(20):
        desk.push(f"shallow{i}", tenant="shallow")
        served[desk.take(1)[0][:4]] += 1
    assert abs(served["deep"] - served["shal"]) <= 1


def test_virtual_time_jumps_and_tags_go_when_nobody_is_in_turn(desk: Desk) -> None:
    desk.set_quota("slow", weight=0.01)
    desk.push("s", tenant="slow")
    desk.push("q", tenant="quick")
    assert sorted(desk.take(2)) == ["q", "s"]
    assert desk.state("v") == 100.0
    assert not desk.client.exists(desk.keys.finish)


def test_of_unlimited_tenants_that_have_nothing_left_no_tags_are_kept(desk: Desk) -> None:
    for i in range(100):
        desk.push(f"m{i:03d}", tenant=f"t{i:03d}")
    assert len(desk.take(60)) == 60
    assert not desk.client.exists(desk.keys.finish)
    # Who was served comes behind those who were not.
    desk.push("again", tenant="t000")
    assert drain(desk, 7)[-1] == "again"


def test_a_tenant_that_always_comes_back_has_its_weight(desk: Desk) -> None:
    desk.set_quota("b", weight=3)
    fill(desk, "a", 20)
    desk.push("b000", tenant="b")
    taken: list[str] = []
    while len(taken) < 40:
        (each,) = desk.take(1)
        if each.startswith("b"):
            desk.push(f"b{len(taken) + 1:03d}", tenant="b")
        taken.append(each[0])
    assert taken.count("b") == 30


def test_finish_tags_are_collected(desk: Desk) -> None:
    desk.partition.set_shared_quota("default", make_quota(concurrency=1000)).run(desk.client)
    for i in range(300):
        desk.push(f"m{i:03d}", tenant=f"t{i:03d}")
    fill(desk, "a", 400)
    seen = 0
    for _ in range(40):
        desk.take(16)
        seen = max(seen, desk.client.zcard(desk.keys.finish))
    assert seen > 100
    assert desk.client.zcard(desk.keys.finish) <= 1


def test_removed_messages_are_passed_over_a_bounded_number_a_call(desk: Desk) -> None:
    fill(desk, "a", 150)
    desk.client.hdel(desk.keys.messages, *(f"a{i:03d}" for i in range(149)))
    first = desk.claim(10)
    assert (first.entries, first.more) == ([], True)
    assert desk.client.zcard(desk.keys.tenant("a")) == 150 - 64
    assert desk.take(10) == []
    assert desk.take(10) == ["a149"]
    assert desk.state("v") == 1.0


@pytest.mark.parametrize("junk", [b"", b"{}", b"\x01" * 27, b"\x02" + b"\x00" * 40])
def test_a_corrupt_record_becomes_a_dead_letter_and_harms_nobody(desk: Desk, junk: bytes) -> None:
    fill(desk, "a", 3)
    desk.client.hset(desk.keys.messages, "a001", junk)
    claimed = desk.claim(3)
    assert [entry.id for entry in claimed.entries] == ["a000", "a002"]
    assert b'"reason":"corrupt"' in desk.client.hget(desk.keys.dead_info, "a001")
    assert desk.client.hget(desk.keys.dead, "a001") == junk
    desk.finish(*tags_of(claimed.entries))
    assert desk.left_over() == {"leases", "dead", "dead_info", "dead_index"}


def test_a_corrupt_delayed_record_becomes_a_dead_letter(desk: Desk) -> None:
    desk.push("a", due_us=desk.now_us() + 60_000_000)
    desk.client.hset(desk.keys.messages, "a", "junk")
    desk.client.zadd(desk.keys.delayed, {"a": 1})
    assert desk.take() == []
    assert desk.left_over() == {"leases", "dead", "dead_info", "dead_index"}


def test_more_says_that_something_may_be_served(desk: Desk) -> None:
    fill(desk, "a", 3)
    assert desk.claim(2).more is True
    assert desk.claim(2).more is False


def test_nothing_is_left_of_idle_tenants(desk: Desk) -> None:
    for i in range(50):
        desk.set_quota(f"t{i}", 1000, burst=50)
        desk.push(f"m{i}", tenant=f"t{i}")
    entries = desk.claim(100).entries
    assert len(entries) == 50
    desk.finish(*tags_of(entries))
    desk.client.delete(desk.keys.quotas)
    while desk.client.exists(desk.keys.limiter):
        desk.claim(0)
    assert desk.left_over() == {"leases"}
