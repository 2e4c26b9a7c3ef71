from __future__ import annotations

from celery_dq.transport.redis.replies import ClaimedEntry
from tests.lua.desk import LEASE_MS, Desk, make_record, tags_of


def take(desk: Desk, *ids: str) -> list[ClaimedEntry]:
    return desk.partition.take("mover", ids, lease_ms=LEASE_MS).run(desk.client)


def test_takes_waiting_messages_by_name(desk: Desk) -> None:
    desk.push("a", "b", "c", tenant="t")
    taken = take(desk, "b", "none", "b")
    assert [(entry.id, entry.record) for entry in taken] == [("b", make_record("t"))]
    assert desk.waiting("t") == ["a", "c"]
    assert desk.slots("t") == 1
    assert desk.finish(*tags_of(taken), consumer="mover") == 0
    assert desk.slots("t") == 0
    assert desk.state("held") == 0


def test_gives_them_back_to_their_old_places(desk: Desk) -> None:
    later = desk.now_us() + 60_000_000
    desk.push("a", "b", "c", tenant="t")
    desk.push("d", tenant="t", due_us=later)
    taken = take(desk, "d", "c", "a")
    assert desk.waiting("t") == ["b"]
    desk.release(*tags_of(taken), mode="requeue", consumer="mover")
    assert desk.waiting("t") == ["a", "b", "c"]
    assert desk.client.zrange(desk.keys.delayed, 0, -1, withscores=True) == [(b"d", later)]
    assert desk.slots("t") == 0


def test_leaves_what_is_held_or_discarded(desk: Desk) -> None:
    desk.push("a", "b")
    desk.take(1)
    desk.partition.cancel(["b"]).run(desk.client)
    assert take(desk, "a", "b") == []


def test_the_last_message_takes_its_tenant_out_of_turn(desk: Desk) -> None:
    desk.push("a", tenant="t")
    desk.finish(*tags_of(take(desk, "a")), consumer="mover")
    assert desk.left_over() - {"wake"} == {"leases"}
