"""Careers outside of Celery: take part in an election, and run a :class:`~.career.Career` when elected."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty
from types import TracebackType
from typing import Any, Generic, TypeVar

from celery_dq.clock import Clock
from celery_dq.leadership.career import Career, Term
from celery_dq.leadership.elector import Election, LeaderCallbacks, LeaderElector
from celery_dq.shown import shown_logger

__all__ = ["Runner"]

logger = shown_logger(__name__)

Message = TypeVar("Message")

#: Maximum seconds that the source may wait for a message before the term is checked again.
SOURCE_WAIT_S = 0.2
#: Seconds between two checks of a term that is in doubt.
DOUBT_LOOK_S = 0.01


class Runner(LeaderCallbacks, Generic[Message]):
    """Runs a career in each term that its candidate wins.

    Use it as a context manager, or call :meth:`open` and :meth:`close`.

    Args:
        career: The career.
        election: The election.
        source: Called with a number of seconds to wait; returns the next message, or raises
            :exc:`queue.Empty` or returns None if there is none. A returned message is executed even if the
            term has begun to end in the meantime, unless the term has fallen. Default: ``execute(None)`` is
            called repeatedly.
        requeue: Called with a message that was taken and not executed to its end, so that another process
            may get it: the term fell before its execution, or :meth:`Career.execute` raised. Without this
            callback, or if it raises, the message is lost, with a log record.
        grace_s: See :class:`~celery_dq.leadership.elector.LeaderElector`.
        on_fall: Called when trust ends while :meth:`Career.execute` may run. A thread cannot be stopped from
            outside. If overlapping executions are worse than a crash, end the process here.
        floor: Called before each election; returns the highest token that the receivers of the effects know.
            The next token is above it, also if the server of the election has lost its data. Default: only
            the tokens of this process are known.
        clock: Wall and monotonic time.
    """

    def __init__(
        self,
        career: Career[Message],
        election: Election,
        *,
        source: Callable[[float], Message | None] | None = None,
        requeue: Callable[[Message], None] | None = None,
        grace_s: float = 0.0,
        on_fall: Callable[[Term], None] | None = None,
        floor: Callable[[], int] = lambda: 0,
        clock: Clock | None = None,
    ) -> None:
        self._career = career
        self._source = source
        self._requeue = requeue
        self._on_fall = on_fall
        self._floor = floor
        self.elector = LeaderElector(election, self, grace_s=grace_s, clock=clock)

    @property
    def term(self) -> Term | None:
        """The current term; None while this candidate does not lead."""
        return self.elector.term

    def open(self) -> Runner[Message]:
        """Become a candidate."""
        self.elector.open()
        return self

    def resign(self) -> None:
        """Hand over after the current message, and become a candidate behind the others."""
        self.elector.resign()

    def close(self, timeout_s: float | None = 10.0) -> bool:
        """Hand over and end the candidacy.

        Args:
            timeout_s: Maximum seconds to wait; default 10, None means without a limit.

        Returns:
            Whether the work has ended in time.
        """
        return self.elector.close(timeout_s)

    def __enter__(self) -> Runner[Message]:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- callbacks of the elector

    def floor(self) -> int:
        """Return the highest token that is known outside of the election."""
        return self._floor()

    def serve(self, term: Term) -> None:
        """Run the career for one term, from inauguration to hand-over."""
        self._career.term = term
        self._career.inaugurate(term.token)
        try:
            term.inaugurated()
            while _becomes_firm(term):
                # A career without a source is called with None.
                message: Any = self._next()
                if message is None and self._source is not None:
                    continue
                # The term may have ended while the source waited: check it again.
                if not _becomes_sure(term):
                    self._return(message, term, "the term fell before its execution began")
                elif not self._execute(message, term):
                    term.end("the career resigned")
        finally:
            self._career.hand_over()

    def abort(self, term: Term) -> None:
        """Call `on_fall`."""
        if self._on_fall is not None:
            self._on_fall(term)

    def _execute(self, message: Any, term: Term) -> bool:
        try:
            return self._career.execute(message)
        except BaseException:
            self._return(message, term, "its execution raised")
            raise

    def _next(self) -> Message | None:
        if self._source is None:
            return None
        try:
            return self._source(SOURCE_WAIT_S)
        except Empty:
            return None

    def _return(self, message: Any, term: Term, why: str) -> None:
        """Give a message back that was not executed to its end."""
        if self._source is None:
            return
        if self._requeue is None:
            logger.error(
                "A message of %r is lost: %s, and there is no requeue callback. Set one to keep messages.",
                term.name,
                why,
                extra={"event": "career_message_lost"},
            )
            return
        try:
            self._requeue(message)
        except Exception:
            logger.exception(
                "A message of %r is lost: %s, and the requeue callback raised an error.",
                term.name,
                why,
                extra={"event": "career_message_lost"},
            )


def _becomes_firm(term: Term) -> bool:
    """Wait while the term is in doubt; return True when it is firm, False when it ends."""
    while not term.is_firm:
        if term.wait(DOUBT_LOOK_S):
            return False
    return True


def _becomes_sure(term: Term) -> bool:
    """Wait while the term is in doubt, also while it ends; return whether a taken message may start."""
    while not term.is_running:
        if not term.is_trusted:
            return False
        # `term.wait` returns at once for an ending term, so this polls until a renewal is confirmed.
        time.sleep(DOUBT_LOOK_S)
    return True
