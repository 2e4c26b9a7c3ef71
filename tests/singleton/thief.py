"""Ends sessions of others with ZooKeeper: comes back in their name, and says goodbye."""

from __future__ import annotations

import struct

from kazoo.client import KazooClient

from tests.chaos.proxy import Proxy

#: What a server says to a new connection: length, protocol, timeout, session, length of the password.
#: That follows.
WELCOME = struct.Struct(">iiiqi")
PASSWORD_BYTES = 16
LENGTHS = (WELCOME.size - 4 + PASSWORD_BYTES, WELCOME.size - 4 + PASSWORD_BYTES + 1)


class EavesdroppingProxy(Proxy):
    """Knows the sessions of all that were let in, and their passwords."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.passwords: dict[int, bytes] = {}

    def overhear(self, data: bytes) -> None:
        if len(data) >= WELCOME.size + PASSWORD_BYTES:
            length, _, _, session, password_bytes = WELCOME.unpack_from(data)
            if length in LENGTHS and password_bytes == PASSWORD_BYTES and session:
                self.passwords[session] = data[WELCOME.size : WELCOME.size + PASSWORD_BYTES]


def end_sessions(proxy: EavesdroppingProxy, hosts: str) -> None:
    """End what goes through `proxy`, as servers do that have not heard of it for too long."""
    for session, password in list(proxy.passwords.items()):
        # Its owner may come back in between; then it was not his session that was ended.
        while _end(session, password, hosts):
            pass
        del proxy.passwords[session]


def _end(session: int, password: bytes, hosts: str) -> bool:
    """Come in this name, and leave; return whether there was such a session."""
    client = KazooClient(hosts=hosts, client_id=(session, password))
    client.start(timeout=15)
    was_there = client.client_id is not None and client.client_id[0] == session
    client.stop()
    client.close()
    return was_there
