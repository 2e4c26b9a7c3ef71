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


def test_delayed_message_becomes_a_discard(scripts: PartitionScripts) -> None:
    scripts.push("a", due_us=scripts.now_us() + 60_000_000)
    assert cancel(scripts, "a") == ["delayed"]
    assert scripts.claim().entries[0].reason == "cancelled"


def test_the_last_message_of_a_tenant_takes_it_out_of_turn(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    cancel(scripts, "a")
    assert scripts.place("t") == "idle"


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


def test_without_tombstone(scripts: PartitionScripts) -> None:
    assert cancel(scripts, "a", tombstone_ttl_ms=0) == ["none"]
    assert scripts.left_over() == set()


def test_all_messages_of_a_task_are_cancelled(scripts: PartitionScripts) -> None:
    scripts.push("a")
    scripts.take()
    scripts.push("a", "a")
    scripts.push("a", due_us=scripts.now_us() + 60_000_000)
    assert cancel(scripts, "a") == ["claimed"]
    assert [e.id for e in scripts.claim(5).entries] == ["a~1", "a~2", "a~3"]


def test_same_task_twice_in_a_call(scripts: PartitionScripts) -> None:
    scripts.push("a")
    assert cancel(scripts, "a", "a") == ["waiting", "discarded"]
    assert len(scripts.take(5)) == 1


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


def test_discards_of_a_lost_consumer_are_delivered_again(scripts: PartitionScripts) -> None:
    scripts.push("a")
    cancel(scripts, "a")
    scripts.take()
    scripts.lose()
    scripts.reap()
    (entry,) = scripts.claim().entries
    assert (entry.id, entry.reason, entry.deliveries) == ("a", "cancelled", 1)


def test_settled_discard_is_not_delivered_again(scripts: PartitionScripts) -> None:
    scripts.push("a")
    cancel(scripts, "a")
    scripts.settle(scripts.claim().entries[0].tag)
    scripts.lose()
    scripts.reap()
    assert scripts.take() == []
    assert scripts.left_over() == {"leases"}


def test_all_messages_of_a_task_that_are_held_come_back_as_discards(scripts: PartitionScripts) -> None:
    scripts.push("a", "a", "b~1")
    tags = tags_of(scripts.claim(5).entries)
    assert cancel(scripts, "a", "b~1") == ["claimed", "claimed"]
    scripts.release(*tags, mode="requeue")
    assert [(e.id, e.reason) for e in scripts.claim(5).entries] == [
        ("a", "cancelled"),
        ("a~1", "cancelled"),
        ("b~~1", "cancelled"),
    ]


def test_expired_message_is_delivered_flagged(scripts: PartitionScripts) -> None:
    scripts.set_quota("t", 0.001, concurrency=1)
    scripts.push("a", tenant="t", expires_us=scripts.now_us() - 1)
    scripts.push("b", tenant="t", expires_us=scripts.now_us() + 60_000_000)
    claimed = scripts.claim(5)
    assert [(e.id, e.reason) for e in claimed.entries] == [("b", ""), ("a", "expired")]
    scripts.release(claimed.entries[1].tag, mode="requeue")
    assert [(e.id, e.reason) for e in scripts.claim(5).entries] == [("a", "expired")]
    assert scripts.slots("t") == 1


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
