"""Notices that nothing is claimed any more, though there is a backlog and room for it.

The keeper's thread looks; what it suspects is decided in the loop that fetches, which alone knows whether the
connection is deaf or the loop was busy: a task of the solo pool, or a callback of plain kombu, may take
hours.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import redis

if TYPE_CHECKING:
    from celery_dq.transport.redis.process import Process

logger = logging.getLogger(__name__)

#: A loop that is woken and turns again only after so many seconds was busy.
PROMPT_S = 2.0


class Watchdog:
    """The watchdog of one channel.

    Arguments:
        process: whose strikes are counted, over reconnects.
        period_s: seconds without a claim after which the connection is suspected; 0 = never.
    """

    def __init__(self, process: Process, period_s: float) -> None:
        self._process = process
        self.period_s = period_s
        #: Until then there was a reason not to claim: monotonic time.
        self._excused_at = process.clock.monotonic()
        self._suspected_at: float | None = None
        self._busy = False

    # -- in the loop -----------------------------------------------------------

    def busy(self) -> None:
        """A callback is about to be called, for who knows how long."""
        self._busy = True

    def idle(self) -> None:
        """The callback has returned."""
        self._busy = False
        self._excused_at = self._process.clock.monotonic()

    def decide(self, *, may_stop: bool) -> None:
        """Called whenever the loop asks for messages.

        Arguments:
            may_stop: there is a worker, which may be stopped when connecting anew does not help.

        Raises:
            redis.ConnectionError: the connection is deaf.
        """
        suspected_at, self._suspected_at = self._suspected_at, None
        if suspected_at is None:
            return
        now = self._process.clock.monotonic()
        if now - suspected_at > PROMPT_S or self._excused_at > suspected_at:
            self._excused_at = now
            return
        self._process.strikes += 1
        if self._process.strikes > 1 and may_stop:
            self._stop("Connecting anew did not help")
        raise redis.ConnectionError(
            f"There is a backlog and room for it, but nothing was claimed for {self.period_s:.0f} s "
            "(dq_watchdog): connecting anew"
        )

    # -- in the keeper's thread ------------------------------------------------

    def suspects(self, now: float, claimed_at: float, neglects: Callable[[], bool], blocks: bool) -> bool:
        """Return whether the loop is to be woken, to decide.

        Arguments:
            now: monotonic time.
            claimed_at: when the last claim was answered.
            neglects: returns whether there is a backlog, and room for it.
            blocks: callbacks do their work in the loop.
        """
        if not self.period_s or self._busy:
            return False
        suspected_at = self._suspected_at
        if suspected_at is not None:
            # A loop that works by itself knows when it turns again.
            if not blocks and now - suspected_at >= self.period_s:
                self._suspected_at = now
                self._stop("The event loop does not turn")
            return False
        if now - max(claimed_at, self._excused_at) < self.period_s or not neglects():
            return False
        self._suspected_at = now
        return True

    def _stop(self, why: str) -> None:
        """Whoever supervises the worker starts a sound one."""
        logger.critical(
            "There is a backlog and room for it, but nothing was claimed for twice %.0f s (dq_watchdog). "
            "%s: this worker stops.",
            self.period_s,
            why,
        )
        os.kill(os.getpid(), signal.SIGTERM)
