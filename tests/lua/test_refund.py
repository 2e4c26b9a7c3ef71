"""A turn is paid when a message is claimed, and given back with one that comes back without its run."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_dq.transport.redis.replies import ClaimedEntry, Outgoing
from tests.lua.desk import Desk, make_record, tags_of

#: So many that a round is long, and that others are both before and behind any tenant.
TENANTS = 100


def fill(desk: Desk, depth: int) -> None:
    records = [(f"t{tenant:03d}", i) for i in range(depth) for tenant in range(TENANTS)]
    batch = [Outgoing(0, f"{tenant}.{i}", make_record(tenant)) for tenant, i in records]
    for start in range(0, len(batch), 1000):
        desk.partition.push(batch[start : start + 1000]).run(desk.client)


def serve(desk: Desk, count: int, want: int = 1) -> list[str]:
    """What another consumer claims and finishes."""
    served: list[str] = []
    while len(served) < count:
        entries = desk.claim(min(want, count - len(served)), "other").entries
        assert entries
        desk.finish(*tags_of(entries), consumer="other")
        served += [entry.id for entry in entries]
    return served


def claim_next_of(desk: Desk, tenant: str) -> ClaimedEntry:
    """The next message of this tenant, claimed by ``c1`` when all before it are served."""
    while True:
        (entry,) = desk.claim().entries
        if entry.id.startswith(tenant):
            return entry
        desk.finish(entry.tag)


def crash(desk: Desk) -> None:
    desk.lose()
    assert desk.reap() > 0


class TestIsGivenBack:
    @pytest.mark.parametrize("weight", [1, 3, 0.7])
    @pytest.mark.parametrize("backlog", [0, 1, 5])
    @pytest.mark.parametrize("tenant", ["a", "t050x", "z"])
    def test_after_a_crash(self, desk: Desk, tenant: str, backlog: int, weight: float) -> None:
        """Wherever among the others it stands, and however far they have come: it is next."""
        desk.set_quota(tenant, weight=weight)
        fill(desk, 6)
        serve(desk, 30)
        ids = [f"{tenant}.{i}" for i in range(backlog + 1)]
        desk.push(*ids, tenant=tenant)
        assert claim_next_of(desk, tenant).id == ids[0]
        serve(desk, 230, want=7)
        crash(desk)
        assert desk.take(10, "other") == ids[:1]

    @pytest.mark.parametrize("limit", [{"rate": 1000, "burst": 10}, {"concurrency": 2}])
    def test_to_tenants_with_limits_too(self, desk: Desk, limit: dict[str, float]) -> None:
        fill(desk, 4)
        desk.set_quota("x", **limit)
        desk.push("x.0", tenant="x")
        claim_next_of(desk, "x")
        serve(desk, 130)
        crash(desk)
        assert desk.take(1, "other") == ["x.0"]

    def test_with_what_was_not_started(self, desk: Desk) -> None:
        """It goes as if it had not been claimed, however often that is."""
        fill(desk, 6)
        desk.push("x.0", tenant="x")
        entry = claim_next_of(desk, "x")
        for _ in range(3):
            serve(desk, 130)
            desk.release(entry.tag, mode="unstarted")
            (entry,) = desk.claim().entries
            assert entry.id == "x.0"

    def test_by_who_resigns(self, desk: Desk) -> None:
        fill(desk, 4)
        claimed = desk.take(10)
        serve(desk, 130)
        assert desk.partition.resign("c1").run(desk.client) == 0
        # In turn by how much of it each has to get, and among these by name; the rest goes on where it was.
        assert desk.take(10, "other") == claimed

    def test_once_per_message(self, desk: Desk) -> None:
        """Several of one tenant: so many turns, then it waits like the others."""
        fill(desk, 8)
        desk.push(*(f"x.{i}" for i in range(9)), tenant="x")
        for _ in range(4):
            claim_next_of(desk, "x")
        crash(desk)
        assert [claim_next_of(desk, "x").id for _ in range(4)] == ["x.0", "x.1", "x.2", "x.3"]
        assert not any(each.startswith("x") for each in serve(desk, TENANTS - 1))


class TestIsNotGivenBack:
    def assert_waits(self, desk: Desk, tenant: str = "x") -> None:
        assert not any(each.startswith(tenant) for each in serve(desk, 40))

    def start(self, desk: Desk, tenant: str = "x") -> ClaimedEntry:
        fill(desk, 6)
        desk.push(*(f"{tenant}.{i}" for i in range(3)), tenant=tenant)
        entry = claim_next_of(desk, tenant)
        serve(desk, 10)
        return entry

    def test_to_a_task_that_asks_for_another_run(self, desk: Desk) -> None:
        desk.release(self.start(desk).tag, mode="requeue")
        self.assert_waits(desk)

    def test_to_one_that_crashes_again(self, desk: Desk) -> None:
        """The first time it was perhaps another one's fault."""
        self.start(desk)
        crash(desk)
        assert desk.take() == ["x.0"]
        serve(desk, 10)
        crash(desk)
        self.assert_waits(desk)

    def test_for_what_has_run(self, desk: Desk) -> None:
        desk.settle(self.start(desk).tag)
        crash(desk)
        self.assert_waits(desk)

    def test_for_what_was_taken_by_name(self, desk: Desk) -> None:
        """It took no turn."""
        tag = self.start(desk).tag
        desk.finish(tag)
        assert desk.partition.take("c1", ["x.1"], lease_ms=60_000).run(desk.client)
        before = desk.client.zscore(desk.keys.turn, "x")
        crash(desk)
        assert desk.client.zscore(desk.keys.turn, "x") == before

    @pytest.mark.parametrize(("old", "new"), [(1, 0.01), (0.5, 4)])
    def test_more_than_was_paid(self, desk: Desk, old: float, new: float) -> None:
        """The weight is another one by now."""
        desk.set_quota("x", weight=old)
        self.start(desk)
        before = desk.client.zscore(desk.keys.turn, "x")
        desk.set_quota("x", weight=new)
        crash(desk)
        assert before - desk.client.zscore(desk.keys.turn, "x") == pytest.approx(1 / old)

    def test_nor_are_tokens(self, desk: Desk) -> None:
        desk.set_quota("x", 0.001, burst=3)
        fill(desk, 2)
        desk.push("x.0", "x.1", tenant="x")
        claim_next_of(desk, "x")
        before = desk.client.zscore(desk.keys.limiter, "x")
        crash(desk)
        assert desk.client.zscore(desk.keys.limiter, "x") == before


class TestOthers:
    @pytest.mark.parametrize("mode", ["unstarted", "crashed"])
    def test_get_what_is_theirs(self, desk: Desk, mode: str) -> None:
        """Of what is run to its end, a tenant whose messages all come back once has as much as any other."""
        fill(desk, 30)
        desk.push(*(f"x.{i:02d}" for i in range(30)), tenant="x")
        back = set[str]()
        done = Counter[str]()
        while sum(done.values()) < 20 * TENANTS:
            for entry in desk.claim(3).entries:
                tenant = entry.id.split(".")[0]
                if tenant == "x" and entry.id not in back:
                    back.add(entry.id)
                    desk.release(entry.tag, mode=mode)
                else:
                    desk.finish(entry.tag)
                    done[tenant] += 1
        assert max(done.values()) - min(done.values()) <= 1
        assert min(done.values()) >= 19

    def test_are_not_kept_waiting_by_a_tenant_of_poison(self, desk: Desk) -> None:
        """Each of its messages crashes every worker: of each, one run more than turns, and no more."""
        fill(desk, 30)
        desk.push(*(f"x.{i:02d}" for i in range(30)), tenant="x")
        runs = Counter[str]()
        others = 0
        while others < 20 * TENANTS:
            for entry in desk.claim(3, max_deliveries=3).entries:
                if entry.id.startswith("x") and not entry.reason:
                    runs[entry.id] += 1
                    desk.release(entry.tag, mode="crashed", max_deliveries=3)
                else:
                    desk.finish(entry.tag)
                    others += not entry.reason
        assert sum(runs.values()) - len(runs) <= 21
        assert max(runs.values()) == 3

    @pytest.mark.parametrize("want", [1, 3])
    def test_do_not_wait_behind_those_who_are_passed_over(self, desk: Desk, want: int) -> None:
        """However many are suspect while one of them runs."""
        fill(desk, 3)
        lost = desk.take(60)
        crash(desk)
        assert desk.take(9) == lost[:1]
        served: list[str] = []
        while entries := desk.claim(want, suspects=False).entries:
            desk.finish(*tags_of(entries))
            served += [entry.id for entry in entries]
        # Of the tenant whose suspect runs, too.
        assert len(served) == (TENANTS - 60) * 3 + 2

    def test_nothing_is_left_of_it(self, desk: Desk) -> None:
        fill(desk, 1)
        desk.take(60)
        crash(desk)
        while entries := desk.claim(10).entries:
            desk.finish(*tags_of(entries))
        assert desk.left_over() == {"leases"}
