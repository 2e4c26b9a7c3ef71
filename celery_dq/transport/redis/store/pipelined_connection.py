"""A connection to Redis on which commands are sent without waiting for their answers.

A thread may wait at the socket of :attr:`PipelinedConnection.watched` for an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import redis
from kombu.utils.eventio import ERR, READ, poll
from redis.connection import AbstractConnection

from celery_dq.compat.redis_sockets import socket_of
from celery_dq.scripts.loader import Argument
from celery_dq.transport.redis.store.server_checks import recognised_error

#: Seconds after which an unanswered BLPOP is sent again: long enough to cost
#: nothing, short enough to notice a dead connection.
BLPOP_TIMEOUT_S = 10
#: Seconds without an answer, after those of a BLPOP, after which a connection counts as dead.
OVERDUE_S = 5


def has_arrived(connection: Any) -> bool:
    """Return whether the socket of a redis-py connection has data to read; False when it is closed."""
    sock = socket_of(connection)
    if sock is None or sock.fileno() < 0:
        return False
    pending = getattr(sock, "pending", None)  # data that TLS has decrypted
    if pending is not None and pending():
        return True
    poller = poll()
    try:
        poller.register(sock.fileno(), READ | ERR)
        return bool(poller.poll(0))
    finally:
        poller.close()


def pack(commands: Iterable[Sequence[Argument]]) -> bytes:
    """Return commands as the bytes of one write.

    redis-py packs a word three times slower, and writes pieces of 6 kB one by one. With each write the
    writing thread gives up Python's lock; while another thread makes calls, it waits long to get it back.
    """
    parts = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            if type(word) is not bytes:
                word = (word if isinstance(word, str) else repr(word)).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
    return b"".join(parts)


class PipelinedConnection:
    """A connection that is taken out of a pool and kept until :meth:`close`.

    Args:
        pool: the pool, with addresses, TLS, credentials and Sentinels.
        may_repeat: whether the commands may run twice. A connection to a Redis Cluster then sends those again
            whose answers were lost.
    """

    def __init__(self, pool: redis.ConnectionPool, may_repeat: bool = False) -> None:
        self._pool = pool
        self._may_repeat = may_repeat
        #: The redis-py connection; None before :meth:`open` and after :meth:`close`.
        self.connection: Any = None
        #: Whether commands are packed here. A connection to a cluster takes them as they are, for many nodes.
        self._packs = True
        #: How often :meth:`open` has got another connection or socket.
        self.connects = 0

    @property
    def watched(self) -> Any:
        """The redis-py connection at whose socket an answer arrives; None without one."""
        return getattr(self.connection, "awaited", self.connection)

    def open(self) -> None:
        """Connect, unless connected.

        Raises:
            redis.ConnectionError: the server cannot be reached.
        """
        if self.connection is None:
            # The argument became optional in redis-py 5.3, and a warning in 6.
            if redis.VERSION >= (5, 3):
                self.connection = self._pool.get_connection()
            else:
                self.connection = self._pool.get_connection("_")
            self.connects += 1
            self._packs = isinstance(self.connection, AbstractConnection)
        if socket_of(self.connection) is None:
            self.connection.connect()
            self.connects += 1
        if self._may_repeat:
            self.connection.may_repeat = True

    def send(self, command: tuple[Any, ...]) -> None:
        """Send *command*; its answer is the next one that :meth:`read` returns."""
        self.send_all((command,))

    def send_all(self, commands: Sequence[tuple[Argument, ...]], check_health: bool = False) -> None:
        """Send commands at once, in one write if they are short.

        Args:
            commands: the commands.
            check_health: redis-py may check the connection's health before, which waits for a PONG.
        """
        packed = (pack(commands),) if self._packs else commands
        self.connection.send_packed_command(packed, check_health=check_health)

    def read(self) -> Any:
        """Return the next answer; wait for it up to the socket timeout.

        Raises:
            redis.RedisError: the answer is an error, or the connection broke.
        """
        try:
            return self.connection.read_response()
        except redis.ResponseError as exc:
            raise recognised_error(exc) from None

    def ask(self, command: tuple[Any, ...]) -> Any:
        """Send *command* and wait for its answer, up to the socket timeout.

        redis-py may check the connection's health before, and connects again when it was closed.

        Raises:
            redis.RedisError: the answer is an error, or the connection broke.
        """
        self.send_all((command,), check_health=True)
        return self.read()

    def has_answer(self) -> bool:
        """Return whether an answer, or a part of one, has arrived."""
        return bool(self.connection is not None and self.connection.can_read(timeout=0))

    def has_unread_input(self) -> bool:
        """Return whether the socket has data, without reading any, so that a poller still sees it.

        :meth:`has_answer` may move data into the buffer (redis-py before 6), where no poller sees it.
        """
        return has_arrived(self.connection)

    def close(self, reusable: bool = False) -> None:
        """Close the connection; commands without an answer may or may not have been executed.

        Args:
            reusable: all answers were read, so that the pool may keep the connection open.
        """
        connection, self.connection = self.connection, None
        if connection is not None:
            if not reusable:
                connection.disconnect()
            self._pool.release(connection)
