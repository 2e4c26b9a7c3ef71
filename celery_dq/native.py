"""Threads and locks as they were before gevent or eventlet replaced them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["leave_green_hub", "unpatched"]


def unpatched(module: str, name: str) -> Any:
    """Return *module*.*name* as it was before gevent or eventlet replaced it."""
    if "gevent.monkey" in sys.modules:
        return sys.modules["gevent.monkey"].get_original(module, name)
    if "eventlet.patcher" in sys.modules:
        return getattr(sys.modules["eventlet.patcher"].original(module), name)
    return getattr(importlib.import_module(module), name)


def leave_green_hub() -> None:
    """Close, at the end of a native thread, the loop that gevent or eventlet made for its sockets."""
    if "gevent.monkey" in sys.modules and "gevent.hub" in sys.modules:
        sys.modules["gevent.hub"].get_hub().destroy(destroy_loop=True)
    elif "eventlet.hubs" in sys.modules:
        # eventlet has no function for this, and the greenlets of a dead thread are never collected.
        poller = getattr(sys.modules["eventlet.hubs"].get_hub(), "poll", None)
        if poller is not None and hasattr(poller, "close"):
            poller.close()
