"""Messages as no publisher should send them: each is one valid task with one part replaced.

``python -m tests.hostile_messages`` sends all of them to a worker of each pool, on each broker.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import struct
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from kombu import Connection, Producer

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.brokers import BROKERS
from tests.conformance.celery_app import CeleryApp

#: Values of a type that its decoder cannot read, or whose value cannot be used as others can.
TYPED: Mapping[str, Any] = {
    "a decimal that is none": {"__type__": "decimal", "__value__": "abc"},
    "a decimal of a list": {"__type__": "decimal", "__value__": [1, [2], 3]},
    "a signaling NaN": {"__type__": "decimal", "__value__": "sNaN"},
    "a uuid that is none": {"__type__": "uuid", "__value__": {"hex": "z"}},
    "a uuid of parts": {"__type__": "uuid", "__value__": {"bytes": "x"}},
    "a time that is none": {"__type__": "datetime", "__value__": "never"},
    "a time of a number": {"__type__": "datetime", "__value__": 1e308},
    "a date": {"__type__": "date", "__value__": "2024-02-29"},
    "bytes of a list": {"__type__": "bytes", "__value__": []},
    "base64 that is none": {"__type__": "base64", "__value__": "x"},
    "bytes": {"__type__": "base64", "__value__": "/w=="},
    "an unknown type": {"__type__": "bogus", "__value__": 1},
    "a type that is a list": {"__type__": [], "__value__": 1},
}
PLAIN: Mapping[str, Any] = {
    "nothing": None,
    "a number": 5,
    "a negative number": -1,
    "a huge number": 10**400,
    "infinity": float("inf"),
    "not a number": float("nan"),
    "true": True,
    "a text": "x",
    "an empty text": "",
    "half a pair": "\ud800",
    "control characters": "\x1b]0;x\x07\r\n\x00",
    "a long text": "x" * 10_000,
    "a list": [1],
    "an empty list": [],
    "a dict": {"a": 1},
    "a dict of dicts": {"": {"": {}}},
}


def deep(levels: int) -> Any:
    """A list in a list …"""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


VALUES: Mapping[str, Any] = {**TYPED, **PLAIN, "a depth": deep(400)}

#: The headers of Celery's second protocol, and those that the package reads.
HEADERS = (
    *("argsrepr", "compression", "dq_claim", "dq_deliveries", "dq_follows", "dq_queue"),
    *("dq_resource", "dq_token", "eta", "expires", "group", "group_index", "id", "ignore_result"),
    *("kwargsrepr", "lang", "meth", "origin", "parent_id", "redelivered"),
    *("replaced_task_nesting", "retries", "root_id", "shadow", "stamped_headers", "stamps"),
    *("task", "timelimit", "traceparent", "x"),
)
PROPERTIES = ("correlation_id", "delivery_info", "reply_to", "delivery_mode", "x", "message_id")

BODIES: Mapping[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'"\xff"',
    "a number": b"1",
    "null": b"null",
    "a dict": b'{"task": 1}',
    "two parts": b"[[], {}]",
    "four parts": b"[[], {}, {}, {}]",
    "arguments of wrong types": b'["ab", [1], 5]',
    "an embed that is a text": b'[[1, 1], {}, "x"]',
    "callbacks that are numbers": b'[[1, 1], {}, {"callbacks": 5, "errbacks": 5, "chain": 5, "chord": 5}]',
    "callbacks of numbers": b'[[1, 1], {}, {"callbacks": [5], "errbacks": [5], "chain": [5], "chord": 5}]',
    "a decimal that is none": b'[[{"__type__": "decimal", "__value__": "abc"}, 1], {}, {}]',
    "a depth": b"[" * 100_000,
    "keys that are no names": b'[[], {"": 1, "x y": 2, "\\ud800": 3}, {}]',
}


#: What another program may publish where kombu's Redis transport expects a broadcast.
BROADCASTS: tuple[bytes, ...] = (
    b"{",
    b"\xff",
    b"5",
    b"{}",
    b'{"properties": 5}',
    b"[" * 100_000,
    b'{"x": {"__type__": "decimal", "__value__": "abc"}}',
    *(
        json.dumps(
            {
                "body": body,
                "headers": {"clock": "x", "compression": 5},
                "content-type": "application/json",
                "content-encoding": "utf-8",
                "properties": {"delivery_tag": "x", "delivery_info": {"exchange": "celery.pidbox"}},
            }
        ).encode()
        for body in ("{", "5", 5, '{"method": 5}', '{"method": "ping", "reply_to": 5}')
    ),
)


def task_headers(name: str, **changes: Any) -> dict[str, Any]:
    """The headers of a call without arguments of its own."""
    task_id = uuid.uuid4().hex
    return {
        "lang": "py",
        "task": name,
        "id": task_id,
        "root_id": task_id,
        "parent_id": None,
        "group": None,
        "retries": 0,
        "timelimit": [None, None],
        "argsrepr": "()",
        "kwargsrepr": "{}",
        "origin": "test",
        **changes,
    }


def publish(connection: Connection, queue: str, name: str, *, body: bytes = b"", **options: Any) -> None:
    """Publish a task with these headers and properties."""
    headers, missing = task_headers(name, **options.pop("headers", {})), options.pop("without", None)
    Producer(connection.default_channel).publish(
        body or json.dumps([[1, 1], {}, {}]).encode(),
        routing_key=queue,
        serializer=None,
        content_type="application/json",
        content_encoding="utf-8",
        headers={key: value for key, value in headers.items() if key != missing},
        correlation_id=options.pop("correlation_id", uuid.uuid4().hex),
        **options,
    )


def raw_records() -> Mapping[str, bytes]:
    """Stored records that no publisher of ours has packed."""
    task, envelope, body = b"notify", b'[0,{"id":"r","task":"notify"},{},"application/json","utf-8"]', b"[]"

    def packed(
        due: float = 0, expires: float = 0, priority: int = 0, tenant: bytes = b"a", size: int = len(envelope)
    ) -> bytes:
        head = struct.pack(">BBBddHHI", 1, priority, 1, due, expires, len(tenant), len(task), size)
        return head + tenant + task + envelope + body

    times = {"infinity": math.inf, "no number": math.nan, "the past": -1e18, "the far future": 1e17}
    return {
        **{f"due in {name}": packed(due=time) for name, time in times.items()},
        **{f"expires in {name}": packed(expires=time) for name, time in times.items()},
        "a priority beyond the scale": packed(priority=200),
        "a tenant that is no text": packed(tenant=b"\xff\xfe"),
        "a tenant of control characters": packed(tenant=b"\x1b[2J\n"),
        "an envelope that is cut short": packed(size=20),
        "an envelope that is too long": packed(size=10**6),
        "nothing": b"",
        "noise": bytes(range(256)),
    }


def every_kind() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each header and property with each value, and each body: some 1,100 kinds with their descriptions."""
    for name in HEADERS:
        yield from ((f"header {name}: {what}", {"headers": {name: value}}) for what, value in VALUES.items())
    for name in PROPERTIES:
        yield from ((f"property {name}: {what}", {name: value}) for what, value in VALUES.items())
    yield from ((f"body: {what}", {"body": body}) for what, body in BODIES.items())
    yield from ((f"no header {name}", {"without": name}) for name in task_headers(""))


def some_kinds(step: int = 17) -> Iterator[tuple[str, dict[str, Any]]]:
    """All unreadable values, all bodies, and every so many of the other kinds."""
    for number, (what, options) in enumerate(every_kind()):
        if (
            number % step == 0
            or what.startswith(("body", "header shadow", "no header"))
            or what.removeprefix("header x: ") in TYPED
        ):
            yield what, options


def publish_kinds(
    connection: Connection, queue: str, name: str, kinds: Iterator[tuple[str, dict[str, Any]]], **options: Any
) -> dict[str, str]:
    """Publish a task of each kind; return the task id and the kind of those that are not refused."""
    sent = {}
    for number, (what, kind) in enumerate(kinds):
        headers = {"id": f"hostile-{number}", **options.get("headers", {}), **kind.get("headers", {})}
        with suppress(Exception):  # the publisher refuses some
            publish(connection, queue, name, **{**options, **kind, "headers": headers})
            sent[f"hostile-{number}"] = what
    return sent


def main() -> int:
    """Send all kinds to a worker of each pool; return 1 when one ended, or stopped to work."""
    parser = argparse.ArgumentParser(description="python -m tests.hostile_messages")
    parser.add_argument("--brokers", nargs="+", default=["dq", "zookeeper", "sqlite"])
    parser.add_argument("--pools", nargs="+", default=["solo", "threads", "prefork", "gevent", "eventlet"])
    parser.add_argument("--step", type=int, default=1, help="Send only every so many of the kinds.")
    given, faults = parser.parse_args(), 0
    for name, pool in itertools.product(given.brokers, given.pools):
        broker = BROKERS[name]
        broker.prepare()
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(RedisServer())
            own = stack.enter_context(ZooKeeperServer(tick_ms=200)) if broker.server == "zookeeper" else None
            app = CeleryApp(broker, server, broker_port=(own or server).port)
            stack.callback(app.close)
            found = list(_ended_by(app, pool, itertools.islice(every_kind(), 0, None, given.step)))
        for kinds in found:
            print(f"{name}, {pool}: the worker ended, or did not work any more, after {kinds}")
        print(f"{name}, {pool}: {len(found)} faults", flush=True)
        faults += len(found)
    return 1 if faults else 0


def _ended_by(app: CeleryApp, pool: str, kinds: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[list[str]]:
    """Yield the kinds of each chunk that a worker has not survived."""
    worker = app.worker(pool).start()
    try:
        while chunk := list(itertools.islice(kinds, 50)):
            lost = worker.log.count("Connection to broker lost")
            with app.app.connection_for_write() as connection:
                sent = publish_kinds(connection, app.queue, "add", iter(chunk))
            try:
                assert app.send("add", 2, 3).get(timeout=60) == 5
                assert worker.alive
                assert worker.log.count("Connection to broker lost") == lost
            except Exception:
                yield list(sent.values())
                worker.discard()
                app.purge()
                worker = app.worker(pool).start()
    finally:
        worker.discard()


if __name__ == "__main__":
    raise SystemExit(main())
