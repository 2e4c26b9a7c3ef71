"""The sockets of redis-py's connections, which an event loop watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_dq.compat.guard import check

check("redis_sockets")


def socket_of(connection: Any) -> Any:
    """Return the socket of a connection; None while it is not connected."""
    return getattr(connection, "_sock", None)


def reporting_connection(
    connection_class: Any, opens: Callable[[], object], closes: Callable[[Any], object]
) -> Any:
    """Return a connection class whose connections report the sockets that they begin to use and close.

    Args:
        connection_class: Class of redis-py, which the new one extends.
        opens: Called before a connection opens a socket, or is taken from a pool with an open one.
        closes: Called with the connection before it closes its socket.
    """

    class Connection(connection_class):  # type: ignore[misc]  # a class that is known at run time
        def connect(self, *args: Any, **kwargs: Any) -> Any:
            # The pool calls it for a connection with an open socket, too.
            opens()
            return super().connect(*args, **kwargs)

        def disconnect(self, *args: Any, **kwargs: Any) -> None:
            closes(self)
            super().disconnect(*args, **kwargs)

    return Connection
