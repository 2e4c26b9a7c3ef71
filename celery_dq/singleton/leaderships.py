"""The leaderships that one worker volunteers for, as the transport sees them, and what a term means there.

A term of a queue goes like this: the queue is *fenced* with the token, so that what older terms hold comes
back to its place; the user's ``inaugurate`` runs; the transport sees the term and consumes. When it ends, the
transport gives back what waits, the running message ends or is killed, ``hand_over`` runs, and the next
candidate is let in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import Fenced
from celery_dq.hooks import Consumption
from celery_dq.leadership.career import Career, Phase, Term
from celery_dq.leadership.election import Election
from celery_dq.leadership.office import Office
from celery_dq.options.singleton import SingletonOptions
from celery_dq.singleton.guard import Guard
from celery_dq.singleton.spread import Spread

__all__ = ["Fence", "Leading", "Leaderships"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at a message that must end.
LOOK_S = 0.01
#: Seconds between two looks at the broker.
LOOK_OUT_S = 0.5
#: Seconds between two attempts to reach the broker.
PAUSE_S = 0.2


class Fence(Protocol):
    """What refuses old tokens: the broker, where it can."""

    def epoch(self, queue: str) -> int:
        """The token that holds now; 0 for none. Raises OSError when the broker does not answer."""

    def raise_to(self, queue: str, token: int) -> int:
        """Let `token` hold, and take back what older ones hold. Returns the token that holds after that."""


class Leading(NamedTuple):
    """What this worker is to one queue: ``leads`` since (wall time) with which token, or stands by."""

    queue: str
    leads: bool
    token: int
    since: float
    phase: str
    who: str


class Leaderships:
    """All queues with a leader that this worker may lead; :class:`celery_dq.hooks.Terms` to the transport.

    :param sections: the options of every such queue.
    :param elect: makes the candidate for a queue.
    :param fence: None where the broker cannot refuse tokens.
    :param kills: whether the guard can kill what runs without killing this process.
    """

    def __init__(
        self,
        sections: Mapping[str, SingletonOptions],
        elect: Callable[[str], Election],
        fence: Fence | None,
        guard: Guard,
        *,
        careers: Mapping[str, Career[Any]] | None = None,
        kills: bool,
        clock: Clock | None = None,
    ) -> None:
        self._sections = dict(sections)
        self._elect = elect
        self._fence = fence
        self._guard = guard
        self._careers = dict(careers or {})
        self._kills = kills
        self._clock: Clock = clock or SystemClock()
        self._offices: dict[str, Office] = {}
        self._spread = Spread(self._offices, self._clock)
        self._consumptions: dict[str, Consumption] = {}
        self._listeners: list[Callable[[], None]] = []

    # -- volunteering

    def volunteer(self, queue: str) -> None:
        """Stand for the leadership of `queue` from now on."""
        if queue not in self._offices:
            duties = QueueDuties(self, self._sections[queue], self._fence, self._guard, self._kills)
            grace_s = self._sections[queue].grace_us / 1e6
            office = Office(
                self._elect(queue),
                duties,
                grace_s=grace_s,
                clock=self._clock,
                may_lead=lambda: self._spread.may_take(queue),
            )
            self._offices[queue] = office
        self._offices[queue].open()

    def resign(self, queue: str, reason: str) -> None:
        """Hand `queue` over to the next candidate; stand again behind the others."""
        office = self._offices.get(queue)
        if office is not None:
            office.resign(reason)

    def withdraw(self, queue: str) -> None:
        """Hand `queue` over, and stand no more, until :meth:`volunteer` is called again. Does not wait."""
        office = self._offices.get(queue)
        if office is not None:
            office.close(0, "the worker does not consume the queue any more")

    def close(self, timeout_s: float) -> bool:
        """Hand everything over, and stand no more. Waits at most `timeout_s` seconds in all.

        Returns whether all is handed over.
        """
        deadline = self._clock.monotonic() + timeout_s
        for office in self._offices.values():
            office.close(0, "the worker stops")
        all_over = True
        for office in self._offices.values():
            left_s = max(deadline - self._clock.monotonic(), 0.0)
            if not office.close(left_s):
                all_over = False
                if timeout_s:
                    logger.warning("The leadership of %r was not handed over in time.", office.name)
        return all_over

    def report(self) -> list[Leading]:
        """What this worker is to every queue it volunteers for."""
        rows = []
        for name, office in sorted(self._offices.items()):
            term = office.term
            if term is None:
                rows.append(Leading(name, False, 0, 0.0, "standing by", office.election.who))
            else:
                who = office.election.who
                rows.append(Leading(name, term.trusted, term.token, term.since, term.phase.value, who))
        return rows

    def career(self, queue: str) -> Career[Any] | None:
        """The user's career for `queue`, if there is one."""
        return self._careers.get(queue)

    # -- what the transport asks

    def governs(self, queue: str) -> bool:
        """Whether the queue is consumed by its leader only."""
        return queue in self._sections

    def term(self, queue: str) -> int:
        """The token of our term while its messages may be executed; else 0."""
        term = self._term(queue)
        return term.token if term is not None and term.phase is Phase.EXECUTING else 0

    def firm(self, queue: str) -> bool:
        """Whether the next message may start now."""
        term = self._term(queue)
        return term is not None and term.firm

    def stands(self, queue: str, token: int) -> bool:
        """Whether the next message may start now, in that term."""
        permit = self.permit(queue, token)
        return permit is not None and permit.firm

    def permit(self, queue: str, token: int) -> Term | None:
        """The term with this token, to be asked before each message; None when it is over."""
        term = self._term(queue)
        return term if term is not None and term.token == token else None

    def refused(self, queue: str, token: int) -> None:
        """The broker knows a later leader, or has forgotten us."""
        term = self._term(queue)
        if term is not None and term.token == token:
            term.fall("the broker does not know this term")
            self.changed()

    def doubt(self, queue: str, token: int) -> None:
        """A claim got no answer."""
        term = self._term(queue)
        if term is not None and term.token == token:
            term.end("a claim got no answer from the broker")

    def attach(self, queue: str, consumption: Consumption) -> None:
        """From now on this one consumes the queue."""
        self._consumptions[queue] = consumption

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` when something has changed."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Do not call it any more."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    # -- what the duties ask

    def changed(self) -> None:
        """Wake the transport."""
        for listener in tuple(self._listeners):
            listener()

    def busy(self, queue: str, token: int) -> bool:
        """Whether something of that term is held by this process."""
        consumption = self._consumptions.get(queue)
        return consumption is not None and consumption.busy(queue, token)

    def should_yield(self, queue: str) -> bool:
        """Whether another worker should lead this queue, for balance."""
        return self._spread.should_yield(queue)

    def cut_off(self, queue: str, token: int) -> bool:
        """Whether this worker cannot reach the broker, while another one may."""
        consumption = self._consumptions.get(queue)
        return consumption is not None and consumption.cut_off(queue, token)

    def _term(self, queue: str) -> Term | None:
        office = self._offices.get(queue)
        return None if office is None else office.term


class QueueDuties:
    """What the leader of a queue does; see :class:`celery_dq.leadership.office.Duties`."""

    def __init__(
        self,
        leaderships: Leaderships,
        options: SingletonOptions,
        fence: Fence | None,
        guard: Guard,
        kills: bool,
    ) -> None:
        self._leaderships = leaderships
        self._options = options
        self._fence = fence
        self._guard = guard
        self._kills = kills
        #: The highest token that this worker has had.
        self._highest = 0

    def floor(self) -> int:
        """The highest token that the broker or this worker knows.

        The guard kills what runs under a token whose term is over: a server that has forgotten everything
        must not hand out such a token anew.
        """
        epoch = 0 if self._fence is None else self._fence.epoch(self._options.name)
        return max(epoch, self._highest)

    def trust(self, term: Term, until: float) -> None:
        """The process that runs a message lives until then."""
        self._highest = max(self._highest, term.token)
        self._guard.trust(term.name, term.token, until)

    def abort(self, term: Term) -> None:
        """Trust has ended: what runs dies now rather than when its alarm goes off."""
        self._guard.revoke(term.name, term.token)
        self._leaderships.changed()

    def serve(self, term: Term) -> None:
        """One term, from the fence to the hand-over."""
        career = self._leaderships.career(term.name)
        if self._fence is not None and not self._raise_fence(self._fence, term):
            return
        if career is not None:
            career.inaugurate(term.token)
        try:
            if term.inaugurated():
                logger.info("This worker leads the queue %r, token %d.", term.name, term.token)
                self._leaderships.changed()
                while not term.wait(LOOK_OUT_S):
                    if self._leaderships.should_yield(term.name):
                        term.end("another worker leads fewer queues")
                    if self._leaderships.cut_off(term.name, term.token):
                        term.end("the broker does not answer this worker")
        finally:
            self._leaderships.changed()
            self._come_to_rest(term)
            if career is not None:
                career.hand_over()

    def _raise_fence(self, fence: Fence, term: Term) -> bool:
        while not term.ended:
            try:
                epoch = fence.raise_to(term.name, term.token)
            except OSError as error:
                logger.warning("The fence of %r waits for the broker: %s", term.name, error)
                term.wait(PAUSE_S)
                continue
            if epoch > term.token:
                raise Fenced(f"queue {term.name!r} is fenced with token {epoch}, ours is {term.token}")
            return True
        return False

    def _come_to_rest(self, term: Term) -> None:
        """Wait until nothing of the term runs; kill it where that is called for."""
        if self._options.hand_over == "abort" and self._kills:
            self._guard.revoke(term.name, term.token)
        while self._leaderships.busy(term.name, term.token):
            if not self._guard.runs(term.name) and (
                term.phase is Phase.FALLEN or self._leaderships.cut_off(term.name, term.token)
            ):
                # What is left is only bookkeeping, which the broker refuses or does not hear.
                return
            time.sleep(LOOK_S)
