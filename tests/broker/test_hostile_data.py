"""Foreign bytes in the broker's keys, hostile names of tenants, unfit servers: valid messages still run."""

from __future__ import annotations

import json
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_dq.errors import InvalidMessage, InvalidPriority, InvalidTenant, ServerError
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.partition_replies import OutgoingRecord
from tests.broker.kombu_client import KombuClient


def drained(kombu_client: KombuClient, count: int, **options: Any) -> list[Any]:
    """Return the bodies that a new consumer receives and acknowledges."""
    with kombu_client.connect(**options) as connection, kombu_client.consuming(connection) as got:
        kombu_client.drain(connection, got, count)
        for message in got:
            message.ack()
        kombu_client.drain_until(connection, lambda: True)
    return [message.payload for message in got]


def dead(kombu_client: KombuClient) -> dict[str, str]:
    return {
        message_id.decode(): json.loads(info)["reason"]
        for message_id, info in kombu_client.client.hgetall(kombu_client.keys.dead_info).items()
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
    def test_in_the_place_of_a_record(self, kombu_client: KombuClient, garbage: bytes) -> None:
        kombu_client.publish("a", "b", "c")
        keys = kombu_client.keys
        victim = kombu_client.client.zrange(keys.tenant(""), 1, 1)[0]
        kombu_client.client.hset(keys.messages, victim, garbage)
        assert drained(kombu_client, 2) == ["a", "c"]
        wait_until(
            lambda: kombu_client.depth() == 0, what=lambda: str(kombu_client.client.hgetall(keys.messages))
        )
        if garbage not in (b"", b"\x00"):
            assert dead(kombu_client) == {victim.decode(): "corrupt"}

    def test_a_good_header_over_a_bad_envelope(self, kombu_client: KombuClient) -> None:
        kombu_client.publish("a", "b")
        keys = kombu_client.keys
        victim = kombu_client.client.zrange(keys.tenant(""), 0, 0)[0]
        record = bytearray(kombu_client.client.hget(keys.messages, victim))
        record[27:40] = b"\xff" * 13
        kombu_client.client.hset(keys.messages, victim, bytes(record))
        assert drained(kombu_client, 1) == ["b"]
        wait_until(lambda: kombu_client.depth() == 0)
        assert list(dead(kombu_client)) == [victim.decode()]
        assert dead(kombu_client)[victim.decode()].startswith("unreadable")

    @pytest.mark.parametrize(
        "envelope",
        [
            *(b"[]", b"{}", b"null", b"[0,[],[]]", b"[0,{},{},1,2]", b'["a",{},{}]', b"[-1,{},{}]"),
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
    def test_an_envelope_of_the_wrong_shape_or_types(
        self, kombu_client: KombuClient, envelope: bytes
    ) -> None:
        task = b"shop.tasks.notify"
        header = struct.pack(">BBBddHHI", 1, 0, 1, 0, 0, 0, len(task), len(envelope))
        odd = OutgoingRecord(0, "odd", header + task + envelope + b'"x"')
        with kombu_client.connect() as connection, kombu_client.consuming(connection) as got:
            # All three messages come in one batch, with the odd one in the middle.
            first, last = f"first-{len(envelope)}", f"last-{len(envelope)}"
            kombu_client.publish(first, connection=connection)
            kombu_client.partition.push([odd]).run(kombu_client.client)
            kombu_client.publish(last, connection=connection)
            kombu_client.drain_until(
                connection, lambda: {first, last} <= {m.payload for m in got if m.message_id != "odd"}, 30
            )
            for message in got:
                message.ack()
            kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0, 30)

    def test_ids_without_records_are_passed_over(self, kombu_client: KombuClient) -> None:
        kombu_client.publish("a")
        kombu_client.client.zadd(kombu_client.keys.tenant(""), {f"ghost-{n}": n for n in range(300)})
        kombu_client.publish("b")
        assert drained(kombu_client, 2) == ["a", "b"]
        wait_until(lambda: not kombu_client.client.exists(kombu_client.keys.tenant("")))

    def test_a_record_that_has_vanished_is_counted(self, kombu_client: KombuClient) -> None:
        # Messages in line, and one that is alone in it.
        kombu_client.publish("a", "b", "c")
        kombu_client.publish("alone", tenant="7")
        client, keys = kombu_client.client, kombu_client.keys
        alone = client.hget(keys.single, "7")[8:]
        assert client.hdel(keys.messages, client.zrange(keys.tenant(""), 1, 1)[0], alone) == 2
        assert drained(kombu_client, 2) == ["a", "c"]
        assert int(client.hget(keys.state, "dropped")) == 2

    def test_in_the_wake_list(self, kombu_client: KombuClient) -> None:
        kombu_client.client.rpush(kombu_client.keys.wake, b"\xff\x00", "garbage", "1" * 1000)
        kombu_client.publish("a", "b")
        assert drained(kombu_client, 2) == ["a", "b"]

    def test_a_tenant_in_turn_without_messages(self, kombu_client: KombuClient) -> None:
        kombu_client.client.zadd(kombu_client.keys.turn, {f"absent-{n}": 0 for n in range(100)})
        kombu_client.publish("a")
        assert drained(kombu_client, 1) == ["a"]

    def test_quotas_that_are_none(self, kombu_client: KombuClient) -> None:
        for field in ("t:7", "default", "config"):
            kombu_client.client.hset(kombu_client.keys.quotas, field, b"\xff\x00garbage")
        kombu_client.publish("a", tenant="7")
        assert drained(kombu_client, 1) == ["a"]


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
    def test_hostile_names_are_accepted(self, kombu_client: KombuClient) -> None:
        with kombu_client.connect() as connection:
            for tenant in HOSTILE:
                kombu_client.publish(tenant, connection=connection, tenant=tenant)
            assert sorted(drained(kombu_client, len(HOSTILE))) == sorted(HOSTILE)
        assert {key for key in kombu_client.leftovers() if key.startswith("tenant:")} == set()

    @pytest.mark.parametrize(
        ("error", "options"),
        [
            *(
                (InvalidTenant, {"tenant": each})
                for each in ("x" * 10_240, "a\nb", "a\0b", "\ud800", 17.5, b"bytes", ["list"])
            ),
            *((InvalidPriority, {"priority": each}) for each in (-1, 10, 255, "high", 1.5)),
            *(
                (InvalidMessage, {"headers": each})
                for each in ({"eta": "tomorrow"}, {"expires": "never"}, {"eta": 5}, {"id": "x" * 300})
            ),
        ],
    )
    def test_impossible_options_are_refused(
        self, kombu_client: KombuClient, error: type[Exception], options: dict[str, Any]
    ) -> None:
        with kombu_client.connect() as connection:
            with pytest.raises(error):
                kombu_client.publish("a", connection=connection, **options)
            kombu_client.publish("b", connection=connection)
        assert drained(kombu_client, 1) == ["b"]

    def test_task_ids_in_the_form_of_internal_message_ids(self, kombu_client: KombuClient) -> None:
        ids = ["a", "a~1", "a~~1", "~", "~1", "a", "a", "a~1"]
        with kombu_client.connect() as connection:
            for n, task_id in enumerate(ids):
                kombu_client.publish(n, connection=connection, headers={"id": task_id})
        assert drained(kombu_client, len(ids)) == list(range(len(ids)))


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
    def test_an_old_server_is_refused(self, kombu_client: KombuClient) -> None:
        with (
            old_redis() as port,
            kombu_client.connect(f"dq-redis://127.0.0.1:{port}/0") as connection,
            pytest.raises(ServerError, match=r"6\.0\.16.*needs Redis 6\.2"),
        ):
            connection.default_channel  # noqa: B018 - opens it

    def test_a_server_that_evicts_is_refused_unless_allowed(self) -> None:
        with RedisServer(config={"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}) as server:
            kombu_client = KombuClient(server.url())
            with kombu_client.connect() as connection, pytest.raises(ServerError, match="allkeys-lru"):
                connection.default_channel  # noqa: B018 - opens it
            with kombu_client.connect(allow_eviction=True) as connection:
                kombu_client.publish("a", connection=connection)
            assert drained(kombu_client, 1, allow_eviction=True) == ["a"]
            kombu_client.close()

    def test_a_replica_is_recoverable(self) -> None:
        with (
            RedisServer(config={"repl-diskless-sync-delay": 0}) as master,
            RedisServer(config={"replicaof": f"127.0.0.1 {master.port}"}) as replica,
        ):
            kombu_client = KombuClient(replica.url())
            wait_until(lambda: "master_link_status:up" in str(replica.ask("INFO", "replication")), 30)
            with kombu_client.connect() as connection:
                connection.ensure_connection(max_retries=1)
                with pytest.raises(connection.connection_errors) as caught:
                    kombu_client.publish("a", connection=connection)
                assert "READONLY" in str(caught.value) or "read only" in str(caught.value)
                # The replica is promoted while kombu retries, without a pause as long as it can connect.
                threading.Timer(0.3, lambda: replica.ask("REPLICAOF", "NO", "ONE")).start()
                kombu_client.publish(
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
            assert drained(kombu_client, 1) == ["b"]
            kombu_client.close()
