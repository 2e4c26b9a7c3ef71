"""Threads and locks as they were before gevent or eventlet replaced them."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["is_in_green_hub", "leave_green_hub", "start_thread", "unpatched"]


def unpatched(module: str, name: str) -> Any:
    """Return *module*.*name* as it was before gevent or eventlet replaced it."""
    if "gevent.monkey" in sys.modules:
        return sys.modules["gevent.monkey"].get_original(module, name)
    if "eventlet.patcher" in sys.modules:
        return getattr(sys.modules["eventlet.patcher"].original(module), name)
    return getattr(importlib.import_module(module), name)


def start_thread(run: Callable[..., object], *args: Any) -> None:
    """Start a native thread, which may log.

    Raises:
        RuntimeError: No thread can start any more, because the interpreter ends.
    """
    if "gevent.monkey" in sys.modules or "eventlet.patcher" in sys.modules:
        _share_logging()
    unpatched("_thread", "start_new_thread")(run, args)


def _share_logging() -> None:
    """Give logging the locks of the interpreter again.

    A lock of eventlet works within one thread: the release in a second one wakes the waiting greenlet in the
    wrong loop, and that greenlet waits for ever. With one of gevent, too, greenlets that log beside a thread
    come to a stand, while their loop goes on.
    """
    native_lock = unpatched("_thread", "RLock")
    loggers = [logging.root, *tuple(logging.root.manager.loggerDict.values())]
    handlers = {each for logger in loggers for each in getattr(logger, "handlers", ())}
    for owner, name in [(logging, "_lock"), *((handler, "lock") for handler in handlers)]:
        lock = getattr(owner, name)
        is_green = type(lock).__name__ == "_RLock" or type(lock).__module__.startswith("gevent")
        # One that is held now would be released as another one.
        if is_green and lock.acquire(blocking=False):
            setattr(owner, name, native_lock())
            lock.release()


def is_in_green_hub() -> bool:
    """Return whether the caller runs in the loop of gevent or eventlet, where nothing may wait.

    A signal handler does when all greenlets wait.
    """
    if "gevent.hub" in sys.modules:
        return isinstance(sys.modules["greenlet"].getcurrent(), sys.modules["gevent.hub"].Hub)
    if "eventlet.hubs" in sys.modules:
        return sys.modules["eventlet.hubs"].get_hub().greenlet is sys.modules["greenlet"].getcurrent()
    return False


def leave_green_hub() -> None:
    """Close, at the end of a native thread, the loop that gevent or eventlet made for its sockets."""
    if "gevent.monkey" in sys.modules and "gevent.hub" in sys.modules:
        sys.modules["gevent.hub"].get_hub().destroy(destroy_loop=True)
    elif "eventlet.hubs" in sys.modules:
        # eventlet has no function for this, and the greenlets of a dead thread are never collected.
        poller = getattr(sys.modules["eventlet.hubs"].get_hub(), "poll", None)
        if poller is not None and hasattr(poller, "close"):
            poller.close()
