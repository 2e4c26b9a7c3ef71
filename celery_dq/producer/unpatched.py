"""Threads and locks of the operating system, whatever gevent and eventlet have made of Python's."""

from __future__ import annotations

import _thread
import sys
from typing import Any

__all__ = ["unpatched"]


def unpatched(module: str, name: str) -> Any:
    """Return *module*.*name* as it was before gevent or eventlet replaced it."""
    if "gevent.monkey" in sys.modules:
        return sys.modules["gevent.monkey"].get_original(module, name)
    if "eventlet.patcher" in sys.modules:
        return getattr(sys.modules["eventlet.patcher"].original(module), name)
    return getattr(_thread, name) if module == "_thread" else getattr(__import__(module), name)
