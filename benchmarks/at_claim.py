"""Consumers that call the scripts directly and record the server's time of each claim.

The clock of a consumer shows only when a message arrived. Answers wait in sockets while the consumer is busy,
so two batches may arrive closer together than they were claimed. The promise of a quota is about the claims.
"""

from __future__ import annotations

import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import redis

from celery_dq.keys import PartitionKeys
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts

#: Longest pause between two claims in seconds, because these consumers receive no wake-ups.
PATIENCE = 0.02
#: Packed form of an in-flight message: claim number, score, claimed at, flags, charge; then the tenant.
_HELD = struct.Struct(">dddBd")


class Moment(NamedTuple):
    """One claimed message."""

    #: In microseconds, by the clock of the server.
    at_us: int
    tenant: str


def read_held(entry: bytes) -> tuple[float, Moment]:
    """Return score, claim time and tenant of an entry of the hash ``held:<consumer>``."""
    _, score, at_us, _, _ = _HELD.unpack(entry[: _HELD.size])
    return score, Moment(int(at_us), entry[_HELD.size :].decode())


def claim_for(
    port: int, queue: str, seconds: float, *, consumers: int = 4, want: int = 20
) -> list[list[Moment]]:
    """Claim and finish for `seconds`; return the messages of each consumer."""
    end, stop = time.monotonic() + seconds, threading.Event()
    partition = Partition(PartitionKeys("online", queue), load_scripts())
    # All threads need the scripts, and one loads them.
    with redis.Redis(port=port, socket_timeout=None) as client:
        partition.claim("loader", lease_ms=1000, want=0).run(client)

    def consume(number: int) -> list[Moment]:
        with redis.Redis(port=port, socket_timeout=None) as client:
            return _consume(client, partition, f"consumer-{number}", want, end, stop)

    with ThreadPoolExecutor(consumers) as threads:
        return list(threads.map(consume, range(consumers)))


def keep_house(port: int, queue: str, heartbeats: int) -> None:
    """Do the maintenance of a worker's heartbeat, one chunk per call."""
    partition = Partition(PartitionKeys("online", queue), load_scripts())
    with redis.Redis(port=port, socket_timeout=None) as client:
        for _ in range(heartbeats):
            partition.heartbeat("heartbeat", lease_ms=1000, limit=1000).run(client)
        partition.resign("heartbeat").run(client)


def _consume(
    client: redis.Redis, partition: Partition, consumer: str, want: int, end: float, stop: threading.Event
) -> list[Moment]:
    pipe: Any
    moments: list[Moment] = []
    done: list[tuple[str, str]] = []
    while time.monotonic() < end:
        call = partition.claim(consumer, lease_ms=60_000, want=want, hold=True, finish=done)
        # In one transaction, so that no other command is between the two times, and only this claim is in
        # flight.
        with client.pipeline(transaction=True) as pipe:
            pipe.time()
            pipe.execute_command(*call.command())
            pipe.hgetall(partition.keys.held(consumer))
            pipe.time()
            before, reply, held, after = pipe.execute()
        claimed = call.parse(reply)
        done = [(entry.claim, entry.id) for entry in claimed.entries]
        found = [read_held(entry)[1] for entry in held.values()]
        if len(found) != len(done) or not all(_us(before) <= at_us <= _us(after) for at_us, _ in found):
            raise RuntimeError(f"the claim reports {found}, the server that it was from {before} to {after}")
        moments += found
        if not found:
            delay = PATIENCE if claimed.next_look_s is None else claimed.next_look_s
            stop.wait(max(0.0, min(delay, PATIENCE, end - time.monotonic())))
    # The last claim may have been answered after the end of the measurement.
    partition.ack(consumer, finish=done).run(client)
    return moments


def _us(moment: tuple[int, int]) -> int:
    return moment[0] * 1_000_000 + moment[1]
