"""Ends ZooKeeper sessions of other clients: connects with their session ids and passwords, and closes."""

from __future__ import annotations

import struct

from kazoo.client import KazooClient

from tests.chaos.proxy import Proxy

#: The header of a server's answer to a new connection: length, protocol, timeout, session, length of the
#: password. The password follows.
WELCOME = struct.Struct(">iiiqi")
PASSWORD_BYTES = 16
LENGTHS = (WELCOME.size - 4 + PASSWORD_BYTES, WELCOME.size - 4 + PASSWORD_BYTES + 1)


class EavesdroppingProxy(Proxy):
    """A proxy that records the session ids and passwords of all connections."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.passwords: dict[int, bytes] = {}

    def overhear(self, data: bytes) -> None:
        if len(data) >= WELCOME.size + PASSWORD_BYTES:
            length, _, _, session, password_bytes = WELCOME.unpack_from(data)
            if length in LENGTHS and password_bytes == PASSWORD_BYTES and session:
                self.passwords[session] = data[WELCOME.size : WELCOME.size + PASSWORD_BYTES]


def end_sessions(proxy: EavesdroppingProxy, hosts: str) -> None:
    """End all sessions that were opened through `proxy`, as servers end silent sessions."""
    for session, password in list(proxy.passwords.items()):
        # The owner may reconnect in between, and then another session was ended.
        while _end(session, password, hosts):
            pass
        del proxy.passwords[session]


def _end(session: int, password: bytes, hosts: str) -> bool:
    """Connect to a session and close it; return whether the session existed."""
    client = KazooClient(hosts=hosts, client_id=(session, password))
    client.start(timeout=15)
    was_there = client.client_id is not None and client.client_id[0] == session
    client.stop()
    client.close()
    return was_there
