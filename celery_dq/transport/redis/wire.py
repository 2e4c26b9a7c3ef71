"""One raw connection to Redis that an event loop can watch.

A command is sent without waiting for its answer; the answer is read when the
socket says that it is there. The loop learns about the socket through
:attr:`Wire.fd`.
"""

from __future__ import annotations

from typing import Any

import redis
from kombu.utils.eventio import ERR, READ, poll

from celery_dq.transport.redis.fitness import recognised

#: Seconds after which an unanswered BLPOP is sent anew: long enough to cost
#: nothing, short enough to notice a dead connection.
BLPOP_SECONDS = 10
#: Seconds (after those of a BLPOP) without an answer that mean that the connection is dead.
OVERDUE_SECONDS = 5


class Wire:
    """A connection taken out of a pool, kept until :meth:`close`.

    Arguments:
        pool: where connections come from; it knows addresses, TLS, credentials, Sentinel.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self._connection: Any = None

    @property
    def connection(self) -> Any:
        """The redis-py connection; None before :meth:`open` and after :meth:`close`."""
        return self._connection

    @property
    def fd(self) -> int | None:
        """File descriptor of the socket; None while there is none."""
        sock = getattr(self._connection, "_sock", None)
        if sock is None:
            return None
        number: int = sock.fileno()
        return number if number >= 0 else None

    def open(self) -> None:
        """Connect, unless connected.

        Raises:
            redis.ConnectionError: the server cannot be reached.
        """
        if self._connection is None:
            # The argument became optional in redis-py 5.3, and a warning in 6.
            if redis.VERSION >= (5, 3):
                self._connection = self._pool.get_connection()
            else:
                self._connection = self._pool.get_connection("_")
        if getattr(self._connection, "_sock", None) is None:
            self._connection.connect()

    def send(self, command: tuple[Any, ...]) -> None:
        """Send *command*; its answer is the next one that :meth:`read` returns."""
        # A health check would wait for its PONG, and that would block the loop.
        self._connection.send_command(*command, check_health=False)

    def read(self) -> Any:
        """Return the next answer; waits when it has not arrived (up to the socket timeout).

        Raises:
            redis.RedisError: the answer is an error, or the connection broke.
        """
        try:
            return self._connection.read_response()
        except redis.ResponseError as exc:
            raise recognised(exc) from None

    def readable(self) -> bool:
        """Return whether an answer, or a part of one, is there."""
        return bool(self._connection is not None and self._connection.can_read(timeout=0))

    def arrived(self) -> bool:
        """Return whether something lies at the socket, and leave it there for the poller to see.

        :meth:`readable` may take it into the buffer (redis-py before 6), where no poller sees it.
        """
        fd = self.fd
        if fd is None:
            return False
        pending = getattr(self._connection._sock, "pending", None)  # what TLS has decrypted
        if pending is not None and pending():
            return True
        poller = poll()
        try:
            poller.register(fd, READ | ERR)
            return bool(poller.poll(0))
        finally:
            poller.close()

    def close(self) -> None:
        """Close the connection; sent commands whose answers were not read are in doubt."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)
