from __future__ import annotations

import time

import pytest

from celery_dq.testing.waiting import wait_until
from tests.lua.partition_scripts import PartitionScripts, make_quota


def fill(scripts: PartitionScripts, tenant: str, count: int) -> None:
    scripts.push(*(f"{tenant}{i:04d}" for i in range(count)), tenant=tenant)


def bring_settings(scripts: PartitionScripts, packed: bytes | None, by: str, force: bool = False) -> str:
    call = scripts.partition.bring_settings_quota(packed, by=by, memory_ms=60_000, force=force)
    return call.run(scripts.client).status


def starts(scripts: PartitionScripts, tenant: str) -> list[float]:
    """When each held message of a tenant was claimed, in µs of the server."""
    return sorted(
        float(scripts.partition.locate(id_.decode()).run(scripts.client)["since_us"])
        for id_ in scripts.client.hkeys(scripts.keys.held("c1"))
        if id_.decode().startswith(tenant)
    )


@pytest.mark.parametrize(("rate", "burst"), [(200, 1), (50, 10), (1000, 3), (30, 2.5)])
def test_never_more_than_rate_times_window_and_burst(
    scripts: PartitionScripts, rate: float, burst: float
) -> None:
    scripts.set_quota("a", rate, burst=burst)
    fill(scripts, "a", 900)
    end = time.monotonic() + 1.0
    # However little of that second the machine has for it.
    while time.monotonic() < end or scripts.client.hlen(scripts.keys.held("c1")) <= burst:
        scripts.claim(32)
    times = starts(scripts, "a")
    assert len(times) > burst
    for i in range(len(times)):
        for j in range(i, len(times)):
            window_s = (times[j] - times[i]) / 1e6
            assert j - i + 1 <= rate * window_s + burst + 1e-6


def test_throttled_tenant_reports_when(scripts: PartitionScripts) -> None:
    # Seconds, so that it is looked at before it is due.
    scripts.set_quota("a", 0.4)
    fill(scripts, "a", 3)
    assert scripts.take(5) == ["a0000"]
    assert scripts.place("a") == "throttled"
    explained = scripts.partition.explain_tenant("a").run(scripts.client)
    assert 0 < float(explained["due_us"]) - float(explained["now_us"]) <= 2_500_000
    wait_until(lambda: scripts.take(5) == ["a0001"], 30)


def test_requeue_gives_no_token_back(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", 0.01)
    fill(scripts, "a", 2)
    scripts.release(scripts.claim().entries[0].tag, mode="requeue")
    assert scripts.take(2) == []
    assert scripts.place("a") == "throttled"


def test_limiter_state_is_collected(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", 100)
    fill(scripts, "a", 1)
    scripts.finish(scripts.claim().entries[0].tag)

    def gone() -> bool:
        scripts.claim(0)
        return not scripts.client.exists(scripts.keys.limiter)

    wait_until(gone, 30)


class TestConcurrency:
    def test_at_most_so_many_at_a_time(self, scripts: PartitionScripts) -> None:
        scripts.set_quota("a", concurrency=2)
        fill(scripts, "a", 5)
        first = scripts.claim(10).entries
        assert len(first) == 2
        assert scripts.place("a") == "at_concurrency"
        assert scripts.slots("a") == 2
        assert scripts.claim(10, "c2").entries == []
        scripts.finish(first[0].tag)
        assert scripts.place("a") == "turn"
        assert scripts.take(10, "c2") == ["a0002"]

    def test_free_room_bounds_limited_tenants_only(self, scripts: PartitionScripts) -> None:
        scripts.set_quota("a", concurrency=5)
        fill(scripts, "a", 5)
        fill(scripts, "b", 3)
        assert scripts.take(10, free=1) == ["a0000", "b0000"]
        claimed = scripts.claim(10, free=0)
        assert claimed.entries == []
        assert (claimed.more, claimed.needs_slot) == (True, True)
        assert scripts.place("a") == "turn"
        assert scripts.take(10, free=1) == ["a0001", "b0001"]


class TestQuotaChange:
    def test_acts_on_the_backlog_at_once(self, scripts: PartitionScripts) -> None:
        scripts.set_quota("a", 0.001)
        fill(scripts, "a", 10)
        assert scripts.take(10) == ["a0000"]
        scripts.set_quota("a", 100, burst=5)
        # The new burst caps the debt of the old rate: at most one full burst to wait for.
        assert wait_until(lambda: scripts.take(10), 30)

    def test_the_same_once_more_gives_no_token(self, scripts: PartitionScripts) -> None:
        for _ in range(2):
            scripts.set_quota("a", 0.001, burst=3)
            fill(scripts, "a", 6)
        assert len(scripts.take(6)) == 3
        scripts.set_quota("a", 0.001, burst=3)
        assert scripts.take(6) == []

    def test_to_no_limit(self, scripts: PartitionScripts) -> None:
        scripts.set_quota("a", 0.001, concurrency=1)
        fill(scripts, "a", 4)
        scripts.take(4)
        scripts.partition.set_quota("a", None).run(scripts.client)
        assert len(scripts.take(4)) == 3
        assert not scripts.client.exists(scripts.keys.limiter)

    def test_pause_and_resume(self, scripts: PartitionScripts) -> None:
        fill(scripts, "a", 3)
        scripts.set_quota("a", paused=True)
        assert scripts.place("a") == "paused"
        assert scripts.claim(3).more is False
        fill(scripts, "a", 1)
        assert scripts.place("a") == "paused"
        scripts.partition.set_quota("a", None).run(scripts.client)
        assert len(scripts.take(5)) == 4

    def test_default_is_checked_by_the_claim_even_before_place(self, scripts: PartitionScripts) -> None:
        fill(scripts, "a", 2)
        scripts.partition.set_default_quota(make_quota(paused=True)).run(scripts.client)
        assert scripts.take(2) == []
        assert scripts.place("a") == "paused"

    def test_own_wins_over_default_wins_over_config(self, scripts: PartitionScripts) -> None:
        def weight() -> float:
            return float(scripts.partition.explain_tenant("a").run(scripts.client)["weight"])

        assert weight() == 1
        bring_settings(scripts, make_quota(weight=2), "w1")
        assert weight() == 2
        scripts.partition.set_default_quota(make_quota(weight=3)).run(scripts.client)
        assert weight() == 3
        scripts.set_quota("a", weight=4)
        assert weight() == 4

    def test_settings_that_were_replaced_do_not_come_back_by_themselves(
        self, scripts: PartitionScripts
    ) -> None:
        old, new = make_quota(weight=2), make_quota(weight=3)
        assert [bring_settings(scripts, old, "w1") for _ in range(2)] == ["set", "same"]
        assert bring_settings(scripts, new, "w2") == "set"
        assert bring_settings(scripts, old, "w3") == "older"
        found = scripts.partition.bring_settings_quota(old, by="w3", memory_ms=60_000).run(scripts.client)
        assert (found.before, found.by) == (new, "w2")
        assert abs(found.at_us - scripts.now_us()) < 60e6
        assert bring_settings(scripts, old, "operator", force=True) == "set"
        assert bring_settings(scripts, new, "w2") == "older"
        assert bring_settings(scripts, None, "operator", force=True) == "set"
        assert bring_settings(scripts, old, "w1") == "older"
        # A quota that was replaced long ago counts as a change.
        scripts.client.zadd(scripts.keys.config_before, {new: 1})
        assert bring_settings(scripts, new, "w4") == "set"

    def test_a_replaced_quota_is_not_remembered_for_ever(self, scripts: PartitionScripts) -> None:
        for weight in (2, 3):
            bring_settings(scripts, make_quota(weight=weight), "w1")
        assert 0 < scripts.client.pttl(scripts.keys.config_before) <= 60_000


def test_a_claim_reports_whether_a_tenant_may_have_a_limit(scripts: PartitionScripts) -> None:
    scripts.push("first", "second", "third")
    # The first claim makes the lease, the second one finds a single message.
    assert [scripts.claim(want).has_limits for want in (1, 2)] == [False, False]
    scripts.set_quota("another", concurrency=1)
    scripts.push("fourth")
    assert scripts.claim().has_limits
