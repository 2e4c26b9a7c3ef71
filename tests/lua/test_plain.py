"""Plain messages take short paths through the scripts, which leave the same data as the general rules."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest

from celery_dq.keys import PartitionKeys
from celery_dq.scripts.loader import Script, ScriptSet
from celery_dq.transport.partition_replies import DeliveryTag, OutgoingRecord
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import ScriptCall, load_scripts
from tests.lua.partition_scripts import PartitionScripts, make_keyed_record, make_quota, make_record, tags_of

#: Script -> (text, the same without a short path). A short path begins before the first write.
SHORT_PATHS = {
    "push": [
        (
            "  local priority, due, _, length, flags = read_header(record)\n",
            "  if true then return nil end\n  local priority, due, _, length, flags = read_header(record)\n",
        )
    ],
    "claim": [
        ("  if (epoch or '0') ~= '0' or (evict", "  if true or (evict"),
        ("behind = are_finished_too(10),", "behind = false,"),
    ],
    "ack": [
        ("if others == in_turn and #members == 0", "if false and #members == 0"),
        ("settles = are_finished_too(2)", "settles = false"),
    ],
}
CLOCK = ("local clock = call('TIME')", "local clock = {'1700000000', call('GET', 'clock') or '5'}")
#: The quotas that tenants get in a life with limits.
QUOTAS = (
    make_quota(rate=100_000, burst=3),
    make_quota(rate=1_000_000, burst=1000, weight=3),
    make_quota(concurrency=1),
    make_quota(rate=300_000, burst=20, concurrency=3, weight=0.5),
    make_quota(weight=3),
    make_quota(paused=True),
    make_quota(max_waiting=1),
    make_quota(max_waiting=2, when_full="discard"),
    None,
)


class FixedClock(ScriptSet):
    """The scripts at the time of the key ``clock``, so that two partitions get the same data.

    Args:
        short: whether they have their short paths.
    """

    def __init__(self, short: bool) -> None:
        scripts = load_scripts()
        self.update({name: self._fixed(script, short) for name, script in scripts.items()})

    @staticmethod
    def _fixed(script: Script, short: bool) -> Script:
        source = script.source.replace(*CLOCK)
        for text, without in () if short else SHORT_PATHS.get(script.name, ()):
            assert source.count(text) == 1, script.name
            source = source.replace(text, without)
        return dataclasses.replace(script, source=source)


def contents(client: Any, keys: PartitionKeys) -> dict[str, Any]:
    """Return all data of a partition."""
    readers = {
        b"hash": client.hgetall,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"list": lambda key: client.lrange(key, 0, -1),
        b"string": client.get,
    }
    found = {}
    for key in client.scan_iter(f"{keys.prefix}*"):
        found[key.decode().removeprefix(keys.prefix)] = readers[client.type(key)](key)
    # A text of a number has many forms.
    texts = ("next_look_owner", "leader", "waits_alone", "waits_in_line", "claim_window")
    state = {name.decode(): value for name, value in found.pop("state", {}).items()}
    found["state"] = {
        name: value if name in texts else float(value)
        for name, value in state.items()
        if value not in (b"", b"0")
    }
    return found


@functools.lru_cache
def at_a_fixed_time(short: bool) -> ScriptSet:
    return FixedClock(short)


class Life:
    """A random life of a partition, made of the same steps for each pair of partition and seed."""

    def __init__(self, seed: int, partition: Partition, client: Any, *, has: str) -> None:
        self._random = random.Random(seed)
        self._partition, self._client = partition, client
        self._limit_steps = (self._limit, self._pass_time, self._pass_time) if has == "limits" else ()
        self._sets = ("any_of(a,b)", "any_of(b,c)") if has == "sets" else ()
        self._now = 5
        self._sequence = 0
        self._held: list[DeliveryTag] = []

    def step(self) -> Any:
        step = self._random.choice(
            (
                self._push,
                self._push,
                self._push,
                self._claim,
                self._claim,
                self._settle,
                self._finish,
                self._finish,
                self._settle_and_finish,
                self._take_wakeup,
                *(self._limit_steps or (self._rare,)),
            )
        )
        return step()

    def _run(self, call: Any) -> Any:
        return call.run(self._client)

    def _push(self) -> Any:
        pick = self._random
        self._sequence += pick.choice((0, 1, 1, 1, 1))
        late = pick.choice((0, 0, 0, 0, 2))
        tenant, task = pick.choice(("", "a", "b", *self._sets)), f"m{pick.randrange(40)}"
        record = make_record(
            tenant, priority=pick.choice((0, 0, 3, 9)), expires_us=pick.choice((0, 0, 0, 10, 8 * 10**15))
        )
        head_start_us = pick.choice((10**6, 10**6, 10**6, 5))
        producer = pick.choice(("", "p"))
        return self._run(
            self._partition.push(
                [OutgoingRecord(max(self._sequence - late, 0), task, record)],
                producer=producer,
                head_start_us=head_start_us,
            )
        )

    def _claim(self) -> Any:
        pick = self._random
        ended = [tag for tag in self._held if pick.random() < 0.3]
        settle = [tag for tag in self._held if pick.random() < 0.2]
        reply = self._run(
            self._partition.claim(
                "c",
                lease_ms=60_000,
                want=pick.choice((1, 2, 4)),
                free=pick.choice((4, 4, 1, 0)),
                discards=pick.choice((0, 4)),
                settle=ended if ended and pick.random() < 0.3 else settle,
                finish=ended,
            )
        )
        self._held = [tag for tag in self._held if tag not in ended] + tags_of(reply.entries)
        return reply

    def _limit(self) -> Any:
        pick = self._random
        if pick.random() < 0.2:
            return self._rare()
        tenant, quota = pick.choice(("", "a", "b", None)), pick.choice(QUOTAS)
        if tenant is None:
            return self._run(self._partition.set_default_quota(quota))
        return self._run(self._partition.set_quota(tenant, quota))

    def _pass_time(self) -> Any:
        self._now += self._random.choice((1, 7, 40, 200_000))
        return self._client.set("clock", self._now)

    def _take_wakeup(self) -> Any:
        return self._client.lpop(self._partition.keys.wake)

    def _settle(self) -> Any:
        return self._run(self._partition.ack("c", settle=self._held[:2]))

    def _finish(self) -> Any:
        done, self._held = self._held[:1], self._held[1:]
        if done and self._random.random() < 0.3:
            stale = [*done, ("1", "unknown")]
            return self._run(self._partition.ack("c", settle=stale, finish=stale))
        stale = [("1", "unknown")] if self._random.random() < 0.1 else []
        return self._run(self._partition.ack("c", finish=done + stale))

    def _settle_and_finish(self) -> Any:
        done, settle = self._held[:2], self._held[1:3]
        self._held = self._held[2:]
        return self._run(self._partition.ack("c", settle=settle, finish=done))

    def _rare(self) -> Any:
        pick = self._random
        partition = self._partition
        return self._run(
            pick.choice(
                (
                    partition.release("c", self._held[-1:], mode="unstarted"),
                    partition.cancel([f"m{pick.randrange(40)}"]),
                    partition.heartbeat("c", lease_ms=60_000),
                    partition.hand_over_wakeup("c"),
                    partition.push(
                        [OutgoingRecord(0, "later", make_record("a", due_us=pick.choice((1, 2 * 10**15))))]
                    ),
                    partition.push([OutgoingRecord(0, "keyed", make_keyed_record("a", "k", "", 0))]),
                    partition.push([OutgoingRecord(0, f"x{n}", make_record("a")) for n in range(3)]),
                    partition.set_quota(
                        "b", pick.choice((None, make_quota(concurrency=1), make_quota(weight=3)))
                    ),
                )
            )
        )


@pytest.mark.parametrize("has", ["neither", "limits", "sets"])
@pytest.mark.parametrize("seed", range(15))
def test_short_paths_leave_the_same_data_as_the_general_rules(client: Any, seed: int, has: str) -> None:
    lives = []
    for short in (True, False):
        keys = PartitionKeys("online", f"short{short}")
        partition = Partition(keys, at_a_fixed_time(short))
        lives.append((Life(seed, partition, client, has=has), keys))
    for _ in range(40 if has == "neither" else 80):
        replies = [life.step() for life, _ in lives]
        assert replies[0] == replies[1]
        found = [contents(client, keys) for _, keys in lives]
        differing = [key for key in {**found[0], **found[1]} if found[0].get(key) != found[1].get(key)]
        assert differing == [], [[each.get(key) for each in found] for key in differing]


def test_a_plain_message_costs_few_commands(scripts: PartitionScripts) -> None:
    record = make_record("t")
    scripts.take()
    scripts.partition.ack("c1").run(scripts.client)
    scripts.push("first", tenant="other")
    scripts.take(5)
    scripts.push("second", tenant="other")
    both = [scripts.claim().entries[0].tag]
    scripts.client.config_resetstat()
    costs = {}
    calls: dict[str, ScriptCall[Any]] = {
        "push": scripts.partition.push([OutgoingRecord(1, "m", record)], producer="p"),
        "claim": scripts.partition.claim("c1", lease_ms=60_000, want=4),
        "settle": scripts.partition.ack("c1", settle=[("3", "m")]),
        "finish": scripts.partition.ack("c1", finish=[("3", "m")]),
        "settle and finish": scripts.partition.ack("c1", settle=both, finish=both),
    }
    for name, call in calls.items():
        scripts.client.config_resetstat()
        call.run(scripts.client)
        # EVALSHA and the commands of the script; CONFIG and INFO are counted, too.
        stats = scripts.client.info("commandstats")
        costs[name] = sum(
            each["calls"] for key, each in stats.items() if "config" not in key and "info" not in key
        )
    assert costs == {"push": 10, "claim": 16, "settle": 6, "finish": 9, "settle and finish": 9}
