from __future__ import annotations

from typing import Any

from tests.lua.desk import Desk, make_record, tags_of


def cancel(desk: Desk, *ids: str, **options: Any) -> list[str]:
    return list(desk.partition.cancel(ids, **options).run(desk.client))


def test_waiting_message_becomes_a_discard(desk: Desk) -> None:
    desk.set_quota("t", 0.001, concurrency=1)
    desk.push("a", "b", tenant="t")
    assert cancel(desk, "b", reason="revoked") == ["waiting"]
    assert cancel(desk, "b") == ["discarded"]
    claimed = desk.claim(5)
    assert [(e.id, e.reason, e.record) for e in claimed.entries] == [
        ("b", "revoked", make_record("t")),
        ("a", "", make_record("t")),
    ]
    assert desk.slots("t") == 1
    desk.finish(*tags_of(claimed.entries))
    assert desk.left_over() == {"leases", "quotas", "limiter"}


def test_delayed_message_becomes_a_discard(desk: Desk) -> None:
    desk.push("a", due_us=desk.now_us() + 60_000_000)
    assert cancel(desk, "a") == ["delayed"]
    assert desk.claim().entries[0].reason == "cancelled"


def test_the_last_message_of_a_tenant_takes_it_out_of_turn(desk: Desk) -> None:
    desk.push("a", tenant="t")
    cancel(desk, "a")
    assert desk.place("t") == "idle"


def test_claimed_message_comes_back_as_a_discard(desk: Desk) -> None:
    desk.push("a", "b")
    tags = tags_of(desk.claim(2).entries)
    assert cancel(desk, "a", "b") == ["claimed", "claimed"]
    desk.release(tags[0], mode="requeue")
    desk.lose()
    desk.reap()
    assert [(e.id, e.reason) for e in desk.claim(5).entries] == [("a", "cancelled"), ("b", "cancelled")]


def test_message_that_comes_later_becomes_a_discard(desk: Desk) -> None:
    assert cancel(desk, "a") == ["tombstone"]
    assert desk.push("a")[0][:2] == ("discarded", "a")
    assert desk.push("a")[0][:2] == ("discarded", "a~1")
    assert [e.reason for e in desk.claim(5).entries] == ["cancelled", "cancelled"]


def test_tombstone_expires(desk: Desk) -> None:
    cancel(desk, "a")
    desk.client.zadd(desk.keys.tombstones, {"a": 1})
    assert desk.push("a")[0].status == "accepted"


def test_without_tombstone(desk: Desk) -> None:
    assert cancel(desk, "a", tombstone_ttl_ms=0) == ["none"]
    assert desk.left_over() == set()


def test_all_messages_of_a_task_are_cancelled(desk: Desk) -> None:
    desk.push("a")
    desk.take()
    desk.push("a", "a")
    desk.push("a", due_us=desk.now_us() + 60_000_000)
    assert cancel(desk, "a") == ["claimed"]
    assert [e.id for e in desk.claim(5).entries] == ["a~1", "a~2", "a~3"]


def test_same_task_twice_in_a_call(desk: Desk) -> None:
    desk.push("a")
    assert cancel(desk, "a", "a") == ["waiting", "discarded"]
    assert len(desk.take(5)) == 1


def test_tenant_in_chunks(desk: Desk) -> None:
    desk.push("a", "b", "c", tenant="t")
    desk.push("x", tenant="u")
    assert desk.partition.cancel_tenant("t", limit=2).run(desk.client) == (2, 1)
    assert desk.partition.cancel_tenant("t", limit=2).run(desk.client) == (1, 0)
    assert desk.partition.cancel_tenant("t", limit=2).run(desk.client) == (0, 0)
    assert [(e.id, e.reason) for e in desk.claim(5).entries] == [
        ("a", "cancelled"),
        ("b", "cancelled"),
        ("c", "cancelled"),
        ("x", ""),
    ]


def test_discards_of_a_lost_consumer_are_delivered_again(desk: Desk) -> None:
    desk.push("a")
    cancel(desk, "a")
    desk.take()
    desk.lose()
    desk.reap()
    (entry,) = desk.claim().entries
    assert (entry.id, entry.reason, entry.deliveries) == ("a", "cancelled", 1)


def test_settled_discard_is_not_delivered_again(desk: Desk) -> None:
    desk.push("a")
    cancel(desk, "a")
    desk.settle(desk.claim().entries[0].tag)
    desk.lose()
    desk.reap()
    assert desk.take() == []
    assert desk.left_over() == {"leases"}


def test_expired_message_is_delivered_flagged(desk: Desk) -> None:
    desk.set_quota("t", 0.001, concurrency=1)
    desk.push("a", tenant="t", expires_us=desk.now_us() - 1)
    desk.push("b", tenant="t", expires_us=desk.now_us() + 60_000_000)
    claimed = desk.claim(5)
    assert [(e.id, e.reason) for e in claimed.entries] == [("a", "expired"), ("b", "")]
    desk.release(claimed.entries[0].tag, mode="requeue")
    assert [(e.id, e.reason) for e in desk.claim(5).entries] == [("a", "expired")]
    assert desk.slots("t") == 1


def test_purge_leaves_what_is_held(desk: Desk) -> None:
    desk.push("held")
    tag = desk.claim().entries[0].tag
    desk.set_quota("parked", paused=True)
    for tenant in ("", "t", "parked"):
        desk.push(*(f"{tenant}{i}" for i in range(5)), tenant=tenant)
    desk.push("later", due_us=desk.now_us() + 60_000_000)
    cancel(desk, "t1")
    removed, more = 0, True
    while more:
        purged = desk.partition.purge(limit=4).run(desk.client)
        assert purged.removed <= 4
        removed, more = removed + purged.removed, purged.more
    assert removed == 16
    assert desk.finish(tag) == 0
    assert desk.left_over() - {"wake"} == {"leases", "quotas"}


def test_locate(desk: Desk) -> None:
    def where(task_id: str) -> dict[str, str]:
        found = desk.partition.locate(task_id).run(desk.client)
        for each in ("now_us", "since_us", "due_us"):
            if each in found:
                assert abs(float(found.pop(each)) - desk.now_us()) < 120e6
        return found

    assert where("a") == {}
    desk.push("a", "b", tenant="t")
    desk.push("d", tenant="t", due_us=desk.now_us() + 60_000_000)
    assert where("b") == {"state": "waiting", "ahead": "1", "id": "b", "tenant": "t", "deliveries": "0"}
    assert where("d") == {"state": "delayed", "id": "d", "tenant": "t", "deliveries": "0"}
    tags = tags_of(desk.claim(2).entries)
    claimed = {"state": "claimed", "consumer": "c1", "id": "a", "tenant": "t", "deliveries": "0"}
    assert where("a") == claimed
    desk.settle(tags[0])
    assert where("a") == {**claimed, "state": "settled"}
    desk.partition.dead_letter("c1", tags[1], reason="r", worker="w").run(desk.client)
    assert where("b") == {"state": "dead", "id": "b"}
    cancel(desk, "d", "x")
    assert where("d")["state"] == "discarded"
    assert where("x") == {"state": "cancelled", "id": "x"}
