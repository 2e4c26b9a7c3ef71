from __future__ import annotations

from celery_dq.transport.partition_replies import ClaimedEntry
from tests.lua.partition_scripts import LEASE_MS, PartitionScripts, make_record, tags_of


def take(scripts: PartitionScripts, *ids: str) -> list[ClaimedEntry]:
    return scripts.partition.take("mover", ids, lease_ms=LEASE_MS).run(scripts.client)


def test_takes_waiting_messages_by_name(scripts: PartitionScripts) -> None:
    scripts.push("a", "b", "c", tenant="t")
    taken = take(scripts, "b", "none", "b")
    assert [(entry.id, entry.record) for entry in taken] == [("b", make_record("t"))]
    assert scripts.waiting("t") == ["a", "c"]
    assert scripts.slots("t") == 1
    assert scripts.finish(*tags_of(taken), consumer="mover") == 0
    assert scripts.slots("t") == 0
    assert scripts.state("held") == 0


def test_gives_them_back_to_their_old_places(scripts: PartitionScripts) -> None:
    later = scripts.now_us() + 60_000_000
    scripts.push("a", "b", "c", tenant="t")
    scripts.push("d", tenant="t", due_us=later)
    taken = take(scripts, "d", "c", "a")
    assert scripts.waiting("t") == ["b"]
    scripts.release(*tags_of(taken), mode="requeue", consumer="mover")
    assert scripts.waiting("t") == ["a", "b", "c"]
    assert scripts.client.zrange(scripts.keys.delayed, 0, -1, withscores=True) == [(b"d", later)]
    assert scripts.slots("t") == 0


def test_leaves_held_and_discarded_messages(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    scripts.take(1)
    scripts.partition.cancel(["b"]).run(scripts.client)
    assert take(scripts, "a", "b") == []


def test_the_last_message_takes_its_tenant_out_of_turn(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    scripts.finish(*tags_of(take(scripts, "a")), consumer="mover")
    assert scripts.left_over() - {"wake"} == {"leases"}
