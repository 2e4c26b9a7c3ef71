"""Parts that need no server: URLs, options, node names, and the format of a message."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_dq.clock import SystemClock
from celery_dq.errors import ConfigurationError, CorruptRecord, InvalidMessage
from celery_dq.options import Options
from celery_dq.transport.broker_url import address_in
from celery_dq.transport.packer import Packer
from celery_dq.transport.zookeeper.address import host_list, no_server_listens, session_options
from celery_dq.transport.zookeeper.publisher import Item, transactions
from celery_dq.transport.zookeeper.record import ZooKeeperRecord
from celery_dq.znodes import BrokerNodes, QueueNodes, binding_of, due_ms_of, served_in_order


def test_a_url_of_several_hosts_with_credentials_and_a_folder() -> None:
    address = address_in("dq-zookeeper://shop:s%40crt@h1:2181,h2:2182/a/b")
    assert address == ("h1:2181,h2:2182", "a/b", "shop", "s@crt")
    assert host_list("h1,h2:2182", None, "a/b") == "h1:2181,h2:2182/a/b"
    assert host_list("[::1]:2181", None, None) == "[::1]:2181"


def test_a_query_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="broker_transport_options"):
        address_in("dq-zookeeper://h1/x?session_timeout=3")


def test_the_text_of_a_connection_hides_the_password() -> None:
    connection = Connection("dq-zookeeper://shop:secret@h1:2181,h2:2181/folder")
    assert connection.as_uri() == "dq-zookeeper://shop:**@h1:2181,h2:2181/folder"
    assert "secret" in connection.as_uri(include_password=True)
    info = connection.info()
    assert (info["hostname"], info["virtual_host"], info["password"]) == (
        "h1:2181,h2:2181",
        "folder",
        "secret",
    )
    again = connection.clone()
    assert again.as_uri() == connection.as_uri()


def test_options_reach_the_session(tmp_path: Path) -> None:
    authority, own = str(tmp_path / "ca.pem"), str(tmp_path / "c.pem")
    for path in (authority, own):
        Path(path).touch()
    connection = Connection(
        "dq-zookeeper://shop:secret@h1/x",
        ssl={"ca_certs": authority, "certfile": own, "keyfile": own},
        transport_options={"session_timeout": 4, "auth": [["digest", "a:b"]], "sasl": {"mechanism": "X"}},
    )
    connection.as_uri()
    options = session_options(connection)
    assert options["timeout_s"] == 4.0
    assert options["auth"] == [("digest", "a:b"), ("digest", "shop:secret")]
    assert options["tls"] == {"ca": authority, "certfile": own, "keyfile": own}
    assert options["sasl"] == {"mechanism": "X"}


def test_a_login_method_names_a_mechanism_of_sasl() -> None:
    def options(method: str | None) -> dict[str, object]:
        connection = Connection("dq-zookeeper://shop:secret@h1/x", login_method=method)
        connection.as_uri()
        return session_options(connection)

    login = {"username": "shop", "password": "secret"}
    assert options("DIGEST-MD5")["sasl"] == {"mechanism": "DIGEST-MD5", **login}
    assert options("DIGEST-MD5")["auth"] == []
    for digest in (None, "digest", "DIGEST"):
        assert (options(digest)["sasl"], options(digest)["auth"]) == (None, [("digest", "shop:secret")])


def test_certificates_are_checked_unless_it_is_reported_otherwise() -> None:
    def tls(ssl_options: bool | dict[str, Any]) -> object:
        return session_options(Connection("dq-zookeeper://h1/x", ssl=ssl_options))["tls"]

    assert tls(True) == {}
    assert tls(False) is None
    assert tls({"cert_reqs": ssl.CERT_REQUIRED}) == {"verify_certs": True, "check_hostname": True}
    assert tls({"cert_reqs": ssl.CERT_NONE}) == {"verify_certs": False, "check_hostname": False}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"transport_options": {"session_timeout": "5"}}, "session_timeout"),
        ({"transport_options": {"auth": [("digest",)]}}, "auth"),
        ({"transport_options": {"acl": [("world", "anyone")]}}, r"'acl'\] is not a list of ACLs"),
        ({"transport_options": {"sasl": {"mechanism": "X"}}, "login_method": "Y"}, "exclude each other"),
        ({"ssl": {"ciphers": "x"}}, "ciphers"),
    ],
)
def test_unusable_options_are_named(given: dict[str, object], named: str) -> None:
    connection = Connection("dq-zookeeper://h1/x", **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=named):
        session_options(connection)


def test_without_kazoo_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['kazoo'] = None\n"
        "from kombu import Connection; from celery_dq.wiring import register_transports\n"
        "register_transports()\n"
        "try: Connection('dq-zookeeper://h1/x')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert "pip install 'celery-dq[zookeeper]'" in done.stdout, done.stderr


def test_a_port_without_a_server() -> None:
    import socket

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        assert no_server_listens(f"127.0.0.1:{port}/x")
        reserved.listen()
        assert not no_server_listens(f"127.0.0.1:1,127.0.0.1:{port}/x")


def test_names_are_those_of_curator() -> None:
    nodes = QueueNodes("/q")
    assert nodes.ready_prefix(2) == "/q/ready/queue-100000007"
    assert nodes.delayed_prefix(0x18BCFE56800) == "/q/delayed/queue-|18BCFE56800|"
    assert due_ms_of("queue-|18BCFE56800|0000000000") == 0x18BCFE56800
    # A failing Curator consumer has requeued this item.
    assert due_ms_of("queue-0000000002") == 0


def test_urgent_first_then_by_age_over_the_roll_over() -> None:
    young, old = "queue-100000009-2147483648", "queue-1000000092147483647"
    urgent = "queue-1000000000000000003"
    assert served_in_order([young, old, urgent]) == [urgent, old, young]


def test_a_binding_reads_back() -> None:
    nodes = BrokerNodes("online")
    path = nodes.binding("ex/ch.ange", "a|b.queue", "k/ey.*", "guid")
    assert binding_of(path.rpartition("/")[2]) == ("a|b.queue", "k/ey.*", True)
    assert not path.removeprefix(nodes.bindings("ex/ch.ange")).count("/") > 1


@pytest.mark.parametrize("body", ["text ü", b"\x00\xff", ""])
def test_a_record_reads_back(body: str | bytes) -> None:
    record = ZooKeeperRecord(7, 1_700_000_000_123, b'[0,{},{},"x","y"]', body)
    packed = record.pack()
    assert ZooKeeperRecord.unpack(packed) == record
    # Curator's format starts with the version, an item mark and its length, and ends with an end mark.
    assert packed[:5] == bytes.fromhex("0001000101")
    assert packed[-1:] == b"\x02"


@pytest.mark.parametrize("damage", [lambda data: data[:-2], lambda data: b"", lambda data: b"{}" + data])
def test_damaged_bytes_are_reported_to_be(damage: object) -> None:
    data = ZooKeeperRecord(0, 0, b"[0,{},{}]", "x").pack()
    with pytest.raises(CorruptRecord):
        ZooKeeperRecord.unpack(damage(data))  # type: ignore[operator]  # a parameter


def test_an_unusable_eta_is_named() -> None:
    message = {
        "headers": {"eta": "soon"},
        "properties": {},
        "body": "x",
        "content-type": "a",
        "content-encoding": "b",
    }
    with pytest.raises(InvalidMessage, match="soon"):
        Packer(Options(), SystemClock()).parts(message, "q", whole=True)


def test_batches_are_cut_by_size_and_number() -> None:
    small = [Item("q", "/p", b"x")] * 1200
    assert [len(piece) for piece in transactions(small)] == [500, 500, 200]
    big = [Item("q", "/p", b"x" * 500_000)] * 3
    assert [len(piece) for piece in transactions(big)] == [1, 1, 1]
