"""The coordinator for the threads of one process."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from celery_dq.clock import Clock, SystemClock
from celery_dq.dedup.machine import (
    CoordinatorLockSnapshot,
    DedupCall,
    DedupMachine,
    DedupOptions,
    DedupResult,
    HeldDedupLock,
    Verdict,
    WaitingCall,
)
from celery_dq.errors import DedupLockLost

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LocalCoordinator"]

#: Number of locks that the keys share. Two threads on different keys seldom need the same lock.
STRIPES = 64
#: Seconds after which a waiting thread checks whether the thread that has the key still lives.
LOOK_S = 1.0


@dataclasses.dataclass(slots=True)
class _About:
    """The facts about a call that its machine does not keep. Times are monotonic seconds.

    The call ends with its `thread`, if it has one.
    """

    task: str
    timeout: float | None
    since: float
    thread: threading.Thread | None = None


@dataclasses.dataclass(slots=True)
class _Kept:
    machine: DedupMachine = dataclasses.field(default_factory=DedupMachine)
    calls: dict[str, _About] = dataclasses.field(default_factory=dict)


class LocalCoordinator:
    """Dedup machines in memory. They end with their process, so they need no leases; ``renew`` only reads.

    Args:
        clock: its monotonic time measures how long a head has been running.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._stripes = [threading.Condition() for _ in range(STRIPES)]
        self._kept: dict[str, _Kept] = {}
        self._verdicts: Counter[tuple[str, str]] = Counter()
        self._counting = threading.Lock()
        # One counter for all keys, because a key may be forgotten and used again.
        self._tokens = itertools.count(1)

    def _stripe(self, key: str) -> threading.Condition:
        return self._stripes[hash(key) % STRIPES]

    def _find(self, key: str) -> _Kept | None:
        """Return the key's state, without calls of dead threads and a head that runs too long.

        The caller holds the key's stripe.
        """
        kept = self._kept.get(key)
        for call, about in list(kept.calls.items()) if kept is not None else ():
            if kept is not None and about.thread is not None and not about.thread.is_alive():
                head = kept.machine.head
                kept.machine.dequeue(call, head.token if head is not None and head.id == call else 0)
                self._over(key, kept, call)
        kept = self._kept.get(key)
        if kept is not None and kept.machine.head is not None:
            about = kept.calls[kept.machine.head.id]
            if about.timeout is not None:
                evicted = kept.machine.evict(self._clock.monotonic(), about.timeout)
                if evicted is not None:
                    self._count(key, "evict")
                    self._over(key, kept, evicted.id)
        return self._kept.get(key)

    def _over(self, key: str, kept: _Kept, call: str) -> None:
        """Forget a call that has left the machine, and the key when it was the last one."""
        del kept.calls[call]
        if kept.machine.head is None:
            del self._kept[key]
        self._stripe(key).notify_all()

    def enqueue(self, key: str, call: str, **options: Unpack[DedupOptions]) -> DedupResult:
        """See :meth:`Coordinator.enqueue`."""
        return self._enqueue(key, call, None, options)

    def _enqueue(
        self, key: str, call: str, thread: threading.Thread | None, options: DedupOptions
    ) -> DedupResult:
        with self._stripe(key):
            kept = self._find(key) or self._kept.setdefault(key, _Kept())
            machine, head = kept.machine, kept.machine.head
            if call in kept.calls:
                return self._known(kept, call)
            continues = None
            task = options.get("task", "")
            if task and head is not None and kept.calls[head.id].task == task:
                continues = (head.id, head.token)
            late = (machine.heir, machine.tail)
            again = next(
                (each.id for each in late if each and task and kept.calls[each.id].task == task), None
            )
            decision = machine.enqueue(
                call,
                policy=options.get("policy", "decline"),
                waiting=options.get("waiting", 1),
                continues=continues,
                again=again,
            )
            if continues is not None and not continues[1] and machine.head is not head:
                # The call is the retry of a released run, whose place it has taken.
                del kept.calls[continues[0]]
            token = 0
            if decision.verdict is not Verdict.DECLINE:
                kept.calls[call] = _About(task, options.get("timeout"), self._clock.monotonic(), thread)
                token = self._begin(kept, call)
            self._count(key, decision.verdict.value)
            if decision.replaced is not None:
                self._count(key, "replace")
                self._over(key, kept, decision.replaced)
            return DedupResult(decision.verdict, decision.covering, token, decision.replaced)

    def _known(self, kept: _Kept, call: str) -> DedupResult:
        head, tail = kept.machine.head, kept.machine.tail
        if head is not None and tail is not None and tail.id == call:
            return DedupResult(Verdict.BLOCK, head.id, 0)
        return DedupResult(Verdict.ACCEPT, call, self._begin(kept, call))

    def _begin(self, kept: _Kept, call: str) -> int:
        """Let a call run if it is the head. Returns the token of its run; 0 when it waits."""
        head = kept.machine.head
        if head is None or head.id != call:
            return 0
        if head.started:
            return head.token
        token = next(self._tokens)
        kept.calls[call].since = now = self._clock.monotonic()
        kept.machine.start(call, token, now)
        return token

    def start(self, key: str, call: str) -> int | None:
        """See :meth:`Coordinator.start`."""
        with self._stripe(key):
            kept = self._find(key)
            return None if kept is None or call not in kept.calls else self._begin(kept, call)

    def finish(self, key: str, call: str, token: int) -> bool:
        """See :meth:`Coordinator.finish`."""
        return token > 0 and self._dequeue(key, call, token)

    def release(self, key: str, call: str, token: int) -> bool:
        """See :meth:`Coordinator.release`."""
        with self._stripe(key):
            kept = self._kept.get(key)
            return kept is not None and kept.machine.release(call, token)

    def withdraw(self, key: str, call: str) -> bool:
        """See :meth:`Coordinator.withdraw`."""
        return self._dequeue(key, call, 0)

    def _dequeue(self, key: str, call: str, token: int) -> bool:
        with self._stripe(key):
            kept = self._kept.get(key)
            if kept is None or not kept.machine.dequeue(call, token):
                return False
            self._over(key, kept, call)
            return True

    def renew(self, holdings: Sequence[HeldDedupLock]) -> list[bool]:
        """See :meth:`Coordinator.renew`."""
        return [self._knows(*holding) for holding in holdings]

    def _knows(self, key: str, call: str, token: int) -> bool:
        with self._stripe(key):
            kept = self._find(key)
            if kept is None or call not in kept.calls:
                return False
            head = kept.machine.head
            return not token or (head is not None and head.id == call and head.token == token)

    def remember_covered(self, task: str, covering: str) -> None:
        """See :meth:`Coordinator.remember_covered`. Does nothing: no delivery outlives this process."""

    def forget_covered(self, task: str) -> None:
        """See :meth:`Coordinator.forget_covered`."""

    def inspect(self, key: str) -> CoordinatorLockSnapshot | None:
        """See :meth:`Coordinator.inspect`."""
        with self._stripe(key):
            kept = self._find(key)
            return None if kept is None else self._snapshot(key, kept)

    def _snapshot(self, key: str, kept: _Kept) -> CoordinatorLockSnapshot:
        now = self._clock.monotonic()

        def look(call: DedupCall | None) -> WaitingCall | None:
            if call is None:
                return None
            about = kept.calls[call.id]
            return WaitingCall(call.id, "", call.token, now - about.since, float("inf"), about.timeout)

        machine = kept.machine
        return CoordinatorLockSnapshot(key, look(machine.head), look(machine.heir), look(machine.tail))

    def keys(self, prefix: str = "") -> list[str]:
        """See :meth:`Coordinator.keys`."""
        return [key for key in list(self._kept) if key.startswith(prefix)]

    def count_decline(self, key: str) -> None:
        """See :meth:`Coordinator.count_decline`."""
        self._count(key, "decline")

    def verdicts(self, queue: str) -> dict[str, int]:
        """See :meth:`Coordinator.verdicts`."""
        with self._counting:
            return {verdict: count for (of, verdict), count in self._verdicts.items() if of == queue}

    def _count(self, key: str, verdict: str) -> None:
        queue, bar, _ = key.partition("|")
        with self._counting:
            self._verdicts[queue if bar else "", verdict] += 1

    def free(self, key: str) -> CoordinatorLockSnapshot | None:
        """See :meth:`Coordinator.free`."""
        with self._stripe(key):
            kept = self._kept.pop(key, None)
            self._stripe(key).notify_all()
            return None if kept is None else self._snapshot(key, kept)

    @contextmanager
    def claim(
        self,
        key: str,
        call: str | None = None,
        **options: Unpack[DedupOptions],
    ) -> Iterator[DedupResult]:
        """Hold the key in a ``with`` block: the heir or the tail waits here until it is the head.

        If the thread ends without leaving the block, the key is free.

        The verdict is ``ACCEPT`` when the block is to do its work, and ``DECLINE`` when another thread covers
        the call.

        Args:
            key: the dedup key.
            call: the name of the call; default: a unique name per entry.
            options: see :class:`~celery_dq.dedup.machine.DedupOptions`.

        Yields:
            The answer to the request, after the wait of an heir or a tail.

        Raises:
            DedupLockLost: the call waited, and a later call took its place or an operator freed the key.
        """
        call = call or f"{threading.get_ident()}.{next(self._tokens)}"
        result = self._enqueue(key, call, threading.current_thread(), options)
        # An heir is accepted without a token: it waits for the end of the run that it repeats.
        if result.verdict is not Verdict.DECLINE and not result.token:
            try:
                token = self._wait(key, call)
            except BaseException:
                self.withdraw(key, call)
                raise
            result = DedupResult(Verdict.ACCEPT, call, token)
        try:
            yield result
        finally:
            if result.token:
                self.finish(key, call, result.token)

    def _wait(self, key: str, call: str) -> int:
        changed = self._stripe(key)
        with changed:
            while True:
                token = self.start(key, call)
                if token:
                    return token
                if token is None:
                    raise DedupLockLost(f"{key}: the waiting call {call} was replaced, or the key was freed")
                changed.wait(self._patience(key))

    def _patience(self, key: str) -> float:
        """Seconds until the head may be evicted, or its thread is checked again."""
        kept = self._kept[key]
        head = kept.machine.head
        timeout = kept.calls[head.id].timeout if head is not None and head.started else None
        if head is None or timeout is None:
            return LOOK_S
        return min(max(timeout - (self._clock.monotonic() - head.since), 0.0) + 0.001, LOOK_S)
