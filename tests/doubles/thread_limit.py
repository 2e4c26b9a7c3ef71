"""A process that has as many threads as the system allows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["no_more_threads"]


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let no thread of this process start during the block."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield
