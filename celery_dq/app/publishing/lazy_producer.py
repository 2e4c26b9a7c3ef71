"""A producer of the pool that is acquired at its first use.

Groups, chords and chains acquire a producer from the pool and pass it to each of their calls. A call could
not distinguish it from a producer that the user chose, and a buffered call needs none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from celery.local import Proxy

__all__ = ["LazyPoolProducer", "acquire_lazily"]

CANVAS = "celery.canvas"


class LazyPoolProducer(Proxy):  # type: ignore[type-arg]  # generic in its stubs only
    """A proxy that acquires a producer of the pool at its first use. Its ``type()`` identifies it."""


class _Loan:
    """The context manager of one lazily acquired producer.

    Args:
        acquire: acquires a producer from the pool.
    """

    def __init__(self, acquire: Callable[[], AbstractContextManager[Any]]) -> None:
        self._acquire = acquire
        self._taken: AbstractContextManager[Any] | None = None
        self._producer: Any = None
        self._over = False

    def __enter__(self) -> Any:
        return LazyPoolProducer(self._real)

    def _real(self) -> Any:
        if self._producer is None:
            if self._over:
                raise RuntimeError("a producer of the pool is used after its release")
            taken = self._acquire()
            self._producer = taken.__enter__()
            self._taken = taken
        return self._producer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._over = True
        return None if self._taken is None else self._taken.__exit__(kind, error, trace)


def acquire_lazily(app: Any) -> None:
    """Make ``app.producer_or_acquire()`` lazy for canvas. Call it once per app."""
    acquire = app.producer_or_acquire

    def producer_or_acquire(producer: Any = None) -> Any:
        # Any other caller that asks for a producer has chosen one.
        if producer is None and sys._getframe(1).f_globals.get("__name__") == CANVAS:
            return _Loan(acquire)
        return acquire(producer)

    app.producer_or_acquire = producer_or_acquire
