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
from celery_dq.dedup.coordinator import ClaimSnapshot, Grant, Holding, Terms, Waiting
from celery_dq.dedup.machine import Call, Machine, Verdict
from celery_dq.errors import ClaimLost

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LocalCoordinator"]

#: Locks that the keys share: threads on different keys seldom meet.
STRIPES = 64


@dataclasses.dataclass(slots=True)
class _About:
    """What a machine must not know of a call: times are monotonic seconds."""

    task: str
    timeout: float | None
    since: float


@dataclasses.dataclass(slots=True)
class _Kept:
    machine: Machine = dataclasses.field(default_factory=Machine)
    calls: dict[str, _About] = dataclasses.field(default_factory=dict)


class LocalCoordinator:
    """Machines in memory. Who dies takes them along, so nobody needs a lease, and ``renew`` only looks.

    Arguments:
        clock: monotonic time measures how long a head has been running.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._stripes = [threading.Condition() for _ in range(STRIPES)]
        self._kept: dict[str, _Kept] = {}
        self._verdicts: Counter[tuple[str, str]] = Counter()
        self._counting = threading.Lock()
        # One counter for all keys: a key may be forgotten and come back.
        self._tokens = itertools.count(1)

    def _stripe(self, key: str) -> threading.Condition:
        return self._stripes[hash(key) % STRIPES]

    def _find(self, key: str) -> _Kept | None:
        """What is kept of the key, after the eviction of a head that runs too long. Under its stripe."""
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
        """A call has left the machine. An idle key costs nothing."""
        del kept.calls[call]
        if kept.machine.head is None:
            del self._kept[key]
        self._stripe(key).notify_all()

    def enqueue(self, key: str, call: str, **terms: Unpack[Terms]) -> Grant:
        """See :meth:`Coordinator.enqueue`."""
        with self._stripe(key):
            kept = self._find(key) or self._kept.setdefault(key, _Kept())
            machine, head = kept.machine, kept.machine.head
            if call in kept.calls:
                return self._known(kept, call)
            continues = None
            task = terms.get("task", "")
            if task and head is not None and kept.calls[head.id].task == task:
                continues = (head.id, head.token)
            late = (machine.heir, machine.tail)
            again = next(
                (each.id for each in late if each and task and kept.calls[each.id].task == task), None
            )
            decision = machine.enqueue(
                call,
                policy=terms.get("policy", "decline"),
                waiting=terms.get("waiting", 1),
                continues=continues,
                again=again,
            )
            if continues is not None and not continues[1] and machine.head is not head:
                # The retry of a run that was released for it.
                del kept.calls[continues[0]]
            token = 0
            if decision.verdict is not Verdict.DECLINE:
                kept.calls[call] = _About(task, terms.get("timeout"), self._clock.monotonic())
                token = self._begin(kept, call)
            self._count(key, decision.verdict.value)
            if decision.replaced is not None:
                self._count(key, "replace")
                self._over(key, kept, decision.replaced)
            return Grant(decision.verdict, decision.covering, token, decision.replaced)

    def _known(self, kept: _Kept, call: str) -> Grant:
        head, tail = kept.machine.head, kept.machine.tail
        if head is not None and tail is not None and tail.id == call:
            return Grant(Verdict.BLOCK, head.id, 0)
        runs = head is not None and head.id == call and head.started
        return Grant(
            Verdict.ACCEPT, call, head.token if head is not None and runs else self._begin(kept, call)
        )

    def _begin(self, kept: _Kept, call: str) -> int:
        head = kept.machine.head
        if head is None or head.id != call or head.started:
            return 0
        token = next(self._tokens)
        kept.calls[call].since = now = self._clock.monotonic()
        kept.machine.start(call, token, now)
        return token

    def start(self, key: str, call: str) -> int | None:
        """See :meth:`Coordinator.start`."""
        with self._stripe(key):
            kept = self._find(key)
            if kept is None or call not in kept.calls:
                return None
            head = kept.machine.head
            if head is not None and head.id == call and head.started:
                return head.token
            return self._begin(kept, call)

    def finish(self, key: str, call: str, token: int) -> bool:
        """See :meth:`Coordinator.finish`."""
        with self._stripe(key):
            kept = self._kept.get(key)
            done = kept is not None and token > 0 and kept.machine.dequeue(call, token)
            if done and kept is not None:
                self._over(key, kept, call)
            return done

    def release(self, key: str, call: str, token: int) -> bool:
        """See :meth:`Coordinator.release`."""
        with self._stripe(key):
            kept = self._kept.get(key)
            return kept is not None and kept.machine.release(call, token)

    def withdraw(self, key: str, call: str) -> bool:
        """See :meth:`Coordinator.withdraw`."""
        with self._stripe(key):
            kept = self._kept.get(key)
            done = kept is not None and kept.machine.dequeue(call)
            if done and kept is not None:
                self._over(key, kept, call)
            return done

    def renew(self, holdings: Sequence[Holding]) -> list[bool]:
        """See :meth:`Coordinator.renew`."""
        return [self._knows(*holding) for holding in holdings]

    def _knows(self, key: str, call: str, token: int) -> bool:
        with self._stripe(key):
            kept = self._find(key)
            if kept is None or call not in kept.calls:
                return False
            head = kept.machine.head
            return not token or (head is not None and head.id == call and head.token == token)

    def inspect(self, key: str) -> ClaimSnapshot | None:
        """See :meth:`Coordinator.inspect`."""
        with self._stripe(key):
            kept = self._find(key)
            return None if kept is None else self._snapshot(key, kept)

    def _snapshot(self, key: str, kept: _Kept) -> ClaimSnapshot:
        now = self._clock.monotonic()

        def look(call: Call | None) -> Waiting | None:
            if call is None:
                return None
            about = kept.calls[call.id]
            return Waiting(call.id, "", call.token, now - about.since, float("inf"), about.timeout)

        machine = kept.machine
        return ClaimSnapshot(key, look(machine.head), look(machine.heir), look(machine.tail))

    def keys(self, prefix: str = "") -> list[str]:
        """See :meth:`Coordinator.keys`."""
        return [key for key in list(self._kept) if key.startswith(prefix)]

    def verdicts(self, queue: str) -> dict[str, int]:
        """See :meth:`Coordinator.verdicts`."""
        with self._counting:
            return {verdict: count for (of, verdict), count in self._verdicts.items() if of == queue}

    def _count(self, key: str, verdict: str) -> None:
        queue, bar, _ = key.partition("|")
        with self._counting:
            self._verdicts[queue if bar else "", verdict] += 1

    def free(self, key: str) -> ClaimSnapshot | None:
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
        **terms: Unpack[Terms],
    ) -> Iterator[Grant]:
        """Hold the key in a ``with`` block: the tail waits here until it is the head.

        Look at the verdict: it is ``ACCEPT`` when the block is to do its work, and ``DECLINE`` when another
        thread covers it.

        Arguments:
            key: the key.
            call: who; default: a name of its own per entry.
            terms: see :class:`~celery_dq.dedup.coordinator.Terms`.

        Raises:
            ClaimLost: it waited, and a later call took its place or an operator freed the key.
        """
        call = call or f"{threading.get_ident()}.{next(self._tokens)}"
        grant = self.enqueue(key, call, **terms)
        if grant.verdict is Verdict.BLOCK:
            try:
                token = self._wait(key, call)
            except BaseException:
                self.withdraw(key, call)
                raise
            grant = Grant(Verdict.ACCEPT, call, token)
        try:
            yield grant
        finally:
            if grant.token:
                self.finish(key, call, grant.token)

    def _wait(self, key: str, call: str) -> int:
        changed = self._stripe(key)
        with changed:
            while True:
                token = self.start(key, call)
                if token:
                    return token
                if token is None:
                    raise ClaimLost(f"{key}: the waiting call {call} was replaced, or the key was freed")
                changed.wait(self._patience(key))

    def _patience(self, key: str) -> float | None:
        """Seconds until the head may be evicted."""
        kept = self._kept[key]
        head = kept.machine.head
        timeout = kept.calls[head.id].timeout if head is not None and head.started else None
        if head is None or timeout is None:
            return None
        return max(timeout - (self._clock.monotonic() - head.since), 0.0) + 0.001
