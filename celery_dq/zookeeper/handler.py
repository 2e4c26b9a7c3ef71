"""The kazoo handler for this kind of process: threads, gevent or eventlet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.utils.compat import detect_environment

__all__ = ["CONNECT_TIMEOUT_S", "bounded_handler"]

#: Seconds that one TCP connect may take.
CONNECT_TIMEOUT_S = 2.0


def bounded_handler() -> Any:
    """Create the kazoo handler for this kind of process, with a bound on the time of a TCP connect.

    If its attribute ``watch`` is set, it is called instead of ``select``, with ``select`` as the first
    argument.
    """

    class BoundedHandler(_handler()):  # type: ignore[misc]  # kazoo ships no types
        """A handler that leaves an unresponsive host while there is time to try another one."""

        watch: Callable[..., Any] | None = None

        def select(self, *args: Any, **kwargs: Any) -> Any:
            if self.watch is None:
                return super().select(*args, **kwargs)
            return self.watch(super().select, *args, **kwargs)

        def create_connection(self, *args: Any, **kwargs: Any) -> Any:
            kwargs["timeout"] = min(float(kwargs.get("timeout") or CONNECT_TIMEOUT_S), CONNECT_TIMEOUT_S)
            return super().create_connection(*args, **kwargs)

    return BoundedHandler()


def _handler() -> Any:
    environment = detect_environment()
    if environment == "gevent":
        from celery_dq.zookeeper.gevent_handler import SequentialGeventHandler

        return SequentialGeventHandler
    if environment == "eventlet":
        from kazoo.handlers.eventlet import SequentialEventletHandler

        return SequentialEventletHandler
    from kazoo.handlers.threading import SequentialThreadingHandler

    return SequentialThreadingHandler
