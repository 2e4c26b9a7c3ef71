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
        return _gevent_handler()
    if environment == "eventlet":
        from kazoo.handlers.eventlet import SequentialEventletHandler

        return SequentialEventletHandler
    from kazoo.handlers.threading import SequentialThreadingHandler

    return SequentialThreadingHandler


def _gevent_handler() -> Any:
    """Return kazoo's handler for gevent, whose timeouts are ordinary exceptions, as in its other handlers.

    kazoo's own handler returns gevent's results. After a timeout, these raise :exc:`gevent.Timeout`. That is
    a base class of the handler's ``timeout_exception`` and not derived from :exc:`Exception`. No ``except``
    clause of a caller catches it, and it ends the greenlet.
    """
    from kazoo.handlers import gevent
    from kazoo.handlers.threading import KazooTimeoutError

    class Answer(gevent.AsyncResult):  # type: ignore[misc]  # kazoo ships no types
        """The pending answer to a request. A :exc:`gevent.Timeout` of the caller is raised unchanged."""

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if block and not self.ready():
                # `wait` raises no timeout of its own, so a timeout raised here was started by the caller. It
                # always switches greenlets, which a callback in the hub must not do: there the answer is
                # ready.
                self.wait(timeout)
            if not self.ready():
                raise KazooTimeoutError("no answer in time")
            return super().get(block=False)

    class SequentialGeventHandler(gevent.SequentialGeventHandler):  # type: ignore[misc]  # kazoo ships no types
        timeout_exception = KazooTimeoutError

        def async_result(self) -> Answer:
            return Answer()

    return SequentialGeventHandler
