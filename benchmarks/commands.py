"""The cost of a message in commands, round trips and bytes of memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import redis
from kombu import Producer
from redis.connection import AbstractConnection

from benchmarks.measure import Report, ServerProbe, benchmark, interleave
from benchmarks.postbox import Sink, connect, publish_many, publish_one, warm_up
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import ACTIVE


@benchmark(
    "broker | consume: commands/msg | consume: trips/msg | publish: commands/msg | publish: trips/msg"
    " | which",
    """
    commands: lines of MONITOR that a client sent, those inside scripts ('lua') left out
    trips: writes of a redis-py connection to its socket (a pipeline is one)
    publish: one by one, without batching; consume: backlog, an ack for each, prefetch 100
    """,
)
def commands(report: Report, quick: bool) -> None:
    """Client commands and round trips per message under load."""
    amount = 500 if quick else 3_000
    for name in ACTIVE:
        with RedisServer() as server, connect(name, server.port) as connection:
            warm_up(connection)
            producer = Producer(connection.channel())
            with _counting(server.port) as published:
                for number in range(amount):
                    publish_one(producer, f"t{number % 10}")
            with Sink(connection) as sink, _counting(server.port) as consumed:
                sink.drain(amount, 60)
        which = ", ".join(f"{word} {count / amount:.2f}" for word, count in consumed.words.most_common(6))
        figures = {
            "consume commands": consumed.words.total() / amount,
            "consume trips": consumed.trips / amount,
            "publish commands": published.words.total() / amount,
            "publish trips": published.trips / amount,
        }
        report.row(name, *(f"{value:.2f}" for value in figures.values()), which)
        report.data[name] = {**figures, "consume": dict(consumed.words), "publish": dict(published.words)}


class Count:
    """The traffic during a count."""

    def __init__(self) -> None:
        self.words: Counter[str] = Counter()
        self.trips = 0


@contextmanager
def _counting(port: int) -> Iterator[Count]:
    """Count the commands by MONITOR in the server, and the round trips at the client's socket."""
    count = Count()
    ended = threading.Event()
    client: Any = redis.Redis(port=port, socket_timeout=None)

    def listen() -> None:
        with client.monitor() as monitor:
            listening.set()
            for line in monitor.listen():
                word = str(line["command"]).split(" ", 1)[0].upper()
                if line["client_type"] == "lua":
                    continue
                if "end-of-count" in str(line["command"]):
                    ended.set()
                    return
                count.words[word] += 1

    listening = threading.Event()
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    listening.wait(5)
    connections: Any = AbstractConnection
    original = connections.send_packed_command

    def send_packed_command(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.trips += 1
        return original(self, *args, **kwargs)

    connections.send_packed_command = send_packed_command
    try:
        yield count
    finally:
        connections.send_packed_command = original
        with redis.Redis(port=port) as marker:
            wait_until(lambda: marker.echo("end-of-count") and ended.wait(0.2), 10)
        thread.join(5)
        client.close()


@benchmark("shape | broker | bytes/message | vs stock")
def memory(report: Report, quick: bool) -> None:
    """Bytes per waiting message: deep tenants, and one message for each tenant."""
    shapes = {"1,000 tenants x 100": (1_000, 100), "100,000 tenants x 1": (100_000, 1)}
    if quick:
        shapes = {"100 tenants x 100": (100, 100), "10,000 tenants x 1": (10_000, 1)}
    for shape, (tenants, each) in shapes.items():
        found = interleave(ACTIVE, 2, partial(_fill, tenants, each), 60)
        report.compare(found, "stock", "bytes | vs bytes", shape)


def _fill(tenants: int, each: int, broker: str) -> dict[str, float]:
    with (
        RedisServer() as server,
        connect(broker, server.port) as connection,
        closing(ServerProbe(server.port)) as probe,
    ):
        warm_up(connection)
        before = probe.bytes_used()
        publish_many(connection, (f"t{number}" for _ in range(each) for number in range(tenants)))
        return {"bytes": (probe.bytes_used() - before) / (tenants * each)}
