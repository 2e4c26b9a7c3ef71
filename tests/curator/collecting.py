"""A consumer that records its items, and can wait or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from celery_dq.testing.waiting import wait_until


class Collector:
    """A consumer that keeps its items in :attr:`items`.

    Args:
        fail: Called with each item; the consumer raises if it returns true.
    """

    def __init__(self, fail: Callable[[Any], bool] = lambda _item: False) -> None:
        self.items: list[Any] = []
        self.failed: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self._fail = fail
        self._lock = threading.Lock()

    def __call__(self, item: Any) -> None:
        if not self.gate.is_set():
            self.waiting.set()
            self.gate.wait(60)
        with self._lock:
            if self._fail(item):
                self.failed.append(item)
                raise RuntimeError(f"cannot consume {item!r}")
            self.items.append(item)

    def wait(self, count: int, timeout_s: float = 60.0) -> list[Any]:
        wait_until(
            lambda: len(self.items) >= count, timeout_s, what=lambda: f"{count} items; {self.items!r:.300}"
        )
        return list(self.items)
