from __future__ import annotations

from typing import Any

from tests.lua.partition_scripts import PartitionScripts, make_record, tags_of


def cancel(scripts: PartitionScripts, *ids: str, **options: Any) -> list[str]:
    return list(scripts.partition.cancel(ids, **options).run(scripts.client))


def test_waiting_message_becomes_a_discard(scripts: PartitionScripts) -> None:
    scripts.set_quota("t", 0.001, concurrency=1)
    scripts.push("a", "b", tenant="t")
    assert cancel(scripts, "b", reason="revoked") == ["waiting"]
    assert cancel(scripts, "b") == ["discarded"]
    claimed = scripts.claim(5)
    assert [(e.id, e.reason, e.record) for e in claimed.entries] == [
        ("a", "", make_record("t")),
        ("b", "revoked", make_record("t")),
    ]
    assert scripts.slots("t") == 1
    scripts.finish(*tags_of(claimed.entries))
    assert scripts.left_over() == {"leases", "quotas", "quota_info", "limiter"}


def test_claimed_message_comes_back_as_a_discard(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    tags = tags_of(scripts.claim(2).entries)
    assert cancel(scripts, "a", "b") == ["claimed", "claimed"]
    scripts.release(tags[0], mode="requeue")
    scripts.lose()
    scripts.reap()
    assert [(e.id, e.reason) for e in scripts.claim(5).entries] == [("a", "cancelled"), ("b", "cancelled")]


def test_message_that_comes_later_becomes_a_discard(scripts: PartitionScripts) -> None:
    assert cancel(scripts, "a") == ["tombstone"]
    assert scripts.push("a")[0][:2] == ("discarded", "a")
    assert scripts.push("a")[0][:2] == ("discarded", "a~1")
    assert [e.reason for e in scripts.claim(5).entries] == ["cancelled", "cancelled"]


def test_tombstone_expires(scripts: PartitionScripts) -> None:
    cancel(scripts, "a")
    scripts.client.zadd(scripts.keys.tombstones, {"a": 1})
    assert scripts.push("a")[0].status == "accepted"


def test_same_task_twice_in_a_call(scripts: PartitionScripts) -> None:
    scripts.push("a")
    assert cancel(scripts, "a", "a") == ["waiting", "discarded"]
    assert len(scripts.take(5)) == 1


def test_settled_discard_is_not_delivered_again(scripts: PartitionScripts) -> None:
    scripts.push("a")
    cancel(scripts, "a")
    scripts.settle(scripts.claim().entries[0].tag)
    scripts.lose()
    scripts.reap()
    assert scripts.take() == []
    assert scripts.left_over() == {"leases"}


def test_tenant_in_chunks(scripts: PartitionScripts) -> None:
    scripts.push("a", "b", "c", tenant="t")
    scripts.push("x", tenant="u")
    assert scripts.partition.cancel_tenant("t", limit=2).run(scripts.client) == (2, 1)
    assert scripts.partition.cancel_tenant("t", limit=2).run(scripts.client) == (1, 0)
    assert scripts.partition.cancel_tenant("t", limit=2).run(scripts.client) == (0, 0)
    assert [(e.id, e.reason) for e in scripts.claim(5).entries] == [
        ("x", ""),
        ("a", "cancelled"),
        ("b", "cancelled"),
        ("c", "cancelled"),
    ]


def test_purge_leaves_held_messages(scripts: PartitionScripts) -> None:
    scripts.push("held")
    tag = scripts.claim().entries[0].tag
    scripts.set_quota("paused", paused=True)
    for tenant in ("", "t", "paused"):
        scripts.push(*(f"{tenant}{i}" for i in range(5)), tenant=tenant)
    scripts.push("later", due_us=scripts.now_us() + 60_000_000)
    cancel(scripts, "t1")
    removed, more = 0, True
    while more:
        purged = scripts.partition.purge(limit=4).run(scripts.client)
        assert purged.removed <= 4
        removed, more = removed + purged.removed, purged.more
    assert removed == 16
    assert scripts.finish(tag) == 0
    assert scripts.left_over() - {"wake"} == {"leases", "quotas", "quota_info"}


def test_locate(scripts: PartitionScripts) -> None:
    def where(task_id: str) -> dict[str, str]:
        found = scripts.partition.locate(task_id).run(scripts.client)
        for each in ("now_us", "since_us", "due_us"):
            if each in found:
                assert abs(float(found.pop(each)) - scripts.now_us()) < 120e6
        return found

    assert where("a") == {}
    scripts.push("a", "b", tenant="t")
    scripts.push("d", tenant="t", due_us=scripts.now_us() + 60_000_000)
    assert where("b") == {"state": "waiting", "ahead": "1", "id": "b", "tenant": "t", "deliveries": "0"}
    assert where("d") == {"state": "delayed", "id": "d", "tenant": "t", "deliveries": "0"}
    tags = tags_of(scripts.claim(2).entries)
    claimed = {"state": "claimed", "consumer": "c1", "id": "a", "tenant": "t", "deliveries": "0"}
    assert where("a") == claimed
    scripts.settle(tags[0])
    assert where("a") == {**claimed, "state": "settled"}
    scripts.partition.dead_letter("c1", tags[1], reason="r", worker="w").run(scripts.client)
    assert where("b") == {"state": "dead", "id": "b"}
    cancel(scripts, "d", "x")
    assert where("d")["state"] == "discarded"
    assert where("x") == {"state": "cancelled", "id": "x"}
