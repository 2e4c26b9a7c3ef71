"""How fast tenants with a backlog are served: the counts of the scripts, and the rates."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from celery_dq.inspector.backlogs import queue_backlogs
from celery_dq.inspector.claim_rates import RunningEntry, ServiceRate
from celery_dq.inspector.tenants import tenant_snapshot
from tests.lua.partition_scripts import PartitionScripts

MINUTE_US = 60_000_000


def entry_of(scripts: PartitionScripts, tenant: str) -> RunningEntry:
    return RunningEntry.unpack(scripts.client.hget(scripts.keys.running, tenant))


def service_of(scripts: PartitionScripts, tenant: str) -> ServiceRate:
    return tenant_snapshot(scripts.partition, scripts.client, tenant).service


def make_earlier(scripts: PartitionScripts, by_us: float, *tenants: str) -> None:
    """As if the windows of these tenants and of the partition had begun so much earlier."""
    for tenant in tenants:
        entry = scripts.client.hget(scripts.keys.running, tenant)
        slots, since, count, before, count_before = struct.unpack(">ddddd25x", entry)
        packed = struct.pack(">ddddd25x", slots, since - by_us, count, before - by_us, count_before)
        scripts.client.hset(scripts.keys.running, tenant, packed)
    window = list(struct.unpack(">dddddd", scripts.client.hget(scripts.keys.state, "claim_window")))
    window[0], window[3] = window[0] - by_us, window[3] - by_us
    scripts.client.hset(scripts.keys.state, "claim_window", struct.pack(">dddddd", *window))


def test_the_first_claim_that_leaves_a_backlog_begins_the_counts(scripts: PartitionScripts) -> None:
    scripts.push(*"abcdef", tenant="t")
    scripts.claim(2)
    assert entry_of(scripts, "t").claimed == 0
    scripts.claim(3)
    entry = entry_of(scripts, "t")
    assert (entry.slots, entry.claimed, entry.claimed_before) == (5, 3, 0)
    assert entry.since_us == entry.before_us > 0


def test_the_counts_outlive_the_running_tasks_and_end_with_the_backlog(scripts: PartitionScripts) -> None:
    scripts.push(*"abc", tenant="t")
    first = scripts.claim(1)
    scripts.finish(*(each.tag for each in first.entries))
    assert entry_of(scripts, "t").since_us
    assert scripts.slots("t") == 0
    last = scripts.claim(2)
    assert entry_of(scripts, "t") == RunningEntry(2)
    scripts.finish(*(each.tag for each in last.entries))
    assert not scripts.client.exists(scripts.keys.running)


def test_the_counts_begin_again_after_the_clock_has_jumped_back(scripts: PartitionScripts) -> None:
    scripts.push(*"abcdefgh", tenant="t")
    scripts.claim(1)
    scripts.claim(1)
    make_earlier(scripts, -60 * MINUTE_US, "t")
    scripts.claim(2)
    entry, now = entry_of(scripts, "t"), scripts.now_us()
    window = struct.unpack(">dddddd", scripts.client.hget(scripts.keys.state, "claim_window"))
    assert max(entry.since_us, entry.before_us, window[0], window[3]) <= now
    make_earlier(scripts, 2_000_000, "t")
    scripts.claim(3)
    assert service_of(scripts, "t").got_per_s == pytest.approx(1.5, rel=0.3)


@pytest.mark.parametrize("way", ["cancel", "cancel_tenant", "purge", "take"])
def test_a_backlog_that_leaves_without_a_claim_ends_the_counts(scripts: PartitionScripts, way: str) -> None:
    scripts.push(*"ab", tenant="t")
    first = scripts.claim(1)
    scripts.finish(*(each.tag for each in first.entries))
    partition: Any = scripts.partition
    calls = {
        "cancel": lambda: partition.cancel(["b"], tombstone_ttl_ms=0),
        "cancel_tenant": lambda: partition.cancel_tenant("t"),
        "purge": lambda: partition.purge(),
        "take": lambda: partition.take("mover", ["b"], lease_ms=60_000),
    }
    calls[way]().run(scripts.client)
    assert entry_of(scripts, "t") == RunningEntry(int(way == "take"))


def test_counts_leave_the_slots_as_they_are(scripts: PartitionScripts) -> None:
    scripts.set_quota("t", concurrency=3)
    scripts.push(*"abcdef", tenant="t")
    scripts.claim(1)
    scripts.claim(1)
    assert entry_of(scripts, "t").claimed == 1
    assert scripts.partition.explain_tenant("t").run(scripts.client)["slots"] == "2"
    # The rest of the slots, also by the script for scaling.
    assert queue_backlogs([scripts.partition], scripts.client).runnable == 1
    assert len(scripts.take(5)) == 1
    assert scripts.slots("t") == 3


def test_a_tenant_without_a_backlog_has_no_counts(scripts: PartitionScripts) -> None:
    scripts.push_one("a", "t")
    scripts.claim(1)
    assert scripts.client.hgetall(scripts.keys.running) == {b"t": b"1"}
    assert scripts.client.hget(scripts.keys.state, "claim_window") is None
    assert service_of(scripts, "t") == ServiceRate()


def test_a_window_ends_after_a_minute_and_is_kept_for_another(scripts: PartitionScripts) -> None:
    scripts.push(*map(str, range(40)), tenant="t")
    scripts.claim(1)
    scripts.claim(4)
    make_earlier(scripts, MINUTE_US, "t")
    before = entry_of(scripts, "t")
    scripts.claim(5)
    entry = entry_of(scripts, "t")
    assert (entry.claimed, entry.claimed_before, entry.before_us) == (0, 9, before.since_us)
    scripts.claim(6)
    make_earlier(scripts, 30_000_000, "t")
    # 15 messages since the first claim, a minute and a half ago.
    service = service_of(scripts, "t")
    assert service.got_per_s == pytest.approx(15 / 90, rel=0.01)
    assert service.over_s == pytest.approx(90, rel=0.01)


def test_a_tenant_that_gets_nothing_has_a_low_rate_soon(scripts: PartitionScripts) -> None:
    scripts.push(*map(str, range(100)), tenant="t")
    scripts.claim(1)
    scripts.claim(90)
    make_earlier(scripts, 10 * MINUTE_US, "t")
    got = service_of(scripts, "t").got_per_s
    # No claim has come for the nine minutes behind the window.
    assert got == pytest.approx(1 / 540, rel=0.01)


def test_rate_and_share_stand_beside_those_that_the_quota_allows(scripts: PartitionScripts) -> None:
    scripts.set_quota("heavy", weight=3)
    scripts.set_quota("rated", 1, burst=1)
    for tenant in ("heavy", "light", "rated"):
        scripts.push(*(f"{tenant}{i}" for i in range(100)), tenant=tenant)
    scripts.claim(8)
    for _ in range(4):
        scripts.claim(10)
    make_earlier(scripts, 10_000_000, "heavy", "light")
    heavy, light, rated = (service_of(scripts, each) for each in ("heavy", "light", "rated"))
    assert (heavy.capped_by, light.capped_by, rated.capped_by) == ("weight", "weight", "rate")
    assert heavy.got_per_s == pytest.approx(3.0, rel=0.05)
    assert heavy.due_per_s == pytest.approx(3.0, rel=0.05)
    assert (heavy.share_got, heavy.share_by_weight) == pytest.approx((0.75, 0.75), rel=0.05)
    assert (light.share_got, light.share_by_weight) == pytest.approx((0.25, 0.25), rel=0.05)
    assert rated.due_per_s == pytest.approx(1.0, rel=0.05)


def test_without_claims_only_the_rate_gives_a_due_rate(scripts: PartitionScripts) -> None:
    scripts.set_quota("t", 5, burst=1)
    scripts.push(*"abc", tenant="t")
    scripts.push(*"def", tenant="free")
    scripts.claim(2)
    make_earlier(scripts, 10_000_000, "t", "free")
    rated, free = service_of(scripts, "t"), service_of(scripts, "free")
    assert (rated.got_per_s, rated.due_per_s, rated.share_by_weight) == (0, 5, None)
    assert (free.got_per_s, free.due_per_s) == (0, None)


def test_the_window_of_the_partition_begins_again_after_a_rest(scripts: PartitionScripts) -> None:
    scripts.push(*map(str, range(100)), tenant="t")

    def window() -> tuple[float, ...]:
        return struct.unpack(">dddddd", scripts.client.hget(scripts.keys.state, "claim_window"))

    scripts.claim(1)
    assert window()[1:3] == window()[4:] == (1, 0)
    make_earlier(scripts, MINUTE_US, "t")
    scripts.claim(10)
    assert (window()[1], window()[4]) == (11, 1)
    make_earlier(scripts, 2 * MINUTE_US, "t")
    scripts.claim(10)
    assert window()[:3] == window()[3:]
    assert window()[1] == 21


def test_a_pause_caps_a_tenant_and_a_pause_of_the_queue_all(scripts: PartitionScripts) -> None:
    scripts.set_quota("t", concurrency=1)
    scripts.push(*"abc", tenant="t")
    scripts.claim(1)
    assert service_of(scripts, "t").capped_by == "concurrency"
    scripts.set_quota("t", paused=True)
    service = service_of(scripts, "t")
    assert (service.capped_by, service.due_per_s) == ("pause", 0.0)
    scripts.client.hset(scripts.keys.state, "paused_until", 9 * 10**15)
    service = service_of(scripts, "t")
    assert (service.capped_by, service.due_per_s) == ("queue pause", 0.0)


def test_an_entry_without_counts_is_a_number_of_slots() -> None:
    assert RunningEntry.unpack(None) == RunningEntry(0)
    assert RunningEntry.unpack(b"7") == RunningEntry(7)
    assert RunningEntry.unpack(b"7").got_per_s(1e15) is None
