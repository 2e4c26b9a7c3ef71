"""One thread owns a state; everybody else submits updates to it and gets futures.

The pattern of that name: updates are applied one at a time and in order, without a lock around the state
and without callers that wait for each other's work. The queue is bounded, so a slow writer slows its
callers down, or refuses them, and does not fill the memory.

.. code-block:: python

    balances = {}

    def book(entry):                      # runs in one thread only
        account, amount = entry
        balances[account] = balances.get(account, 0) + amount
        return balances[account]

    with SingularUpdateQueue(book) as ledger:
        future = ledger.submit(("alice", 5))
        assert future.result() == 5

The handler must not hand its state to callbacks: what an external call returns comes back as a further
submission. In asyncio, ``await asyncio.wrap_future(queue.submit(request, block=False))``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar

from celery_dq.errors import QueueClosed, QueueFull

__all__ = ["SingularUpdateQueue"]

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")

#: Seconds after which the waiting thread looks whether it shall stop.
POLL_S = 0.3


class _Entry(Generic[Request, Result]):
    __slots__ = ("future", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.future: Future[Result] = Future()


class _Own(Generic[Request, Result]):
    """What belongs to one process: a fork inherits neither the thread nor what waits for it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        # Re-entrant: a destructor that runs in the middle of submit() may submit too.
        self.changed = threading.Condition(threading.RLock())
        self.waiting: deque[_Entry[Request, Result]] = deque()
        self.thread: threading.Thread | None = None
        self.closed = False


class SingularUpdateQueue(Generic[Request, Result]):
    """A bounded queue with a single writer.

    The thread starts with the first submission, in each process anew: after a fork the child begins with
    an empty queue of its own. At interpreter exit what waits is still handled.

    :param handler: applies one request and returns its result; called in one thread only. What it raises
        goes to the future of that request, and the thread goes on.
    :param capacity: requests that may wait; default 100.
    :param block: what `submit` does when it is full: True (default) waits, False raises.
    :param then: another queue that gets each result as its request (a chain); `submit` then returns
        the future of the last one. A full successor holds this thread up, and so its callers.
    :param name: of the thread.
    """

    def __init__(
        self,
        handler: Callable[[Request], Any],
        *,
        capacity: int = 100,
        block: bool = True,
        then: SingularUpdateQueue[Any, Result] | None = None,
        name: str = "singular-update-queue",
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity!r}: a queue holds at least one request")
        self._handler = handler
        self._max_batch = 1
        self._apply_all: Callable[[Sequence[Request]], Sequence[Any]] | None = None
        self._capacity = capacity
        self._block = block
        self._then = then
        self.name = name
        self._own: _Own[Request, Result] = _Own()

    @classmethod
    def grouped(
        cls,
        handler: Callable[[Sequence[Request]], Sequence[Any]],
        *,
        max_batch: int = 1000,
        **options: Any,
    ) -> SingularUpdateQueue[Request, Result]:
        """A queue whose handler gets all that waits at once, such as for one fsync for many callers.

        :param handler: gets up to `max_batch` requests in order, returns a result for each. What it
            raises goes to all of them.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch = {max_batch!r}: a batch has at least one request")
        made = cls(_never, **options)
        made._apply_all = handler
        made._max_batch = max_batch
        return made

    # -- for callers

    def submit(
        self, request: Request, *, block: bool | None = None, timeout: float | None = None
    ) -> Future[Result]:
        """Queue a request and return the future of its result.

        From the handler's own thread it never waits and never refuses, whatever waits already: the
        thread would wait for itself.

        :param block: overrides what the queue does when it is full.
        :param timeout: seconds to wait for room; default as long as it takes.

        Raises:
            QueueFull: There is no room (in time).
            QueueClosed: :meth:`close` was called.
        """
        own = self._of_this_process()
        entry: _Entry[Request, Result] = _Entry(request)
        with own.changed:
            if own.thread is not threading.current_thread():
                self._wait_for_room(own, self._block if block is None else block, timeout)
            if own.closed:
                raise QueueClosed(f"{self.name}: closed, nothing more is accepted")
            own.waiting.append(entry)
            if own.thread is None:
                self._start(own)
            own.changed.notify_all()
        return entry.future

    def __len__(self) -> int:
        """How many requests wait; without the one in hand."""
        return len(self._of_this_process().waiting)

    def close(self, timeout: float | None = None) -> bool:
        """Accept nothing more, handle what waits, end the thread. Idempotent.

        :param timeout: seconds to wait for the thread; default as long as it takes.

        Returns:
            Whether everything was handled. If not, the thread goes on with it.
        """
        own = self._of_this_process()
        with own.changed:
            own.closed = True
            thread = own.thread
            own.changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            return not thread.is_alive()
        return thread is None

    def __enter__(self) -> SingularUpdateQueue[Request, Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        own = self._own
        return f"<{type(self).__name__} {self.name}: {len(own.waiting)} of {self._capacity} waiting>"

    # -- inside

    def _of_this_process(self) -> _Own[Request, Result]:
        own = self._own
        if own.pid != os.getpid():
            own = self._own = _Own()
        return own

    def _wait_for_room(self, own: _Own[Request, Result], block: bool, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(own.waiting) >= self._capacity and not own.closed:
            left = None if deadline is None else deadline - time.monotonic()
            if not block or (left is not None and left <= 0):
                raise QueueFull(f"{self.name}: {self._capacity} requests wait already")
            own.changed.wait(left)

    def _start(self, own: _Own[Request, Result]) -> None:
        # A daemon, because an interpreter joins the others before it calls what atexit knows.
        own.thread = threading.Thread(target=self._run, args=(own,), name=self.name, daemon=True)
        own.thread.start()
        atexit.register(_close_at_exit, weakref.ref(self), own.pid)

    def _run(self, own: _Own[Request, Result]) -> None:
        while True:
            entries = self._next(own)
            if entries is None:
                return
            running = [entry for entry in entries if entry.future.set_running_or_notify_cancel()]
            if running:
                self._apply(running)
            # What a caller holds on to is the future; nothing here may keep requests alive.
            del entries, running

    def _next(self, own: _Own[Request, Result]) -> list[_Entry[Request, Result]] | None:
        with own.changed:
            while not own.waiting:
                if own.closed:
                    return None
                own.changed.wait(POLL_S)
            batch = [own.waiting.popleft() for _ in range(min(len(own.waiting), self._max_batch))]
            own.changed.notify_all()
            return batch

    def _apply(self, entries: list[_Entry[Request, Result]]) -> None:
        try:
            if self._apply_all is None:
                results: Sequence[Any] = (self._handler(entries[0].request),)
            else:
                results = self._apply_all([entry.request for entry in entries])
                if len(results) != len(entries):
                    raise TypeError(
                        f"{self.name}: the handler returned {len(results)} results for {len(entries)}"
                    )
        except BaseException as error:
            # Also SystemExit: it is the submitter's business, and the others still need the thread.
            for entry in entries:
                entry.future.set_exception(error)
            return
        for entry, result in zip(entries, results, strict=True):
            if self._then is None:
                entry.future.set_result(result)
            else:
                self._pass_on(entry, result)

    def _pass_on(self, entry: _Entry[Request, Result], result: Any) -> None:
        assert self._then is not None
        try:
            following = self._then.submit(result)
        except (QueueFull, QueueClosed) as error:
            entry.future.set_exception(error)
            return
        following.add_done_callback(lambda done: _copy(done, entry.future))


def _never(request: Any) -> Any:
    raise AssertionError("a grouped queue has no handler for one request")


def _copy(done: Future[Any], to: Future[Any]) -> None:
    error = done.exception() if not done.cancelled() else QueueClosed("the rest of the chain was cancelled")
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


def _close_at_exit(queue: weakref.ref[SingularUpdateQueue[Any, Any]], pid: int) -> None:
    found = queue()
    if found is not None and pid == os.getpid():
        found.close()
