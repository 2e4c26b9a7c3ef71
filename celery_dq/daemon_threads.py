"""Threads for which the end of the process does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["start_daemon"]


def start_daemon(run: Callable[..., object], name: str, *args: object) -> threading.Thread:
    """Start a thread, a greenlet after gevent or eventlet has replaced threads, and return it.

    So no caller can keep a thread that did not start: its next attempt starts one.

    Raises:
        RuntimeError: The system allows no more threads, or the interpreter ends.
    """
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    thread.start()
    return thread
