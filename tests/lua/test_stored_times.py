"""The times that the scripts store, read back under a clock that the test sets; and steps of this clock.

A failover to a host whose clock is behind or ahead makes such a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import Partition
from tests.lua.partition_scripts import PartitionScripts, make_keyed_record, make_quota
from tests.lua.test_plain import at_a_fixed_time

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
#: Seconds of the clock of these scripts at its time 0.
START_US = 1_700_000_000 * SECOND_US


class Clock:
    """The clock of the server, which the test sets. It begins at two hours."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.us = 0
        self.step(2 * HOUR_US)

    def step(self, by_us: int) -> None:
        self.us += by_us
        self._client.set("clock", self.us)

    @property
    def now_us(self) -> int:
        return START_US + self.us


@pytest.fixture
def clock(client: Any) -> Clock:
    return Clock(client)


@pytest.fixture
def scripts(client: Any, clock: Clock) -> PartitionScripts:
    scripts = PartitionScripts(client)
    scripts.partition = Partition(scripts.keys, at_a_fixed_time(True))
    return scripts


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("step_us", [-HOUR_US, -20 * SECOND_US, HOUR_US])
def test_a_step_keeps_no_tenant_waiting(
    scripts: PartitionScripts, clock: Clock, burst: int, step_us: int
) -> None:
    tenants = [f"t{n}" for n in range(150)]  # a heartbeat looks at 100
    for tenant in tenants:
        scripts.set_quota(tenant, 1, burst=burst)
        scripts.push(*(f"{tenant}-{n}" for n in range(9)), tenant=tenant)
    assert len(scripts.take(1000)) == burst * len(tenants)
    # A tenant without backlog has an arrival time only.
    scripts.set_quota("idle", 1, burst=burst)
    scripts.push("idle", tenant="idle")
    assert scripts.take(10) == ["idle"]
    scripts.reap("c1")
    clock.step(step_us)
    for _ in range(3):
        scripts.reap("c1")
    arrivals = dict(scripts.client.zrange(scripts.keys.limiter, 0, -1, withscores=True))
    assert max(arrivals.values(), default=0) <= clock.now_us + burst * SECOND_US
    assert scripts.client.zcount(scripts.keys.throttled, clock.now_us + SECOND_US + 1, "+inf") == 0
    clock.step(SECOND_US)
    taken = scripts.take(1000) + scripts.take(1000)  # a claim promotes 128
    assert len(taken) == (burst if step_us > 0 else 1) * len(tenants)
    scripts.push("idle-2", tenant="idle")
    assert scripts.take(10) == ["idle-2"]


def test_a_slow_tenant_keeps_its_permit_through_a_step(scripts: PartitionScripts, clock: Clock) -> None:
    """One message a day, and a step back by a minute: the tenant waits a day, and is served once a day."""
    scripts.set_quota("slow", 1 / 65536)  # about a day, a number without a rounding error
    day_us = 65536 * SECOND_US
    scripts.push("a", "b", tenant="slow")
    assert scripts.take(5) == ["a"]
    scripts.reap("c1")
    clock.step(-60 * SECOND_US)
    scripts.reap("c1")
    assert scripts.client.zscore(scripts.keys.throttled, "slow") == clock.now_us + day_us
    clock.step(day_us - 1)
    assert scripts.take(5) == []
    clock.step(1)
    assert scripts.take(5) == ["b"]


@pytest.mark.parametrize("tenant", ["t", None])
@pytest.mark.parametrize("end", ["for_us", "until_us"])
def test_a_pause_that_a_step_has_made_longer_can_be_shortened(
    scripts: PartitionScripts, clock: Clock, tenant: str | None, end: str
) -> None:
    scripts.push("a", tenant="t")
    scripts.partition.pause(tenant, for_us=60 * SECOND_US).run(scripts.client)
    clock.step(-HOUR_US)
    ends = SECOND_US if end == "for_us" else clock.now_us + SECOND_US
    reply: Any = scripts.partition.pause(tenant, **{end: ends}).run(scripts.client)
    assert (reply.changed, reply.until_us) == (True, clock.now_us + SECOND_US)
    stored = scripts.client.zscore(scripts.keys.pause_ends, "t") if tenant else scripts.state("paused_until")
    assert stored == clock.now_us + SECOND_US
    assert scripts.take(5) == []
    clock.step(SECOND_US)
    assert scripts.take(5) == ["a"]


def keyed(scripts: PartitionScripts, task_id: str, key: str, timeout_us: int) -> None:
    record = make_keyed_record("", key, "", 0, timeout_us=timeout_us)
    scripts.partition.push([OutgoingRecord(0, task_id, record)]).run(scripts.client)


class Stored(NamedTuple):
    """A duration that a caller gives, and where a script stores its end."""

    name: str
    call: Callable[[PartitionScripts, Clock], Any]
    end: Callable[[PartitionScripts], Any]
    lasts_us: int


def counted(scripts: PartitionScripts, clock: Clock) -> None:
    """A countdown of a minute, of a publisher whose clock is an hour ahead."""
    wall_us = clock.now_us + HOUR_US
    record = MessageRecord("", "task", 0, wall_us + 60 * SECOND_US, 0, b"{}", b"[]", counted=True).pack()
    scripts.partition.push([OutgoingRecord(0, "a", record)], wall_us=wall_us).run(scripts.client)


def later(scripts: PartitionScripts, clock: Clock) -> None:
    scripts.push("a", due_us=clock.now_us + HOUR_US)
    scripts.partition.edit("a", for_us=2 * SECOND_US).run(scripts.client)


def overtaken(scripts: PartitionScripts, clock: Clock) -> None:
    """A key with a timeout of 3 s, whose head runs and has a tail."""
    keyed(scripts, "head", "k", 3 * SECOND_US)
    scripts.take()
    keyed(scripts, "tail", "k", HOUR_US)


def score(key: str, member: str) -> Callable[[PartitionScripts], Any]:
    return lambda scripts: scripts.client.zscore(getattr(scripts.keys, key), member)


STORED = (
    # The first is what a revoke of Celery leaves of a task that has not arrived: three hours.
    Stored(
        "revoke", lambda s, _: s.partition.cancel(["a"]).run(s.client), score("tombstones", "a"), 3 * HOUR_US
    ),
    Stored(
        "tombstone",
        lambda s, _: s.partition.cancel(["a"], tombstone_ttl_ms=1_500).run(s.client),
        score("tombstones", "a"),
        1_500_000,
    ),
    Stored("claim", lambda s, _: s.claim(lease_ms=15_000), score("leases", "c1"), 15 * SECOND_US),
    Stored(
        "heartbeat",
        lambda s, _: s.partition.heartbeat("c1", lease_ms=15_000).run(s.client),
        score("leases", "c1"),
        15 * SECOND_US,
    ),
    Stored(
        "pause of a tenant",
        lambda s, _: s.partition.pause("t", for_us=900 * SECOND_US).run(s.client),
        score("pause_ends", "t"),
        900 * SECOND_US,
    ),
    Stored(
        "pause of the queue",
        lambda s, _: s.partition.pause(None, for_us=900 * SECOND_US).run(s.client),
        lambda s: s.state("paused_until"),
        900 * SECOND_US,
    ),
    Stored("countdown", counted, score("delayed", "a"), 60 * SECOND_US),
    Stored("edit", later, score("delayed", "a"), 2 * SECOND_US),
    Stored("timeout of a key", overtaken, score("evictions", "0:k"), 3 * SECOND_US),
)


@pytest.mark.parametrize("stored", STORED, ids=lambda each: each.name)
def test_a_stored_time_is_now_and_the_duration_of_the_call(
    scripts: PartitionScripts, clock: Clock, stored: Stored
) -> None:
    """A slip of a unit is a thousandfold: three hours become eleven seconds."""
    stored.call(scripts, clock)
    assert stored.end(scripts) == clock.now_us + stored.lasts_us


@pytest.mark.parametrize("first", ["soon", "late"])
def test_the_earliest_of_two_deadlines_of_keys_is_kept(
    scripts: PartitionScripts, clock: Clock, first: str
) -> None:
    timeouts = {"soon": 200_000, "late": HOUR_US}
    heads = sorted(timeouts, key=lambda key: key != first)
    for key in heads:
        keyed(scripts, f"head of {key}", key, timeouts[key])
    scripts.take(5)
    for key in heads:
        keyed(scripts, f"tail of {key}", key, timeouts[key])
    scripts.take_token()
    claimed = scripts.claim(5)
    assert (claimed.entries, claimed.next_look_s) == ([], 0.2)
    clock.step(200_000)
    claimed = scripts.claim(5)
    assert [entry.id for entry in claimed.entries] == ["tail of soon"]
    # Of the two that are left, the one of an hour is due.
    assert scripts.state("evict") == clock.now_us - 200_000 + HOUR_US


def test_settings_that_were_replaced_are_older_for_ten_minutes(
    scripts: PartitionScripts, clock: Clock
) -> None:
    memory_ms, old, new = 600_000, make_quota(1), make_quota(2)

    def bring(packed: bytes) -> str:
        call = scripts.partition.bring_settings_quota(packed, by="w", memory_ms=memory_ms)
        return str(call.run(scripts.client)[0])

    assert [bring(old), bring(new)] == ["set", "set"]
    assert 590_000 < scripts.client.pttl(scripts.keys.config_before) <= memory_ms
    clock.step(600 * SECOND_US - 1)
    assert bring(old) == "older"
    clock.step(1)
    assert bring(old) == "set"


def test_a_heartbeat_keeps_the_tags_that_virtual_time_has_not_reached(scripts: PartitionScripts) -> None:
    """A tenant that was served comes back in its turn, and not before the others."""
    scripts.set_quota("heavy", weight=0.1, concurrency=9)
    scripts.push("heavy-1", tenant="heavy")
    scripts.push("a", "b", "c", tenant="light")
    assert "heavy-1" in scripts.take(2)
    tag = scripts.client.zscore(scripts.keys.finish_tags, "heavy")
    assert tag is not None
    assert tag > scripts.state("v")
    scripts.reap("c1")
    assert scripts.client.zscore(scripts.keys.finish_tags, "heavy") == tag
    scripts.push("heavy-2", tenant="heavy")
    assert scripts.take(3) == ["b", "c", "heavy-2"]
