"""A queue of updates to a state that one thread owns. Callers submit updates and get futures.

This is the pattern *Singular Update Queue* (Martin Fowler, *Patterns of Distributed Systems*). Updates are
applied one at a time and in order, without a lock around the state, and callers do not wait for each other.
The queue is bounded: when the thread is slow, callers wait or are refused, so that the memory does not fill.

.. code-block:: python

    balances = {}

    def book(entry):                      # runs in one thread only
        account, amount = entry
        balances[account] = balances.get(account, 0) + amount
        return balances[account]

    with SingularUpdateQueue(book) as ledger:
        future = ledger.submit(("alice", 5))
        assert future.result() == 5

The handler must not pass its state to callbacks. The result of an external call belongs into a further
submission. In asyncio, use ``await asyncio.wrap_future(queue.submit(request, block=False))``.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar

from celery_dq.daemon_threads import start_daemon
from celery_dq.errors import QueueClosed, QueueFull
from celery_dq.per_process import PerProcess
from celery_dq.shown import shown_logger

__all__ = ["SingularUpdateQueue"]

logger = shown_logger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")

#: Seconds after which the waiting thread checks whether the queue was closed.
POLL_S = 0.3


class _QueuedRequest(Generic[Request, Result]):
    __slots__ = ("future", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.future: Future[Result] = Future()


class _QueueProcess(Generic[Request, Result]):
    """The thread and the requests of one process. A forked child inherits neither."""

    def __init__(self) -> None:
        # Re-entrant, because a destructor that runs during submit() may submit too.
        self.changed = threading.Condition(threading.RLock())
        self.waiting: deque[_QueuedRequest[Request, Result]] = deque()
        self.thread: threading.Thread | None = None
        self.closed = False


class SingularUpdateQueue(Generic[Request, Result]):
    """A bounded queue with a single writer.

    The thread starts with the first submission of each process. After a fork the child begins with an empty
    queue. At interpreter exit the waiting requests are still handled.

    Args:
        handler: Applies one request and returns its result; called in one thread only. Its exception is set
            on the future of the request, and the thread continues.
        capacity: Number of requests that may wait.
        block: Whether `submit` waits when the queue is full; else it raises.
        then: Another queue that receives each result as its request (a chain). `submit` then returns the
            future of the last queue. While the next queue is full, this thread waits, and so do its callers.
        name: Name of the thread.

    Raises:
        ValueError: The capacity is below 1.
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
        self._max_batch = 1
        self._apply_all: Callable[[Sequence[Request]], Sequence[Any]] = lambda requests: [
            handler(requests[0])
        ]
        self._capacity = capacity
        self._block = block
        self._then = then
        #: Number of the queues after this one in its chain.
        self.following: int = 0 if then is None else then.following + 1
        self.name = name
        self._state: PerProcess[_QueueProcess[Request, Result]] = PerProcess(_QueueProcess)

    @classmethod
    def grouped(
        cls,
        handler: Callable[[Sequence[Request]], Sequence[Any]],
        *,
        max_batch: int = 1000,
        **options: Any,
    ) -> SingularUpdateQueue[Request, Result]:
        """Make a queue whose handler gets all waiting requests at once, for example for one fsync.

        Args:
            handler: Gets the requests in order and returns a result for each. Its exception is set on all
                their futures.
            max_batch: Number of requests per call of the handler, at most.
            options: Arguments of the class.

        Raises:
            ValueError: `max_batch` is below 1.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch = {max_batch!r}: a batch has at least one request")
        made = cls(handler, **options)  # type: ignore[arg-type]  # replaced in the next line
        made._apply_all = handler
        made._max_batch = max_batch
        return made

    # -- for callers

    def submit(
        self, request: Request, *, block: bool | None = None, timeout: float | None = None
    ) -> Future[Result]:
        """Queue a request and return the future of its result.

        In the handler's own thread this method never waits and never refuses, because the thread would wait
        for itself.

        Args:
            request: The request.
            block: Overrides `block` of the class.
            timeout: Seconds to wait for room; None waits without a limit.

        Raises:
            QueueFull: There is no room, or was none in time.
            QueueClosed: :meth:`close` was called.
        """
        own = self._state.get()
        entry: _QueuedRequest[Request, Result] = _QueuedRequest(request)
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
        """Return how many requests wait, without those that the handler is applying."""
        return len(self._state.get().waiting)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called in this process. A handler that waits ends its wait then."""
        return self._state.get().closed

    def close(self, timeout: float | None = None) -> bool:
        """Accept no more requests, handle the waiting ones, and end the thread. Idempotent.

        Args:
            timeout: Seconds to wait for the thread; None waits without a limit.

        Returns:
            Whether all requests were handled. If not, the thread continues with them.
        """
        own = self._state.get()
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
        own = self._state.get()
        return f"<{type(self).__name__} {self.name}: {len(own.waiting)} of {self._capacity} waiting>"

    # -- inside

    def _wait_for_room(self, own: _QueueProcess[Request, Result], block: bool, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(own.waiting) >= self._capacity and not own.closed:
            left = None if deadline is None else deadline - time.monotonic()
            if not block or (left is not None and left <= 0):
                raise QueueFull(f"{self.name}: {self._capacity} requests wait already")
            own.changed.wait(left)

    def _start(self, own: _QueueProcess[Request, Result]) -> None:
        # A daemon, because an interpreter joins other threads before it runs atexit handlers.
        _running.get().add(self)
        try:
            own.thread = start_daemon(self._run, self.name, own)
        except RuntimeError as error:  # the interpreter ends, or there are too many threads
            _running.get().discard(self)
            while own.waiting:
                refusal = QueueClosed(f"{self.name}: its thread cannot start ({error})")
                own.waiting.popleft().future.set_exception(refusal)

    def _run(self, own: _QueueProcess[Request, Result]) -> None:
        while (entries := self._next(own)) is not None:
            running = [entry for entry in entries if entry.future.set_running_or_notify_cancel()]
            if running:
                self._apply(running)
            # Only callers may keep requests and futures alive while this thread waits.
            del entries, running
        _running.get().discard(self)

    def _next(self, own: _QueueProcess[Request, Result]) -> list[_QueuedRequest[Request, Result]] | None:
        with own.changed:
            while not own.waiting:
                if own.closed:
                    return None
                own.changed.wait(POLL_S)
            batch = [own.waiting.popleft() for _ in range(min(len(own.waiting), self._max_batch))]
            own.changed.notify_all()
            return batch

    def _apply(self, entries: list[_QueuedRequest[Request, Result]]) -> None:
        try:
            results = self._apply_all([entry.request for entry in entries])
            if len(results) != len(entries):
                raise TypeError(
                    f"{self.name}: the handler returned {len(results)} results for {len(entries)}"
                )
        except BaseException as error:
            # SystemExit too is passed to the caller, because other requests still need the thread.
            for entry in entries:
                entry.future.set_exception(error)
            return
        for entry, result in zip(entries, results, strict=True):
            if self._then is None:
                entry.future.set_result(result)
            else:
                self._pass_on(entry, result)

    def _pass_on(self, entry: _QueuedRequest[Request, Result], result: Any) -> None:
        assert self._then is not None
        try:
            following = self._then.submit(result)
        except (QueueFull, QueueClosed) as error:
            entry.future.set_exception(error)
            return
        following.add_done_callback(lambda done: _copy(done, entry.future))


def _copy(done: Future[Any], to: Future[Any]) -> None:
    error = done.exception() if not done.cancelled() else QueueClosed("the rest of the chain was cancelled")
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


def _begin_registry() -> set[SingularUpdateQueue[Any, Any]]:
    # Not at the import, because the handlers may use objects that the program closes at exit.
    atexit.register(_close_all)
    return set()


#: The queues whose threads run.
_running = PerProcess(_begin_registry)


def _close_all() -> None:
    # A queue may start the thread of the next queue in its chain meanwhile.
    while running := _running.peek():
        queue = max(list(running), key=lambda each: each.following)
        queue.close()
        running.discard(queue)
