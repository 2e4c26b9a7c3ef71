"""The time that Redis needs for one call of each script."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis

from benchmarks.measure import Report, benchmark, dump, interleave, ratio
from celery_dq.keys import PartitionKeys
from celery_dq.scripts import ScriptSet
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.partition_replies import ClaimReply, OutgoingRecord
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import ScriptCall, load_scripts

STOCK = "stock LPUSH"
WAYS = {"alone": False, "piped": True}
#: How many partitions take turns. Each is an idle queue.
PARTITIONS = 32
BATCH = 100


@benchmark(
    "call | µs, one at a time | vs LPUSH | µs, pipelined | vs LPUSH",
    f"""
    µs: INFO commandstats of EVALSHA, in which the commands of the script are contained
    single: each message is pushed when the one before it has ended
    quota: its tenant has a rate and a concurrency limit
    batch: µs per message, {BATCH} messages of {BATCH} tenants a call
    """,
)
def script_calls(report: Report, quick: bool) -> None:
    """Microseconds in Redis per script call, for single messages at an idle worker and for full batches."""
    rounds, repeats = (2, 3) if quick else (9, 20)
    with RedisServer() as server:
        measure = partial(times_of_calls, server.port, load_scripts(), repeats)
        found = interleave(list(WAYS), rounds, lambda way: measure(pipelined=WAYS[way]), 120)
    alone, piped = found["alone"], found["piped"]
    for call in alone:
        against = [ratio(times[call], times[STOCK]) for times in (alone, piped)]
        report.row(call, alone[call], against[0], piped[call], against[1])
    report.data = dump(found)


def times_of_calls(port: int, scripts: ScriptSet, repeats: int, *, pipelined: bool) -> dict[str, float]:
    """Measure the script calls of messages' lives. The server is empty afterwards.

    Args:
        port: the port of the server.
        scripts: the scripts to measure.
        repeats: how many messages each partition gets, one after another.
        pipelined: whether the calls of all partitions are sent together, else one at a time.

    Returns:
        Name of the call -> µs per call, or per message of a batch.
    """
    with redis.Redis(port=port, socket_timeout=None) as client:
        client.flushall()
        for name in scripts.names():
            client.script_load(scripts[name].source)
        clock = ServerClock(client, pipelined)
        lives = [Lives(clock, scripts, kind) for kind in ("single", "quota")]
        batch = partitions_of(scripts, "batch", 1)
        for repeat in range(repeats + 1):
            clock.time(STOCK, [("LPUSH", f"queue{n}", _record(0)) for n in range(PARTITIONS)])
            for each in lives:
                each.live(f"m{repeat}")
            push_and_claim_batches(clock, batch, f"b{repeat}")
            if repeat == 0:
                # The first calls meet empty keys.
                clock.forget()
        found = clock.averages()
        client.flushall()
    return found


class ServerClock:
    """Sends calls and sums up the time that they take in the server, by name."""

    def __init__(self, client: Any, pipelined: bool) -> None:
        self._client = client
        self._pipelined = pipelined
        self.forget()

    def forget(self) -> None:
        self._spent: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def averages(self) -> dict[str, float]:
        return {name: self._spent[name] / count for name, count in self._counts.items()}

    def time(self, name: str, commands: Sequence[Sequence[Any]], per_call: int = 1) -> list[Any]:
        """Send commands that are all alike; return their raw replies."""
        self._client.config_resetstat()
        replies = self.send(commands)
        stats = self._client.info("commandstats")[f"cmdstat_{str(commands[0][0]).lower()}"]
        self._spent[name] = self._spent.get(name, 0.0) + float(stats["usec"])
        self._counts[name] = self._counts.get(name, 0) + int(stats["calls"]) * per_call
        return replies

    def send(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if not self._pipelined:
            return [self._client.execute_command(*command) for command in commands]
        with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(pipe.execute())


class Lives:
    """The lives of single messages, one in each of some idle partitions.

    Args:
        clock: measures the calls.
        scripts: the scripts to measure.
        kind: ``single``, or ``quota`` for tenants with a quota.
        queue: how the names of the partitions' queues begin.
    """

    def __init__(self, clock: ServerClock, scripts: ScriptSet, kind: str, queue: str = "") -> None:
        self._clock = clock
        self._kind = kind
        self._partitions = partitions_of(scripts, queue or kind, PARTITIONS)
        self._sequence = 0
        if kind == "quota":
            # A permit per µs, because no call is to be delayed.
            quota = struct.pack(">ddddBIB", 1.0, 100.0, 1.0, 10.0, 0, 0, 0)
            clock.send([each.set_quota("tenant0", quota).command() for each in self._partitions])

    def live(self, message: str) -> None:
        self._push(message)
        tags = self._claim()
        self._time("settle", lambda each, n: each.ack("c", settle=tags[n]))
        self._time("finish", lambda each, n: each.ack("c", finish=tags[n]))
        self._push(f"{message}r")
        tags = self._claim()
        self._time("release", lambda each, n: each.release("c", tags[n], mode="unstarted"))
        tags = self._claim("claim a released one")
        # The end of one message rides with the beginning of another.
        self._time("settle and finish", lambda each, n: each.ack("c", settle=tags[n], finish=tags[n]))
        self._push(f"{message}s")
        tags = self._claim()
        # The ack of a short task rides with the next claim, which finds nothing here.
        self._time(
            "claim nothing, finish one",
            lambda each, n: each.claim("c", lease_ms=60_000, want=4, hold=False, finish=tags[n]),
        )
        self._time("heartbeat", lambda each, _: each.heartbeat("c", lease_ms=60_000))
        self._time("hand_over_wakeup", lambda each, _: each.hand_over_wakeup("c"))

    def _push(self, message: str) -> None:
        self._sequence += 1
        records = [OutgoingRecord(self._sequence, message, _record(0))]
        self._time("push", lambda each, _: each.push(records, producer="p"))

    def _claim(self, name: str = "claim") -> list[list[tuple[str, str]]]:
        self._clock.send([("LPOP", each.keys.wake) for each in self._partitions])
        return list(
            map(_tags, self._time(name, lambda each, _: each.claim("c", lease_ms=60_000, want=4, hold=False)))
        )

    def _time(self, name: str, call: Callable[[Partition, int], ScriptCall[Any]]) -> list[Any]:
        """Send the call of each partition, by its number; return the replies."""
        calls = [call(each, number) for number, each in enumerate(self._partitions)]
        replies = self._clock.time(f"{name}, {self._kind}", [each.command() for each in calls])
        return [each.parse(reply) for each, reply in zip(calls, replies, strict=True)]


def push_and_claim_batches(clock: ServerClock, partitions: Sequence[Partition], message: str) -> None:
    (partition,) = partitions
    records = [OutgoingRecord(0, f"{message}-{n}", _record(n)) for n in range(BATCH)]
    clock.time("push, batch", [partition.push(records).command()], BATCH)
    call = partition.claim("c", lease_ms=60_000, want=BATCH)
    (reply,) = clock.time("claim, batch", [call.command()], BATCH)
    tags = _tags(call.parse(reply))
    clock.time("settle, batch", [partition.ack("c", settle=tags).command()], BATCH)
    clock.time("finish, batch", [partition.ack("c", finish=tags).command()], BATCH)


def partitions_of(scripts: ScriptSet, queue: str, count: int) -> list[Partition]:
    return [Partition(PartitionKeys("online", f"{queue}{n}"), scripts) for n in range(count)]


def _record(tenant: int) -> bytes:
    parts = (b"tenant%d" % tenant, b"shop.tasks.notify", b"{}" * 150)
    header = struct.pack(">BBBddHHI", 1, 0, 0, 0.0, 0.0, *map(len, parts))
    return header + b"".join(parts) + b"[]" * 20


def _tags(reply: ClaimReply) -> list[tuple[str, str]]:
    return [entry.tag for entry in reply.entries]
