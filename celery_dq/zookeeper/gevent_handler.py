"""kazoo's handler for gevent, with timeouts that are ordinary exceptions, as in its other handlers.

kazoo's own handler returns gevent's results. After a timeout, these raise :exc:`gevent.Timeout`. That is a
base class of the handler's ``timeout_exception`` and not derived from :exc:`Exception`. No ``except`` clause
of a caller catches it, and it ends the greenlet.
"""

from __future__ import annotations

from typing import Any

from kazoo.handlers import gevent as kazoos
from kazoo.handlers.threading import KazooTimeoutError

__all__ = ["SequentialGeventHandler"]


class Answer(kazoos.AsyncResult):  # type: ignore[misc]  # kazoo ships no types
    """The pending answer to a request."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Wait for the answer and return it, or raise the exception that is the answer.

        A :exc:`gevent.Timeout` that the caller has started is raised unchanged.

        Args:
            block: Whether to wait.
            timeout: Seconds to wait; None means without a limit.

        Raises:
            KazooTimeoutError: No answer came in time.
        """
        if block and not self.ready():
            # `wait` raises no timeout of its own, so a timeout raised here was started by the caller. It
            # always switches greenlets, which a callback in the hub must not do: there the answer is ready.
            self.wait(timeout)
        if not self.ready():
            raise KazooTimeoutError("no answer in time")
        return super().get(block=False)


class SequentialGeventHandler(kazoos.SequentialGeventHandler):  # type: ignore[misc]  # kazoo ships no types
    """kazoo's gevent handler, whose timeouts are ordinary exceptions."""

    timeout_exception = KazooTimeoutError

    def async_result(self) -> Answer:
        """Create a pending answer."""
        return Answer()
