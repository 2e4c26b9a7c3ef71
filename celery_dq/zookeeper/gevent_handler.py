"""kazoo's handler for gevent, with timeouts that are ordinary exceptions, as those of its other handlers.

kazoo's own hands out gevent's results. When nobody answers in time, these raise :exc:`gevent.Timeout`, which
is not the handler's ``timeout_exception`` but what that is derived from, and no :exc:`Exception` either: it
passes whoever waits for an answer and whatever keeps a thread alive, and ends the greenlet.
"""

from __future__ import annotations

from typing import Any

from kazoo.handlers import gevent as kazoos
from kazoo.handlers.threading import KazooTimeoutError

__all__ = ["SequentialGeventHandler"]


class Answer(kazoos.AsyncResult):  # type: ignore[misc]  # kazoo ships no types
    """What is asked of the server, and its answer."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The answer, or the exception that is the answer; KazooTimeoutError when there is none in time.

        A :exc:`gevent.Timeout` of the caller's goes through.
        """
        if block and not self.ready():
            # Unlike `get`, it raises no timeout of its own: what is raised here is somebody else's.
            # And it always changes greenlets, which callbacks in the hub, who know the answer, may not.
            self.wait(timeout)
        if not self.ready():
            raise KazooTimeoutError("no answer in time")
        return super().get(block=False)


class SequentialGeventHandler(kazoos.SequentialGeventHandler):  # type: ignore[misc]  # kazoo ships no types
    """Survives servers that do not answer."""

    timeout_exception = KazooTimeoutError

    def async_result(self) -> Answer:
        """One answer that is waited for."""
        return Answer()
