"""State that belongs to one process, and is not to be used by a child that inherits it over a fork."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

__all__ = ["OwnerProcess", "PerProcess", "current_pid", "start_of"]

T = TypeVar("T")

#: Returns the id of this process. A comparison with an owner's `pid` is the quickest check, for the path of
#: each call; elsewhere :attr:`OwnerProcess.is_current` is plainer.
current_pid = os.getpid


def start_of(pid: int) -> str:
    """Return the start of a process in clock ticks since the boot; "" where ``/proc`` does not show it."""
    with contextlib.suppress(OSError, IndexError):
        # The command before field 22 may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


class OwnerProcess:
    """Remembers the process that has made an object, such as one with threads, sockets or locks."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the running process has made the object; False after a fork, in the child."""
        return self.pid == os.getpid()


class PerProcess(Generic[T]):
    """A value that each process makes for itself. Thread-safe: all threads of a process get one value.

    A forked child forgets its parent's value at the first call of :meth:`get`. Threads of the parent may hold
    the locks of that value, and do not exist in the child.

    Args:
        make: Makes the value of a process. Threads that call :meth:`get` for the first time at the same
            moment may call it more than once; only one of the values is used.
    """

    __slots__ = ("_make", "_values")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        #: Process id to its value; of another process only until the first call of `get`.
        self._values: dict[int, T] = {}

    def get(self) -> T:
        """Return the value of this process, which is made at the first call."""
        pid = os.getpid()
        try:
            return self._values[pid]
        except KeyError:
            value = self._values.setdefault(pid, self._make())
            for inherited in self._values.keys() - {pid}:
                self._values.pop(inherited, None)
            return value

    def peek(self) -> T | None:
        """Return the value of this process, or None if it was not made yet."""
        return self._values.get(os.getpid())
