"""A producer of the pool that is only taken when somebody needs one.

Groups, chords and chains take a producer from the pool and pass it to each of their calls. So a call could
not tell it from one that the user chose, and a buffered call needs none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from celery.local import Proxy

__all__ = ["PoolProducer", "lend_lazily"]

CANVAS = "celery.canvas"


class PoolProducer(Proxy):  # type: ignore[type-arg]  # generic in its stubs only
    """Stands for a producer of the pool, and becomes one when it is touched. See it by its ``type()``."""


class _Loan:
    """The context of one such producer.

    :param acquire: takes one from the pool.
    """

    def __init__(self, acquire: Callable[[], AbstractContextManager[Any]]) -> None:
        self._acquire = acquire
        self._taken: AbstractContextManager[Any] | None = None
        self._producer: Any = None
        self._over = False

    def __enter__(self) -> Any:
        return PoolProducer(self._real)

    def _real(self) -> Any:
        if self._producer is None:
            if self._over:
                raise RuntimeError("a producer of the pool is used after it was given back")
            taken = self._acquire()
            self._producer = taken.__enter__()
            self._taken = taken
        return self._producer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._over = True
        return None if self._taken is None else self._taken.__exit__(kind, error, trace)


def lend_lazily(app: Any) -> None:
    """Have ``app.producer_or_acquire()`` take from the pool when it must, for canvas. To be called once."""
    acquire = app.producer_or_acquire

    def producer_or_acquire(producer: Any = None) -> Any:
        # Who else asks for a producer has chosen one.
        if producer is None and sys._getframe(1).f_globals.get("__name__") == CANVAS:
            return _Loan(acquire)
        return acquire(producer)

    app.producer_or_acquire = producer_or_acquire
