"""The kazoo handler for this kind of process: threads, gevent or eventlet."""

from __future__ import annotations

from typing import Any

from kombu.utils.compat import detect_environment

__all__ = ["CONNECT_TIMEOUT_S", "bounded_handler"]

#: Seconds that one TCP connect may take.
CONNECT_TIMEOUT_S = 2.0


def bounded_handler() -> Any:
    """The kazoo handler for this kind of process, with a bound on how long a TCP connect takes."""

    class BoundedHandler(_handler()):  # type: ignore[misc]  # kazoo ships no types
        """Gives up on a host that does not answer, while there is time for another one."""

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
