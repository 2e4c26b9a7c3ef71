"""What others wrote into our keys, tenants that try to break out, unfit servers: life goes on."""

from __future__ import annotations

import json
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_dq.errors import DQError, InvalidMessage, InvalidTenant, ServerError
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.replies import Outgoing
from tests.broker.counter import Counter


def drained(counter: Counter, count: int, **options: Any) -> list[Any]:
    """What a fresh consumer gets; everything is acknowledged."""
    with counter.connect(**options) as connection, counter.consuming(connection) as got:
        counter.drain(connection, got, count)
        for message in got:
            message.ack()
        counter.drain_until(connection, lambda: True)
    return [message.payload for message in got]


def dead(counter: Counter) -> dict[str, str]:
    return {
        message_id.decode(): json.loads(info)["reason"]
        for message_id, info in counter.client.hgetall(counter.keys.dead_info).items()
    }


class TestForeignBytes:
    @pytest.mark.parametrize(
        "garbage",
        [
            b"",
            b"\x00",
            b"x",
            b"not a record at all, but long enough for a header",
            b"\xff" * 100,
            b"\x01\x63" + b"\0" * 40,
        ],
    )
    def test_in_the_place_of_a_record(self, counter: Counter, garbage: bytes) -> None:
        counter.publish("a", "b", "c")
        keys = counter.keys
        victim = counter.client.zrange(keys.tenant(""), 1, 1)[0]
        counter.client.hset(keys.messages, victim, garbage)
        assert drained(counter, 2) == ["a", "c"]
        wait_until(lambda: counter.depth() == 0, what=lambda: str(counter.client.hgetall(keys.messages)))
        if garbage not in (b"", b"\x00"):
            assert dead(counter) == {victim.decode(): "corrupt"}

    def test_a_good_header_over_a_bad_envelope(self, counter: Counter) -> None:
        counter.publish("a", "b")
        keys = counter.keys
        victim = counter.client.zrange(keys.tenant(""), 0, 0)[0]
        record = bytearray(counter.client.hget(keys.messages, victim))
        record[27:40] = b"\xff" * 13
        counter.client.hset(keys.messages, victim, bytes(record))
        assert drained(counter, 1) == ["b"]
        wait_until(lambda: counter.depth() == 0)
        assert list(dead(counter)) == [victim.decode()]
        assert dead(counter)[victim.decode()].startswith("unreadable")

    @pytest.mark.parametrize(
        "envelope", [b"[]", b"{}", b"null", b"[0,[],[]]", b"[0,{},{},1,2]", b'["a",{},{}]', b"[-1,{},{}]"]
    )
    def test_an_envelope_of_the_wrong_shape(self, counter: Counter, envelope: bytes) -> None:
        task = b"shop.tasks.notify"
        header = struct.pack(">BBBddHHI", 1, 0, 1, 0, 0, 0, len(task), len(envelope))
        record = header + task + envelope + b'"x"'
        counter.partition.push([Outgoing(0, "odd", record)]).run(counter.client)
        counter.publish("good")
        with counter.connect() as connection, counter.consuming(connection) as got:
            counter.drain_until(connection, lambda: any(message.message_id != "odd" for message in got))
            for message in got:
                message.ack()
            counter.drain_until(connection, lambda: counter.depth() == 0)

    @pytest.mark.parametrize(
        "envelope",
        [
            b'[0,[1],{},"application/json","utf-8"]',
            b'[0,"headers",{},"application/json","utf-8"]',
            b'[0,{},[1],"application/json","utf-8"]',
            b'[0,{},{"delivery_info":5},"application/json","utf-8"]',
            b"[0,{},{},{},[]]",
            b"[0," + b"[" * 100_000,
            b'[0,{"__type__":"uuid","__value__":{"hex":1}},{},"a","b"]',
            b'[1e400,{},{},"a","b"]',
        ],
        ids=lambda envelope: envelope[:40].decode(),
    )
    def test_an_envelope_whose_parts_are_not_what_they_should_be(
        self, counter: Counter, envelope: bytes
    ) -> None:
        task = b"shop.tasks.notify"
        header = struct.pack(">BBBddHHI", 1, 0, 1, 0, 0, 0, len(task), len(envelope))
        odd = Outgoing(0, "odd", header + task + envelope + b'"x"')
        with counter.connect() as connection, counter.consuming(connection) as got:
            # They come in one batch, and it is in the middle.
            first, last = f"first-{len(envelope)}", f"last-{len(envelope)}"
            counter.publish(first, connection=connection)
            counter.partition.push([odd]).run(counter.client)
            counter.publish(last, connection=connection)
            counter.drain_until(
                connection, lambda: {first, last} <= {m.payload for m in got if m.message_id != "odd"}, 30
            )
            for message in got:
                message.ack()
            counter.drain_until(connection, lambda: counter.depth() == 0, 30)

    def test_ids_without_records_are_passed_over(self, counter: Counter) -> None:
        counter.publish("a")
        counter.client.zadd(counter.keys.tenant(""), {f"ghost-{n}": n for n in range(300)})
        counter.publish("b")
        assert drained(counter, 2) == ["a", "b"]
        wait_until(lambda: not counter.client.exists(counter.keys.tenant("")))

    def test_in_the_wake_list(self, counter: Counter) -> None:
        counter.client.rpush(counter.keys.wake, b"\xff\x00", "garbage", "1" * 1000)
        counter.publish("a", "b")
        assert drained(counter, 2) == ["a", "b"]

    def test_a_tenant_in_turn_without_messages(self, counter: Counter) -> None:
        counter.client.zadd(counter.keys.turn, {f"nobody-{n}": 0 for n in range(100)})
        counter.publish("a")
        assert drained(counter, 1) == ["a"]

    def test_quotas_that_are_none(self, counter: Counter) -> None:
        for field in ("t:7", "default", "config"):
            counter.client.hset(counter.keys.quotas, field, b"\xff\x00garbage")
        counter.publish("a", tenant="7")
        assert drained(counter, 1) == ["a"]


HOSTILE = [
    "*",
    "?[a-z]",
    "{x}",
    "}{",
    "a:b",
    "t:7",
    "~",
    "'",
    '"',
    "\\",
    "ä" * 50,
    "\U0001f4a9",
    "..",
    "%2F",
    "0",
    "None",
]


class TestTenants:
    def test_hostile_ones_are_tenants_like_others(self, counter: Counter) -> None:
        with counter.connect() as connection:
            for tenant in HOSTILE:
                counter.publish(tenant, connection=connection, tenant=tenant)
            assert sorted(drained(counter, len(HOSTILE))) == sorted(HOSTILE)
        assert {key for key in counter.leftovers() if key.startswith("tenant:")} == set()

    @pytest.mark.parametrize("tenant", ["x" * 10_240, "a\nb", "a\0b", "\ud800", 17.5, b"bytes", ["list"]])
    def test_impossible_ones_are_refused(self, counter: Counter, tenant: Any) -> None:
        with counter.connect() as connection:
            with pytest.raises(InvalidTenant, match="tenant"):
                counter.publish("a", connection=connection, tenant=tenant)
            counter.publish("b", connection=connection)
        assert drained(counter, 1) == ["b"]

    @pytest.mark.parametrize("priority", [-1, 10, 255, "high", 1.5])
    def test_priorities_out_of_range_are_refused(self, counter: Counter, priority: Any) -> None:
        with counter.connect() as connection:
            with pytest.raises(DQError, match="priority"):
                counter.publish("a", connection=connection, priority=priority)
            counter.publish("b", connection=connection)
        assert drained(counter, 1) == ["b"]

    @pytest.mark.parametrize(
        "headers", [{"eta": "tomorrow"}, {"expires": "never"}, {"eta": 5}, {"id": "x" * 300}]
    )
    def test_headers_that_cannot_be_meant(self, counter: Counter, headers: dict[str, Any]) -> None:
        with counter.connect() as connection:
            with pytest.raises(InvalidMessage):
                counter.publish("a", connection=connection, headers=headers)
            counter.publish("b", connection=connection)
        assert drained(counter, 1) == ["b"]

    def test_task_ids_that_look_like_ours(self, counter: Counter) -> None:
        ids = ["a", "a~1", "a~~1", "~", "~1", "a", "a", "a~1"]
        with counter.connect() as connection:
            for n, task_id in enumerate(ids):
                counter.publish(n, connection=connection, headers={"id": task_id})
        assert drained(counter, len(ids)) == list(range(len(ids)))


class _OldRedis(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            if words[0].upper() == b"INFO":
                text = b"# Server\r\nredis_version:6.0.16\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"
                self.wfile.write(b"$%d\r\n%s\r\n" % (len(text), text))
            elif words[0].upper() == b"PING":
                self.wfile.write(b"+PONG\r\n")
            elif words[0].upper() == b"HELLO":
                self.wfile.write(b"%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n")
            else:
                self.wfile.write(b"+OK\r\n")

    def _word(self) -> bytes:
        length = int(self.rfile.readline()[1:])
        return self.rfile.read(length + 2)[:-2]


@contextmanager
def old_redis() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OldRedis) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class TestServers:
    def test_an_old_one_is_refused(self, counter: Counter) -> None:
        with (
            old_redis() as port,
            counter.connect(f"dq-redis://127.0.0.1:{port}/0") as connection,
            pytest.raises(ServerError, match=r"6\.0\.16.*needs Redis 6\.2"),
        ):
            connection.default_channel  # noqa: B018 - opens it

    def test_one_that_evicts_is_refused_unless_told(self) -> None:
        with RedisServer(config={"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}) as server:
            counter = Counter(server.url())
            with counter.connect() as connection, pytest.raises(ServerError, match="allkeys-lru"):
                connection.default_channel  # noqa: B018 - opens it
            with counter.connect(allow_eviction=True) as connection:
                counter.publish("a", connection=connection)
            assert drained(counter, 1, allow_eviction=True) == ["a"]
            counter.close()

    def test_a_full_one_refuses_messages_and_lets_workers_work(self) -> None:
        with RedisServer(config={"maxmemory-policy": "noeviction"}) as server:
            counter = Counter(server.url())
            with counter.connect() as connection:
                counter.publish(*range(300), connection=connection)
                with (
                    counter.connect(lease="1s", watchdog=0, claim_ahead="10ms") as other,
                    counter.consuming(other, prefetch=10) as got,
                ):
                    counter.drain(other, got, 1)
                    counter.client.config_set("maxmemory", 1)
                    with pytest.raises(Exception, match="OOM|maxmemory"):
                        counter.publish("too much", connection=connection)
                    seen = 0
                    while seen < 300:
                        counter.drain(other, got, seen + 1)
                        got[seen].ack()
                        seen += 1
                    assert [message.payload for message in got] == list(range(300))
                    counter.drain_until(other, lambda: counter.depth() == 0)
                counter.client.config_set("maxmemory", 0)
                counter.publish("again", connection=connection)
            assert drained(counter, 1) == ["again"]
            counter.close()

    def test_a_wrong_password_is_told_at_once(self) -> None:
        with RedisServer(config={"requirepass": "right"}) as server:
            counter = Counter(server.url())
            url = f"dq-redis://:wrong@127.0.0.1:{server.port}/0"
            with (
                counter.connect(url) as connection,
                pytest.raises(Exception, match=r"(?i)password|WRONGPASS"),
            ):
                connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            with (
                counter.connect(url) as connection,
                pytest.raises(OperationalError, match=r"(?i)password|WRONGPASS"),
            ):
                counter.publish(
                    "a",
                    connection=connection,
                    retry=True,
                    retry_policy={"max_retries": 1, "interval_start": 0},
                )
            counter.close()

    def test_a_replica_is_recoverable(self) -> None:
        with (
            RedisServer(config={"repl-diskless-sync-delay": 0}) as master,
            RedisServer(config={"replicaof": f"127.0.0.1 {master.port}"}) as replica,
        ):
            counter = Counter(replica.url())
            wait_until(lambda: "master_link_status:up" in str(replica.ask("INFO", "replication")), 30)
            with counter.connect() as connection:
                connection.ensure_connection(max_retries=1)
                with pytest.raises(connection.connection_errors) as caught:
                    counter.publish("a", connection=connection)
                assert "READONLY" in str(caught.value) or "read only" in str(caught.value)
                # It is promoted while kombu retries, which it does at once as long as it can connect.
                threading.Timer(0.3, lambda: replica.ask("REPLICAOF", "NO", "ONE")).start()
                counter.publish(
                    "b",
                    connection=connection,
                    retry=True,
                    retry_policy={
                        "max_retries": 100_000,
                        "interval_start": 0.02,
                        "interval_step": 0,
                        "interval_max": 0.02,
                    },
                )
            assert drained(counter, 1) == ["b"]
            counter.close()
