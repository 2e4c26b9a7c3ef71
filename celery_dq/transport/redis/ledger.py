"""What this process holds, and what it still has to tell the broker about it.

A held message goes through these states::

    held ──settle──▶ settled ──finish──▶ gone
      │                                   ▲
      ├──────────────finish───────────────┤
      ├──────────────bury─────────────────┤
      └──────────────release──────────────┘

* *held*: claimed under the process's lease. If the process dies, others get it.
* *settled*: acknowledged before its body ran (Celery's default). It is never
  delivered again, but its tenant's slot is taken until it finishes.
* *gone*: finished, released, or buried as a dead letter; the broker is told in the next call that is made
  for that partition anyway.

The ledger belongs to the process, not to a channel: a connection that breaks
takes its channels with it, while the tasks that were running go on, and their
acknowledgements leave through whatever connection comes next. Nothing here
blocks and nothing takes a lock, because tasks end in pool threads, in greenlets
and in the event loop alike; the containers used are atomic under the GIL, and
every entry is moved by popping it, so that two threads never move it twice.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from celery_dq.clock import Clock

_T = TypeVar("_T")

#: Past this share of a lease since its last renewal, nothing new may start (see include/lease.lua).
TRUST = 0.6
#: Seconds that a finish waits for the next claim to ride along with.
COMPANY_SECONDS = 0.01


@dataclass(eq=False, slots=True)
class Held:
    """One claimed message.

    Attributes:
        partition: name of the partition that it was claimed from.
        id: message id.
        claim: claim number.
        tag: delivery tag, made of the two; one for every time a message is claimed.
        settled: acknowledged early; the broker knows or is about to.
        gone: finished or released.
        comes_back: it will be delivered again, so what was claimed after it must wait.
        begun: plain kombu's consumer has it, so it cannot be taken back unseen.
        late: from a led queue, and acknowledged, refused or buried when it has run; until the broker has been
            told, a kill brings it back, so nothing that comes after it may start before that.
        after: what was given to the pool before it and must be over, for good, when it starts.
    """

    partition: str
    id: str
    claim: str
    tag: str
    settled: bool = False
    gone: bool = False
    comes_back: bool = False
    begun: bool = False
    late: bool = False
    after: Held | None = None

    def waits_for(self) -> Held | None:
        """Return the nearest one before it that is not over for good; None when it may start.

        One in between may be over before its turn: what was cancelled or cannot be read runs nowhere.
        """
        while self.after is not None and self.after.is_over:
            self.after = self.after.after
        return self.after

    @property
    def is_over(self) -> bool:
        """It does not come back, whoever is killed."""
        return self.gone and not (self.comes_back or self.late)


@dataclass(eq=False, slots=True)
class Burial:
    """A message that becomes a dead letter.

    Attributes:
        held: which one.
        reason: why, in a word or a short sentence.
        record: the message as stored; the broker has none left of a settled one.
    """

    held: Held
    reason: str
    record: bytes


@dataclass(eq=False)
class Outbox:
    """What one partition has not been told yet, oldest first."""

    settles: deque[Held] = field(default_factory=deque)
    finishes: deque[Held] = field(default_factory=deque)
    releases: deque[tuple[str, Held]] = field(default_factory=deque)
    burials: deque[Burial] = field(default_factory=deque)
    #: One for every release not answered yet; counted by its length, as several threads do.
    returning: deque[None] = field(default_factory=deque)
    #: Monotonic time of the oldest finish in here, about.
    finishes_since: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.settles or self.finishes or self.releases or self.burials)


class Ledger:
    """All messages that one process holds on one broker.

    Arguments:
        clock: monotonic time decides how long a lease may be trusted.
        lease_s: length of the lease in seconds.
    """

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._trusted_s = lease_s * TRUST
        self._held: dict[str, Held] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._renewed: dict[str, float] = {}
        self._listeners: list[Callable[[], None]] = []
        #: settles, finishes and releases that came too late: the broker had
        #: given the message to somebody else by then.
        self.stale = 0

    # -- holding ---------------------------------------------------------------

    def hold(self, partition: str, message_id: str, claim: str) -> Held:
        """Remember a message that was just claimed."""
        tag = f"{claim}/{message_id}"
        held = self._held[tag] = Held(partition, message_id, claim, tag)
        return held

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, tag: str) -> bool:
        return tag in self._held

    def holds_of(self, partition: str, last_claim: int | None = None) -> int:
        """Return how many messages of *partition* are held; of those up to the claim of this number."""
        return len(self.held_of(partition, last_claim))

    def held_of(self, partition: str, last_claim: int | None = None) -> list[Held]:
        """Return them, in the order in which they were claimed."""
        return [
            held
            for held in list(self._held.values())
            if held.partition == partition and (last_claim is None or int(held.claim) <= last_claim)
        ]

    # -- telling ---------------------------------------------------------------

    def settle(self, tag: str) -> None:
        """Never deliver this message again; its slot stays taken."""
        held = self._held.get(tag)
        if held is not None and not held.settled:
            held.settled = True
            self.outbox(held.partition).settles.append(held)
            self._tell()

    def finish(self, tag: str) -> None:
        """Forget this message and free its slot. A second call does nothing."""
        held = self._held.pop(tag, None)
        if held is not None:
            box = self.outbox(held.partition)
            if not box.finishes:
                box.finishes_since = self._clock.monotonic()
            box.finishes.append(held)
            # Last: who sees that it is gone looks whether the broker has been told.
            held.gone = True
            self._tell()

    def release(self, tag: str, mode: str) -> None:
        """Give this message back to its old place.

        Arguments:
            tag: delivery tag.
            mode: ``unstarted`` (the tenant gets its token back), ``requeue`` or
                ``crashed`` (counts towards ``max_deliveries``).
        """
        held = self._held.pop(tag, None)
        if held is not None:
            box = self.outbox(held.partition)
            if held.settled:
                # Settled means never again: releasing it could only run it twice.
                box.finishes.append(held)
            else:
                box.returning.append(None)
                box.releases.append((mode, held))
            # Last: who sees that it is gone relies on the above.
            held.comes_back, held.gone = not held.settled, True
            self._tell()

    def returning(self, partition: str) -> bool:
        """Return whether something of *partition* is on its way back: a claim might bring what is behind."""
        return bool(self.outbox(partition).returning)

    def returned(self, partition: str, count: int) -> None:
        """The broker has answered so many releases."""
        _pop(self.outbox(partition).returning, count)
        if count:
            self._tell()

    def bury(self, tag: str, reason: str, record: bytes) -> None:
        """Keep this message as a dead letter, and free its slot."""
        held = self._held.pop(tag, None)
        if held is not None:
            self.outbox(held.partition).burials.append(Burial(held, reason, record))
            held.gone = True
            self._tell()

    def lose(self, partition: str, running: frozenset[str], last_claim: int | None = None) -> int:
        """The lease on *partition* had run out: let go of what has not begun; return how many.

        Others may have it by now. What runs goes on, and the broker will refuse
        its acknowledgement if somebody else has it. So is what came by a claim after
        the one numbered *last_claim*: it is held under the lease that we have now.
        """
        lost = [
            held.tag
            for held in self.held_of(partition, last_claim)
            if held.tag not in running and not (held.settled or held.begun)
        ]
        for tag in lost:
            held = self._held.pop(tag, None)
            if held is not None:
                # The broker has it again, in its place.
                held.comes_back, held.gone = True, True
        return len(lost)

    def drop(self, tag: str) -> Held | None:
        """Stop holding a message that the broker has been told about otherwise."""
        return self._held.pop(tag, None)

    def get(self, tag: str) -> Held | None:
        """Return the message with this delivery tag, if it is still held."""
        return self._held.get(tag)

    # -- the outboxes ----------------------------------------------------------

    def outbox(self, partition: str) -> Outbox:
        """Return what *partition* has not been told yet."""
        box = self._outboxes.get(partition)
        if box is None:
            box = self._outboxes.setdefault(partition, Outbox())
        return box

    def pending(self) -> list[str]:
        """Return the names of the partitions that have something to be told."""
        return [name for name, box in list(self._outboxes.items()) if box]

    def take(self, partition: str, limit: int, finishing: bool = True) -> tuple[list[Held], list[Held]]:
        """Pop up to *limit* settles and, if *finishing*, *limit* finishes to send them.

        A settle whose message has finished meanwhile is skipped: the finish says
        it all.
        """
        box = self.outbox(partition)
        settles = [held for held in _pop(box.settles, limit) if not held.gone]
        return settles, _pop(box.finishes, limit) if finishing else []

    def take_releases(self, partition: str, limit: int) -> list[tuple[str, Held]]:
        """Pop up to *limit* releases, as (mode, held)."""
        return _pop(self.outbox(partition).releases, limit)

    def take_burial(self, partition: str) -> Burial | None:
        """Pop the oldest dead letter to be, if there is one."""
        burials = _pop(self.outbox(partition).burials, 1)
        return burials[0] if burials else None

    def untold(
        self,
        partition: str,
        settles: Iterable[Held] = (),
        finishes: Iterable[Held] = (),
        releases: Iterable[tuple[str, Held]] = (),
        burials: Iterable[Burial] = (),
    ) -> None:
        """Put back what was taken: the call that carried it got no answer.

        Telling twice is harmless, because every entry names its claim.
        """
        box = self.outbox(partition)
        box.settles.extendleft(reversed(list(settles)))
        box.finishes.extendleft(reversed(list(finishes)))
        box.releases.extendleft(reversed(list(releases)))
        box.burials.extendleft(reversed(list(burials)))

    # -- the lease -------------------------------------------------------------

    def renewed(self, partition: str, sent_at: float) -> None:
        """The broker answered a renewal that was *sent* at monotonic *sent_at*."""
        if sent_at > self._renewed.get(partition, float("-inf")):
            self._renewed[partition] = sent_at

    def silence(self, partition: str, now: float) -> float:
        """Return the seconds since the last renewal was sent that was answered; 0 before the first."""
        sent_at = self._renewed.get(partition)
        return 0.0 if sent_at is None else now - sent_at

    def trusted(self, partition: str) -> bool:
        """Return whether the lease is fresh enough for something new to start."""
        sent_at = self._renewed.get(partition)
        return sent_at is not None and self._clock.monotonic() - sent_at < self._trusted_s

    def forget(self, partition: str) -> None:
        """The partition is no longer consumed from and nothing of it is held."""
        self._renewed.pop(partition, None)
        self._outboxes.pop(partition, None)

    def abandon(self, partition: str) -> int:
        """Hold nothing of *partition* any more; return how many were held or finished and not told."""
        box = self.outbox(partition)
        held = [held.tag for held in self.held_of(partition)]
        for tag in held:
            self._held.pop(tag, None)
        return len(held) + len(box.finishes) + len(box.releases) + len(box.burials)

    # -- who sends -------------------------------------------------------------

    def listen(self, listener: Callable[[], None]) -> None:
        """Call *listener* whenever there is something to tell, from any thread."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Undo :meth:`listen`."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def has_listener(self) -> bool:
        """Some connection will send what there is to tell."""
        return bool(self._listeners)

    def heard(self) -> None:
        """The broker has answered what somebody waits for."""
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()


def _pop(queue: deque[_T], limit: int) -> list[_T]:
    """Pop up to *limit* items; another thread may be popping too."""
    popped: list[_T] = []
    with contextlib.suppress(IndexError):
        while len(popped) < limit:
            popped.append(queue.popleft())
    return popped
