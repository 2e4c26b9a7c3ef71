"""A turn is paid at the claim of a message, and refunded when the message is released without its run."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_dq.transport.partition_replies import ClaimedEntry, OutgoingRecord
from tests.lua.partition_scripts import PartitionScripts, make_record, tags_of

#: So many that a round is long, and that others are both before and behind any tenant.
TENANTS = 100


def fill(scripts: PartitionScripts, depth: int) -> None:
    records = [(f"t{tenant:03d}", i) for i in range(depth) for tenant in range(TENANTS)]
    batch = [OutgoingRecord(0, f"{tenant}.{i}", make_record(tenant)) for tenant, i in records]
    for start in range(0, len(batch), 1000):
        scripts.partition.push(batch[start : start + 1000]).run(scripts.client)


def serve(scripts: PartitionScripts, count: int, want: int = 1) -> list[str]:
    """Let another consumer claim and finish messages."""
    served: list[str] = []
    while len(served) < count:
        entries = scripts.claim(min(want, count - len(served)), "other").entries
        assert entries
        scripts.finish(*tags_of(entries), consumer="other")
        served += [entry.id for entry in entries]
    return served


def claim_next_of(scripts: PartitionScripts, tenant: str) -> ClaimedEntry:
    """The next message of this tenant, claimed by ``c1`` when all before it are served."""
    while True:
        (entry,) = scripts.claim().entries
        if entry.id.startswith(tenant):
            return entry
        scripts.finish(entry.tag)


def crash(scripts: PartitionScripts) -> None:
    scripts.lose()
    assert scripts.reap() > 0


class TestIsGivenBack:
    @pytest.mark.parametrize("weight", [1, 3, 0.7])
    @pytest.mark.parametrize("backlog", [0, 1, 5])
    @pytest.mark.parametrize("tenant", ["a", "t050x", "z"])
    def test_after_a_crash(self, scripts: PartitionScripts, tenant: str, backlog: int, weight: float) -> None:
        """Wherever among the others it stands, and however far they have come: it is next."""
        scripts.set_quota(tenant, weight=weight)
        fill(scripts, 6)
        serve(scripts, 30)
        ids = [f"{tenant}.{i}" for i in range(backlog + 1)]
        scripts.push(*ids, tenant=tenant)
        assert claim_next_of(scripts, tenant).id == ids[0]
        serve(scripts, 230, want=7)
        crash(scripts)
        assert scripts.take(10, "other") == ids[:1]

    @pytest.mark.parametrize("backlog", [0, 1])
    def test_before_others_that_came_since(self, scripts: PartitionScripts, backlog: int) -> None:
        """Their turns are equal then, and their names do not matter."""
        scripts.push(*(f"x.{i}" for i in range(backlog + 1)), tenant="x")
        claim_next_of(scripts, "x")
        scripts.push("a.0", tenant="a")
        crash(scripts)
        assert scripts.take(1, "other") == ["x.0"]

    @pytest.mark.parametrize("limit", [{"rate": 1000, "burst": 10}, {"concurrency": 2}])
    def test_to_tenants_with_limits_too(self, scripts: PartitionScripts, limit: dict[str, float]) -> None:
        fill(scripts, 4)
        scripts.set_quota("x", **limit)
        scripts.push("x.0", tenant="x")
        claim_next_of(scripts, "x")
        serve(scripts, 130)
        crash(scripts)
        assert scripts.take(1, "other") == ["x.0"]

    def test_with_unstarted_messages(self, scripts: PartitionScripts) -> None:
        """It goes as if it had not been claimed, however often that is."""
        fill(scripts, 6)
        scripts.push("x.0", tenant="x")
        entry = claim_next_of(scripts, "x")
        for _ in range(3):
            serve(scripts, 130)
            scripts.release(entry.tag, mode="unstarted")
            (entry,) = scripts.claim().entries
            assert entry.id == "x.0"

    def test_by_a_consumer_that_resigns(self, scripts: PartitionScripts) -> None:
        fill(scripts, 4)
        claimed = scripts.take(10)
        serve(scripts, 130)
        assert scripts.partition.resign("c1").run(scripts.client) == 0
        # In turn by how much of it each has to get, and among these by name; the rest goes on where it was.
        assert scripts.take(10, "other") == claimed

    def test_once_per_message(self, scripts: PartitionScripts) -> None:
        """Several of one tenant: so many turns, then it waits like the others."""
        fill(scripts, 8)
        scripts.push(*(f"x.{i}" for i in range(9)), tenant="x")
        for _ in range(4):
            claim_next_of(scripts, "x")
        crash(scripts)
        assert [claim_next_of(scripts, "x").id for _ in range(4)] == ["x.0", "x.1", "x.2", "x.3"]
        assert not any(each.startswith("x") for each in serve(scripts, TENANTS - 1))


class TestIsNotGivenBack:
    def assert_waits(self, scripts: PartitionScripts, tenant: str = "x") -> None:
        assert not any(each.startswith(tenant) for each in serve(scripts, 40))

    def start(self, scripts: PartitionScripts, tenant: str = "x") -> ClaimedEntry:
        fill(scripts, 6)
        scripts.push(*(f"{tenant}.{i}" for i in range(3)), tenant=tenant)
        entry = claim_next_of(scripts, tenant)
        serve(scripts, 10)
        return entry

    def test_to_a_task_that_asks_for_another_run(self, scripts: PartitionScripts) -> None:
        scripts.release(self.start(scripts).tag, mode="requeue")
        self.assert_waits(scripts)

    def test_to_one_that_crashes_again(self, scripts: PartitionScripts) -> None:
        """The first time it was perhaps another one's fault."""
        self.start(scripts)
        crash(scripts)
        assert scripts.take() == ["x.0"]
        serve(scripts, 10)
        crash(scripts)
        self.assert_waits(scripts)

    def test_for_messages_that_have_run(self, scripts: PartitionScripts) -> None:
        scripts.settle(self.start(scripts).tag)
        crash(scripts)
        self.assert_waits(scripts)

    def test_for_messages_taken_by_name(self, scripts: PartitionScripts) -> None:
        """It took no turn."""
        tag = self.start(scripts).tag
        scripts.finish(tag)
        assert scripts.partition.take("c1", ["x.1"], lease_ms=60_000).run(scripts.client)
        before = scripts.client.zscore(scripts.keys.turn, "x")
        crash(scripts)
        assert scripts.client.zscore(scripts.keys.turn, "x") == before

    @pytest.mark.parametrize(("old", "new"), [(1, 0.01), (0.5, 4)])
    def test_more_than_was_paid(self, scripts: PartitionScripts, old: float, new: float) -> None:
        """The weight is another one by now."""
        scripts.set_quota("x", weight=old)
        self.start(scripts)
        before = scripts.client.zscore(scripts.keys.turn, "x")
        scripts.set_quota("x", weight=new)
        crash(scripts)
        assert before - scripts.client.zscore(scripts.keys.turn, "x") == pytest.approx(1 / old)

    def test_nor_are_tokens(self, scripts: PartitionScripts) -> None:
        scripts.set_quota("x", 0.001, burst=3)
        fill(scripts, 2)
        scripts.push("x.0", "x.1", tenant="x")
        claim_next_of(scripts, "x")
        before = scripts.client.zscore(scripts.keys.limiter, "x")
        crash(scripts)
        assert scripts.client.zscore(scripts.keys.limiter, "x") == before


class TestOthers:
    @pytest.mark.parametrize("mode", ["unstarted", "crashed"])
    def test_get_their_own(self, scripts: PartitionScripts, mode: str) -> None:
        """A tenant whose messages all come back once finishes as many runs as any other."""
        fill(scripts, 30)
        scripts.push(*(f"x.{i:02d}" for i in range(30)), tenant="x")
        back = set[str]()
        done = Counter[str]()
        while sum(done.values()) < 20 * TENANTS:
            for entry in scripts.claim(3).entries:
                tenant = entry.id.split(".")[0]
                if tenant == "x" and entry.id not in back:
                    back.add(entry.id)
                    scripts.release(entry.tag, mode=mode)
                else:
                    scripts.finish(entry.tag)
                    done[tenant] += 1
        assert max(done.values()) - min(done.values()) <= 1
        assert min(done.values()) >= 19

    def test_are_not_kept_waiting_by_a_tenant_of_poison(self, scripts: PartitionScripts) -> None:
        """Each of its messages crashes every worker: of each, one run more than turns, and no more."""
        fill(scripts, 30)
        scripts.push(*(f"x.{i:02d}" for i in range(30)), tenant="x")
        runs = Counter[str]()
        others = 0
        while others < 20 * TENANTS:
            for entry in scripts.claim(3, max_deliveries=3).entries:
                if entry.id.startswith("x") and not entry.reason:
                    runs[entry.id] += 1
                    scripts.release(entry.tag, mode="crashed", max_deliveries=3)
                else:
                    scripts.finish(entry.tag)
                    others += not entry.reason
        assert sum(runs.values()) - len(runs) <= 21
        assert max(runs.values()) == 3

    @pytest.mark.parametrize("want", [1, 3])
    def test_do_not_wait_behind_tenants_that_are_passed_over(
        self, scripts: PartitionScripts, want: int
    ) -> None:
        """However many are suspect while one of them runs."""
        fill(scripts, 3)
        lost = scripts.take(60)
        crash(scripts)
        assert scripts.take(9) == lost[:1]
        served: list[str] = []
        while entries := scripts.claim(want, suspects=False).entries:
            scripts.finish(*tags_of(entries))
            served += [entry.id for entry in entries]
        # Of the tenant whose suspect runs, too.
        assert len(served) == (TENANTS - 60) * 3 + 2

    def test_nothing_is_left_of_it(self, scripts: PartitionScripts) -> None:
        fill(scripts, 1)
        scripts.take(60)
        crash(scripts)
        while entries := scripts.claim(10).entries:
            scripts.finish(*tags_of(entries))
        assert scripts.left_over() == {"leases"}
