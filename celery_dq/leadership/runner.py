"""Careers outside of Celery: stand for election, and lead a :class:`~.career.Career` when elected.

.. code-block:: python

    class Ledger(Career):
        def inaugurate(self, token):
            self.token = token

        def execute(self, message):
            database.execute("… where token <= %s", self.token)
            return True

    session = Session("zoo1:2181,zoo2:2181,zoo3:2181/shop")
    election = ZooKeeperElection(session, LeadershipNodes("online", "ledger"), who="ledger-1")
    with Runner(Ledger(), election, source=lambda timeout_s: inbox.get(timeout=timeout_s)):
        ...
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import Empty
from types import TracebackType
from typing import Any, Generic, TypeVar

from celery_dq.clock import Clock
from celery_dq.leadership.career import Career, Term
from celery_dq.leadership.election import Election
from celery_dq.leadership.office import Office

__all__ = ["Runner"]

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

#: How long the source may wait for a message, in seconds, before the term is looked at again.
SOURCE_WAIT_S = 0.2
#: Seconds between two looks at a term that is in doubt.
DOUBT_LOOK_S = 0.01


class Runner(Generic[Message]):
    """Leads a career, now and then. A context manager; or call :meth:`open` and :meth:`close`.

    :param source: called with a number of seconds to wait, returns the next message; :exc:`queue.Empty` or
        None when there is none. Default: ``execute(None)`` is called again and again. A message that it
        returns is executed, also when the term began to end while it was waited for, unless the term has
        fallen.
    :param give_back: called with a message that was taken and is not executed, because the term has fallen
        meanwhile, so that others may have it. Without it such a message is gone; the log says so.
    :param grace_s: see :class:`~celery_dq.leadership.office.Office`.
    :param on_fall: called when trust ends while :meth:`Career.execute` may run. A thread cannot be
        stopped from outside; where an overlap of execution is worse than a crash, end the process here.
    """

    def __init__(
        self,
        career: Career[Message],
        election: Election,
        *,
        source: Callable[[float], Message | None] | None = None,
        give_back: Callable[[Message], None] | None = None,
        grace_s: float = 0.0,
        on_fall: Callable[[Term], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._career = career
        self._source = source
        self._give_back = give_back
        self._on_fall = on_fall
        self.office = Office(election, self, grace_s=grace_s, clock=clock)

    @property
    def term(self) -> Term | None:
        """The present term; None while somebody else leads."""
        return self.office.term

    def open(self) -> Runner[Message]:
        """Volunteer."""
        self.office.open()
        return self

    def resign(self) -> None:
        """Hand over when the message in hand is done, and stand again behind the others."""
        self.office.resign()

    def close(self, timeout_s: float | None = 10.0) -> bool:
        """Hand over and stand no more. Returns whether the work ended within `timeout_s` seconds."""
        return self.office.close(timeout_s)

    def __enter__(self) -> Runner[Message]:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the duties of the office

    def floor(self) -> int:
        """No token is known elsewhere."""
        return 0

    def serve(self, term: Term) -> None:
        """One term, from inauguration to hand-over."""
        self._career.inaugurate(term.token)
        try:
            term.inaugurated()
            while _becomes_firm(term):
                # None for a career without a source, which is made for that.
                message: Any = self._next()
                if message is None and self._source is not None:
                    continue
                # Waiting for the message took time; what is asked here is what counts.
                if not _becomes_sure(term):
                    self._return(message, term)
                elif not self._career.execute(message):
                    term.end("the career does not go on")
        finally:
            self._career.hand_over()

    def trust(self, term: Term, until: float) -> None:
        """Whoever wants to know asks the term."""

    def abort(self, term: Term) -> None:
        """Trust has ended."""
        if self._on_fall is not None:
            self._on_fall(term)

    def _next(self) -> Message | None:
        if self._source is None:
            return None
        try:
            return self._source(SOURCE_WAIT_S)
        except Empty:
            return None

    def _return(self, message: Any, term: Term) -> None:
        """The term has fallen with the message in hand."""
        if self._source is None:
            return
        if self._give_back is not None:
            self._give_back(message)
        else:
            logger.error(
                "A message of %r is lost: the term fell before it was executed, and there is no give_back.",
                term.name,
            )


def _becomes_firm(term: Term) -> bool:
    """Wait while the term is in doubt; return whether it is firm, else it has come to its end."""
    while not term.firm:
        if term.wait(DOUBT_LOOK_S):
            return False
    return True


def _becomes_sure(term: Term) -> bool:
    """Wait while the term is in doubt, ending or not; return whether what was taken may start."""
    while not term.lasts:
        if not term.trusted:
            return False
        # An ending term has nothing more to wait for: this is until a renewal is confirmed.
        time.sleep(DOUBT_LOOK_S)
    return True
