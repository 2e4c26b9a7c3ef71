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
    """Return a connection class whose connections report the sockets that they open and close.

    Args:
        connection_class: Class of redis-py, which the new one extends.
        opens: Called before a connection opens a socket.
        closes: Called with the connection before it closes its socket.
    """

    class Connection(connection_class):  # type: ignore[misc]  # a class that is known at run time
        def _connect(self) -> Any:
            opens()
            return super()._connect()

        def disconnect(self, *args: Any, **kwargs: Any) -> None:
            closes(self)
            super().disconnect(*args, **kwargs)

    return Connection
