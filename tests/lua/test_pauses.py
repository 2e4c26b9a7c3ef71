"""Pauses of a queue and of tenants, and their ends."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.testing.waiting import wait_until
from tests.lua.partition_scripts import HOUR_US, PartitionScripts, tags_of


def pause(scripts: PartitionScripts, tenant: str | None = None, **end: int) -> Any:
    return scripts.partition.pause(tenant, **end).run(scripts.client)


def resume(scripts: PartitionScripts, tenant: str | None = None) -> Any:
    return scripts.partition.resume(tenant).run(scripts.client)


def test_a_paused_queue_starts_nothing_and_wakes_no_consumer(scripts: PartitionScripts) -> None:
    scripts.push("a", "b", tenant="t")
    entries = scripts.claim().entries
    scripts.take_token()
    assert pause(scripts).changed
    claimed = scripts.claim(5)
    assert (claimed.entries, claimed.more, claimed.next_look_s) == ([], False, None)
    # Each of these looks at the line in its own way.
    scripts.push("c", tenant="u")
    scripts.push("d", "e", tenant="t")
    scripts.settle(*tags_of(entries))
    scripts.finish(*tags_of(entries))
    scripts.reap()
    assert scripts.partition.hand_over_wakeup().run(scripts.client) is False
    assert not scripts.token()
    assert scripts.claim(5).entries == []
    assert resume(scripts).changed
    assert scripts.take_token()
    assert sorted(scripts.take(9)) == ["b", "c", "d", "e"]
    assert not resume(scripts).changed


def test_a_pause_of_a_queue_ends_by_itself(scripts: PartitionScripts) -> None:
    scripts.push("a")
    scripts.take_token()
    reply = pause(scripts, for_us=300_000)
    assert reply.until_us - reply.since_us == 300_000
    assert scripts.take_token()  # a consumer has to plan the look at the end
    look_s = scripts.claim(5).next_look_s
    assert look_s is not None
    assert 0 < look_s <= 0.3
    scripts.push("b")
    assert not scripts.token()
    wait_until(lambda: scripts.now_us() > reply.until_us, 30)
    assert scripts.take(5) == ["a", "b"]
    assert scripts.state("paused_until") == 0  # plain messages take the short paths again


def test_a_delayed_message_and_a_permit_wait_for_the_end_of_the_pause(scripts: PartitionScripts) -> None:
    scripts.set_quota("t", 100)
    scripts.push("a", "b", tenant="t")
    scripts.take()
    until = pause(scripts, for_us=HOUR_US).until_us
    scripts.push("c", due_us=scripts.now_us() + 1_000)
    scripts.take_token()
    look_s = scripts.claim(5).next_look_s
    assert look_s is not None
    assert abs(scripts.now_us() + look_s * 1e6 - until) < HOUR_US / 60
    resume(scripts)
    assert wait_until(lambda: scripts.take(5), 30)


def test_a_pause_is_prolonged_and_keeps_its_begin(scripts: PartitionScripts) -> None:
    for tenant in (None, "t"):
        first = pause(scripts, tenant, for_us=HOUR_US)
        later = pause(scripts, tenant, until_us=first.until_us + 1)
        assert (later.changed, later.since_us, later.until_us) == (True, first.since_us, first.until_us + 1)
        assert not pause(scripts, tenant, until_us=later.until_us).changed
        for_ever = pause(scripts, tenant)
        assert (for_ever.changed, for_ever.since_us, for_ever.until_us) == (True, first.since_us, 0)
        assert pause(scripts, tenant, until_us=first.since_us) == "over"
        assert resume(scripts, tenant).changed
    assert scripts.left_over() <= {"wake"}


def test_pauses_of_tenants_end_one_after_the_other(scripts: PartitionScripts) -> None:
    for tenant in ("s", "t", "u"):
        scripts.push(tenant, tenant=tenant)
    pause(scripts, "u", for_us=HOUR_US)
    pause(scripts, "t", for_us=200_000)
    pause(scripts, "s")
    look_s = scripts.claim(5).next_look_s
    assert look_s is not None
    assert look_s <= 0.2
    assert wait_until(lambda: scripts.take(5), 30) == ["t"]
    assert [scripts.place(each) for each in ("s", "t", "u")] == ["paused", "idle", "paused"]
    look_s = scripts.claim(5).next_look_s
    assert look_s is not None
    assert look_s > 60
    assert scripts.client.zrange(scripts.keys.pauses, 0, -1) == [b"u", b"s"]


def test_a_heartbeat_ends_the_pause_of_a_tenant_without_messages(scripts: PartitionScripts) -> None:
    until_us = pause(scripts, "t", for_us=1_000).until_us
    wait_until(lambda: scripts.now_us() > until_us, 30)
    scripts.reap()
    assert scripts.left_over() <= {"leases", "wake"}


def test_a_heartbeat_of_an_empty_queue_keeps_the_look_at_the_end_of_its_pause(
    scripts: PartitionScripts,
) -> None:
    pause(scripts, for_us=HOUR_US)
    assert scripts.claim(5).next_look_s is not None
    scripts.reap()
    assert scripts.client.hget(scripts.keys.state, "next_look_owner") == b"c1"


def test_a_pause_that_is_over_gives_the_next_one_no_begin(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    over = pause(scripts, "t", for_us=1)
    # No claim has seen the end.
    assert scripts.place("t") == "paused"
    later = pause(scripts, "t", for_us=HOUR_US)
    assert later.changed
    assert later.since_us > over.since_us
    resume(scripts, "t")
    pause(scripts, "t", for_us=1)
    assert not resume(scripts, "t").changed
    assert scripts.take(5) == ["a"]


@pytest.mark.parametrize("args", [("queues", "", 1, 0), ("queue", "", 2, 0), ("queue", "", 1, -1)])
def test_an_unknown_argument_is_refused(scripts: PartitionScripts, args: tuple[Any, ...]) -> None:
    call = scripts.partition._call("pause", (*args, 0, "1"), list)
    with pytest.raises(Exception, match="DQINVALID pause"):
        call.run(scripts.client)
