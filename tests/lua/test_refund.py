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


@pytest.mark.parametrize(("tenant", "backlog", "weight"), [("a", 0, 1), ("t050x", 1, 3), ("z", 5, 0.7)])
def test_a_crash_gives_the_turn_back(
    scripts: PartitionScripts, tenant: str, backlog: int, weight: float
) -> None:
    """Wherever among the others it stands, and however far they have come: it is next."""
    scripts.set_quota(tenant, weight=weight)
    fill(scripts, 4)
    serve(scripts, 30)
    ids = [f"{tenant}.{i}" for i in range(backlog + 1)]
    scripts.push(*ids, tenant=tenant)
    assert claim_next_of(scripts, tenant).id == ids[0]
    serve(scripts, 130, want=7)
    crash(scripts)
    assert scripts.take(10, "other") == ids[:1]


@pytest.mark.parametrize("backlog", [0, 1])
def test_a_turn_is_given_back_before_others_that_came_since(scripts: PartitionScripts, backlog: int) -> None:
    """Their turns are equal then, and their names do not matter."""
    scripts.push(*(f"x.{i}" for i in range(backlog + 1)), tenant="x")
    claim_next_of(scripts, "x")
    scripts.push("a.0", tenant="a")
    crash(scripts)
    assert scripts.take(1, "other") == ["x.0"]


@pytest.mark.parametrize("limit", [{"rate": 1000, "burst": 10}, {"concurrency": 2}])
def test_a_turn_is_given_back_to_tenants_with_limits_too(
    scripts: PartitionScripts, limit: dict[str, float]
) -> None:
    fill(scripts, 3)
    scripts.set_quota("x", **limit)
    scripts.push("x.0", tenant="x")
    claim_next_of(scripts, "x")
    serve(scripts, 130, want=7)
    crash(scripts)
    assert scripts.take(1, "other") == ["x.0"]


def test_a_turn_is_given_back_for_each_message(scripts: PartitionScripts) -> None:
    fill(scripts, 4)
    scripts.push(*(f"a.{i}" for i in range(4)), tenant="a")
    for _ in range(3):
        claim_next_of(scripts, "a")
    crash(scripts)
    assert [scripts.take(1, "other") for _ in range(2)] == [["a.0"], ["a.1"]]


def test_an_unstarted_message_is_the_next_again(scripts: PartitionScripts) -> None:
    fill(scripts, 3)
    scripts.push("x.0", tenant="x")
    tag = claim_next_of(scripts, "x").tag
    serve(scripts, 130, want=7)
    scripts.release(tag, mode="unstarted")
    assert scripts.take(1, "other") == ["x.0"]


@pytest.mark.parametrize("why", ["asks for another run", "crashes again", "has run", "was taken by name"])
def test_a_message_gives_no_turn_back(scripts: PartitionScripts, why: str) -> None:
    scripts.push("a", tenant="a")  # keeps the turns of both at their places
    scripts.push("x.0", "x.1", "x.2", tenant="x")
    tag = claim_next_of(scripts, "x").tag
    if why == "crashes again":
        crash(scripts)
        tag = claim_next_of(scripts, "x").tag
    elif why == "has run":
        scripts.settle(tag)
    elif why == "was taken by name":
        scripts.finish(tag)
        assert scripts.partition.take("c1", ["x.1"], lease_ms=60_000).run(scripts.client)
    before = scripts.client.zscore(scripts.keys.turn, "x")
    if why == "asks for another run":
        scripts.release(tag, mode="requeue")
    else:
        crash(scripts)
    assert scripts.client.zscore(scripts.keys.turn, "x") == before


@pytest.mark.parametrize(("old", "new"), [(1, 0.01), (0.5, 4)])
def test_no_more_is_given_back_than_was_paid(scripts: PartitionScripts, old: float, new: float) -> None:
    """The weight is another one by now."""
    scripts.set_quota("x", weight=old)
    fill(scripts, 1)
    scripts.push("x.0", "x.1", tenant="x")
    claim_next_of(scripts, "x")
    before = scripts.client.zscore(scripts.keys.turn, "x")
    scripts.set_quota("x", weight=new)
    crash(scripts)
    assert before - scripts.client.zscore(scripts.keys.turn, "x") == pytest.approx(1 / old)


def test_a_tenant_of_poison_keeps_no_others_waiting(scripts: PartitionScripts) -> None:
    """Each of its messages crashes every worker: of each, one run more than turns, and no more."""
    rounds = 8
    fill(scripts, rounds + 4)
    scripts.push(*(f"x.{i:02d}" for i in range(rounds + 4)), tenant="x")
    runs = Counter[str]()
    others = 0
    while others < rounds * TENANTS:
        for entry in scripts.claim(3, max_deliveries=3).entries:
            if entry.id.startswith("x") and not entry.reason:
                runs[entry.id] += 1
                scripts.release(entry.tag, mode="crashed", max_deliveries=3)
            else:
                scripts.finish(entry.tag)
                others += not entry.reason
    assert sum(runs.values()) - len(runs) <= rounds + 1
    assert max(runs.values()) == 3


@pytest.mark.parametrize("want", [1, 3])
def test_others_do_not_wait_behind_tenants_that_are_passed_over(scripts: PartitionScripts, want: int) -> None:
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
