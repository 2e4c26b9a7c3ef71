"""Detects that a channel claims nothing despite a backlog and free capacity.

The consumer thread suspects, and the delivering thread decides: the event loop of a worker, or the caller of
``drain_events``. Only that one knows whether it was busy itself: a task of the solo pool, or a callback of
plain kombu, may take hours.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import redis

from celery_dq.shown import shown_logger

if TYPE_CHECKING:
    from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity

logger = shown_logger(__name__)

#: Longest delay, in seconds, with which an idle delivering thread turns after a wake-up. A longer one means
#: that it was busy.
PROMPT_S = 2.0


class Watchdog:
    """The watchdog of one channel.

    Args:
        identity: Consumer identity of the process, which counts failed periods over reconnects.
        period_s: Seconds without a claim after which the connection is suspected; 0 means never.
    """

    def __init__(self, identity: ConsumerIdentity, period_s: float) -> None:
        self._identity = identity
        self.period_s = period_s
        #: Monotonic time until which the consumer had a reason not to claim.
        self._excused_at = identity.clock.monotonic()
        #: Monotonic time of a suspicion on which :meth:`decide` has not decided; None without one.
        self.suspected_at: float | None = None
        self._busy = False

    # -- called by the delivering thread ---------------------------------------

    def consumer_busy(self) -> None:
        """Record that a callback starts, which may take hours."""
        self._busy = True

    def consumer_idle(self) -> None:
        """Record that the callback has returned."""
        self._busy = False
        self._excused_at = self._identity.clock.monotonic()

    def decide(self, *, may_stop: bool) -> None:
        """Decide on a suspicion.

        Args:
            may_stop: Whether a worker uses the channel, which stops if a new connection did not help.

        Raises:
            redis.ConnectionError: The connection is dead.
        """
        suspected_at, self.suspected_at = self.suspected_at, None
        if suspected_at is None:
            return
        now = self._identity.clock.monotonic()
        if now - suspected_at > PROMPT_S or self._excused_at > suspected_at:
            self._excused_at = now
            return
        self._identity.watchdog_strikes += 1
        if self._identity.watchdog_strikes > 1 and may_stop:
            self._stop("A new connection did not help")
        raise redis.ConnectionError(
            f"Worker {self._identity.consumer} claimed nothing for {self.period_s:.0f} s (dq_watchdog) "
            "despite a backlog and free slots: connecting again"
        )

    # -- called by the consumer thread -----------------------------------------

    def is_suspicious(
        self, now: float, claimed_at: float, neglects: Callable[[], bool], blocks: bool
    ) -> bool:
        """Return whether to wake the delivering thread, so that it decides.

        Args:
            now: Monotonic time.
            claimed_at: Monotonic time of the last answered claim.
            neglects: Returns whether there are a backlog and free capacity.
            blocks: Whether callbacks do their work in the delivering thread.
        """
        if not self.period_s or self._busy:
            return False
        suspected_at = self.suspected_at
        if suspected_at is not None:
            # A loop that runs tasks itself decides when it turns again, however late that is.
            if not blocks and now - suspected_at >= self.period_s:
                self.suspected_at = now
                self._stop("The event loop does not turn")
            return False
        if now - max(claimed_at, self._excused_at) < self.period_s or not neglects():
            return False
        self.suspected_at = now
        return True

    def _stop(self, why: str) -> None:
        """Stop the worker, so that its supervisor starts a new one."""
        logger.critical(
            "Worker %s claimed nothing for twice %.0f s (dq_watchdog) despite a backlog and free slots. "
            "%s: the worker stops, so that its supervisor starts it again.",
            self._identity.consumer,
            self.period_s,
            why,
            extra={"event": "watchdog_stopped_worker"},
        )
        os.kill(os.getpid(), signal.SIGTERM)
