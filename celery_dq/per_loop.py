"""State that belongs to one event loop of asyncio, such as its connections, and the turns of a loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["LoopTurns", "PerLoop"]


class Closable(Protocol):
    """A value that is closed at the end of its loop."""

    async def close(self) -> None:
        """Close the value; called in its loop."""


T = TypeVar("T", bound=Closable)


class PerLoop(Generic[T]):
    """A value that each event loop makes for itself. Thread-safe: each thread sees the value of its loop.

    A loop that ends closes its value: ``asyncio.run``, ``asyncio.Runner`` and uvloop close the asynchronous
    generators of a loop, and the value is held by one. A program that runs a loop by hand awaits
    ``loop.shutdown_asyncgens()`` before ``loop.close()``, as the documentation of asyncio says.

    Args:
        make: Makes the value of a loop; called in the loop.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        #: A forked child keeps the values of its parent's loops: to close one would act on the parent's
        #: selector.
        self._values: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None]]] = {}

    async def get(self) -> T:
        """Return the value of the running loop, which is made at the first call."""
        loop = asyncio.get_running_loop()
        held = self._values.get(loop)
        if held is not None:
            return held[0]
        for other in tuple(self._values):
            if other.is_closed():
                self._values.pop(other, None)  # it was closed without an end of its generators
        value = self._make()
        until_end = self._until_end(loop, value)
        # Nothing waits in the first step of the generator, so no other coroutine comes in between.
        await anext(until_end)
        self._values[loop] = (value, until_end)
        return value

    async def _until_end(self, loop: asyncio.AbstractEventLoop, value: T) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._values.pop(loop, None)
            await value.close()


#: Pieces of plain code in one turn of a loop. One call of a task takes about 0.1 ms.
PIECES_PER_TURN = 4


class LoopTurns:
    """Lets few coroutines run a piece of plain code in one turn of a loop.

    A thousand coroutines that start together would block the loop for a thousand pieces. Made and used in one
    loop.
    """

    def __init__(self) -> None:
        self._left = PIECES_PER_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a turn in which the caller may run its piece of code; first come, first served."""
        if self._left and not self._waiting:
            self._left -= 1
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._begin_turn, loop)
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = PIECES_PER_TURN
        while self._left and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else its coroutine was cancelled
                waiting.set_result(None)
                self._left -= 1
        if self._waiting:
            loop.call_soon(self._begin_turn, loop)
