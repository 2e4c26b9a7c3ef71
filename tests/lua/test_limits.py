from __future__ import annotations

import time

import pytest

from celery_dq.testing.waiting import wait_until
from tests.lua.desk import Desk, make_quota, tags_of


def fill(desk: Desk, tenant: str, count: int) -> None:
    desk.push(*(f"{tenant}{i:04d}" for i in range(count)), tenant=tenant)


def starts(desk: Desk, tenant: str) -> list[float]:
    """When each held message of a tenant was claimed, in µs of the server."""
    return sorted(
        float(desk.partition.locate(id_.decode()).run(desk.client)["since_us"])
        for id_ in desk.client.hkeys(desk.keys.held("c1"))
        if id_.decode().startswith(tenant)
    )


@pytest.mark.parametrize(("rate", "burst"), [(200, 1), (50, 10), (1000, 3), (30, 2.5)])
def test_never_more_than_rate_times_window_and_burst(desk: Desk, rate: float, burst: float) -> None:
    desk.set_quota("a", rate, burst=burst)
    fill(desk, "a", 900)
    end = time.monotonic() + 1.0
    # However little of that second the machine has for it.
    while time.monotonic() < end or desk.client.hlen(desk.keys.held("c1")) <= burst:
        desk.claim(32)
    times = starts(desk, "a")
    assert len(times) > burst
    for i in range(len(times)):
        for j in range(i, len(times)):
            window_s = (times[j] - times[i]) / 1e6
            assert j - i + 1 <= rate * window_s + burst + 1e-6


def test_throttled_tenant_says_when(desk: Desk) -> None:
    # Seconds, so that it is looked at before it is due.
    desk.set_quota("a", 0.4)
    fill(desk, "a", 3)
    assert desk.take(5) == ["a0000"]
    assert desk.place("a") == "throttled"
    explained = desk.partition.explain_tenant("a").run(desk.client)
    assert 0 < float(explained["due_us"]) - float(explained["now_us"]) <= 2_500_000
    wait_until(lambda: desk.take(5) == ["a0001"], 30)


def test_throttled_tenant_delays_nobody(desk: Desk) -> None:
    desk.set_quota("a", 0.001)
    fill(desk, "a", 5)
    fill(desk, "b", 5)
    assert desk.take(10) == ["a0000", *(f"b{i:04d}" for i in range(5))]


def test_unstarted_release_gives_the_token_back(desk: Desk) -> None:
    desk.set_quota("a", 0.01, burst=2)
    fill(desk, "a", 5)
    entries = desk.claim(5).entries
    assert len(entries) == 2
    desk.release(*tags_of(entries), mode="unstarted")
    assert desk.take(5) == ["a0000", "a0001"]
    assert desk.take(5) == []


def test_requeue_gives_no_token_back(desk: Desk) -> None:
    desk.set_quota("a", 0.01)
    fill(desk, "a", 2)
    desk.release(desk.claim().entries[0].tag, mode="requeue")
    assert desk.take(2) == []
    assert desk.place("a") == "throttled"


def test_limiter_state_is_collected(desk: Desk) -> None:
    desk.set_quota("a", 100)
    fill(desk, "a", 1)
    desk.finish(desk.claim().entries[0].tag)

    def gone() -> bool:
        desk.claim(0)
        return not desk.client.exists(desk.keys.limiter)

    wait_until(gone, 30)


class TestConcurrency:
    def test_at_most_so_many_at_a_time(self, desk: Desk) -> None:
        desk.set_quota("a", concurrency=2)
        fill(desk, "a", 5)
        first = desk.claim(10).entries
        assert len(first) == 2
        assert desk.place("a") == "limited"
        assert desk.slots("a") == 2
        assert desk.claim(10, "c2").entries == []
        desk.finish(first[0].tag)
        assert desk.place("a") == "turn"
        assert desk.take(10, "c2") == ["a0002"]

    def test_settled_message_keeps_its_slot(self, desk: Desk) -> None:
        desk.set_quota("a", concurrency=1)
        fill(desk, "a", 2)
        entry = desk.claim().entries[0]
        desk.settle(entry.tag)
        assert desk.take() == []
        assert desk.finish(entry.tag) == 0
        assert desk.take() == ["a0001"]

    @pytest.mark.parametrize("mode", ["unstarted", "requeue", "crashed"])
    def test_release_frees_the_slot(self, desk: Desk, mode: str) -> None:
        desk.set_quota("a", concurrency=1)
        fill(desk, "a", 2)
        desk.release(desk.claim().entries[0].tag, mode=mode)
        assert desk.slots("a") == 0
        assert desk.take() == ["a0000"]

    def test_reaping_frees_the_slots_of_settled_ones_too(self, desk: Desk) -> None:
        desk.set_quota("a", concurrency=2)
        fill(desk, "a", 3)
        desk.settle(desk.claim(2).entries[0].tag)
        desk.lose()
        assert desk.reap() == 2
        assert desk.slots("a") == 0
        assert desk.take(1, "c2") == ["a0001"]

    def test_free_room_bounds_limited_tenants_only(self, desk: Desk) -> None:
        desk.set_quota("a", concurrency=5)
        fill(desk, "a", 5)
        fill(desk, "b", 3)
        assert desk.take(10, free=1) == ["a0000", "b0000", "b0001", "b0002"]
        claimed = desk.claim(10, free=0)
        assert claimed.entries == []
        assert claimed.more is True
        assert desk.place("a") == "turn"

    def test_finishing_a_slot_in_the_claim_lets_its_tenant_go_on(self, desk: Desk) -> None:
        desk.set_quota("a", concurrency=1)
        fill(desk, "a", 3)
        entry = desk.claim(5).entries[0]
        (second,) = desk.claim(5, finish=[entry.tag]).entries
        assert second.id == "a0001"


class TestQuotaChange:
    def test_acts_on_the_backlog_at_once(self, desk: Desk) -> None:
        desk.set_quota("a", 0.001)
        fill(desk, "a", 10)
        assert desk.take(10) == ["a0000"]
        desk.set_quota("a", 100, burst=5)
        # The new burst caps what the old rate has borrowed: at most one full burst to wait for.
        assert wait_until(lambda: desk.take(10), 30)

    def test_to_no_limit(self, desk: Desk) -> None:
        desk.set_quota("a", 0.001, concurrency=1)
        fill(desk, "a", 4)
        desk.take(4)
        desk.partition.set_quota("a", None).run(desk.client)
        assert len(desk.take(4)) == 3
        assert not desk.client.exists(desk.keys.limiter)

    def test_pause_and_resume(self, desk: Desk) -> None:
        fill(desk, "a", 3)
        desk.set_quota("a", paused=True)
        assert desk.place("a") == "parked"
        assert desk.claim(3).more is False
        fill(desk, "a", 1)
        assert desk.place("a") == "parked"
        desk.partition.set_quota("a", None).run(desk.client)
        assert len(desk.take(5)) == 4

    def test_concurrency_up_and_down(self, desk: Desk) -> None:
        desk.set_quota("a", concurrency=1)
        fill(desk, "a", 6)
        desk.take(6)
        desk.set_quota("a", concurrency=3)
        assert len(desk.take(6)) == 2
        desk.set_quota("a", concurrency=1)
        entry = desk.partition.claim("c1", lease_ms=60_000, want=6).run(desk.client)
        assert entry.entries == []
        assert desk.slots("a") == 3

    def test_default_acts_after_place(self, desk: Desk) -> None:
        fill(desk, "a", 2)
        fill(desk, "b", 2)
        desk.set_quota("b", weight=2)
        desk.partition.set_shared_quota("default", make_quota(paused=True)).run(desk.client)
        desk.partition.place(["a", "b", "none"]).run(desk.client)
        assert (desk.place("a"), desk.place("b"), desk.place("none")) == ("parked", "turn", "idle")
        desk.partition.set_shared_quota("default", None).run(desk.client)
        desk.partition.place(["a"]).run(desk.client)
        assert desk.place("a") == "turn"

    def test_default_is_checked_by_the_claim_even_before_place(self, desk: Desk) -> None:
        fill(desk, "a", 2)
        desk.partition.set_shared_quota("default", make_quota(paused=True)).run(desk.client)
        assert desk.take(2) == []
        assert desk.place("a") == "parked"

    def test_own_wins_over_default_wins_over_config(self, desk: Desk) -> None:
        set_shared = desk.partition.set_shared_quota

        def weight() -> float:
            return float(desk.partition.explain_tenant("a").run(desk.client)["weight"])

        assert weight() == 1
        set_shared("config", make_quota(weight=2)).run(desk.client)
        assert weight() == 2
        set_shared("default", make_quota(weight=3)).run(desk.client)
        assert weight() == 3
        desk.set_quota("a", weight=4)
        assert weight() == 4

    def test_weight_acts_on_what_waits(self, desk: Desk) -> None:
        fill(desk, "a", 20)
        fill(desk, "b", 20)
        desk.take(4)
        desk.set_quota("a", weight=3)
        taken = [each[0] for each in desk.take(16)]
        assert taken.count("a") == 12
