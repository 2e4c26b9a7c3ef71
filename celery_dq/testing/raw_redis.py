"""Single commands to a Redis server over a plain socket, without a client library."""

from __future__ import annotations

import socket
from typing import BinaryIO

__all__ = ["Address", "Reply", "ErrorReply", "ask"]

# (host, port), or the path of a unix socket.
Address = tuple[str, int] | str
Reply = str | int | None | list["Reply"]


class ErrorReply(Exception):
    """An error reply of the server, such as ``LOADING`` or ``NOAUTH``."""


def ask(address: Address, *command: str | float, password: str = "", timeout_s: float = 20.0) -> Reply:
    """Send a command on a new connection and return the reply, with texts decoded.

    Args:
        address: Address of the server.
        command: Words of the command.
        password: Password of the server; "" for a server without one.
        timeout_s: Seconds to wait for the connection and for each part of the reply.

    Raises:
        ServerSaid: The server sent an error reply.
        OSError: The server did not answer in time.
    """
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        with connection.makefile("rb") as stream:
            if password:
                _send(connection, "AUTH", password)
                _read(stream)
            _send(connection, *command)
            return _read(stream)


def _send(connection: socket.socket, *command: str | float) -> None:
    parts = [str(part).encode() for part in command]
    sent = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    connection.sendall(b"*%d\r\n" % len(parts) + sent)


def _read(stream: BinaryIO) -> Reply:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection before it replied")
    kind, rest = line[:1], line[1:-2]
    if kind == b"+":
        return rest.decode()
    if kind == b"-":
        raise ErrorReply(rest.decode())
    if kind == b":":
        return int(rest)
    if kind == b"$":
        length = int(rest)
        return None if length < 0 else stream.read(length + 2)[:-2].decode(errors="surrogateescape")
    if kind == b"*":
        return None if int(rest) < 0 else [_read(stream) for _ in range(int(rest))]
    raise ConnectionError(f"the answer is not a Redis reply: {line!r}")
