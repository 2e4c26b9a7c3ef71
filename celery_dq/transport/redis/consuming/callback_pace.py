"""How long the callbacks of a channel take: the mean for claims ahead, and the longest for next looks."""

from __future__ import annotations

import math

from celery_dq.clock import Clock

#: Maximum number of messages that a consumer without a prefetch count receives ahead.
MAX_AHEAD = 64
#: Shortest service time, in seconds, beside which the cost of a claim between two messages is negligible.
LONG_SERVICE_S = 0.0005
#: Share of the mean service time that the last callback makes up.
LAST_SHARE = 0.3
#: Part of the longest callback that still counts after one more callback. After a callback of ten seconds, a
#: consumer counts as brief again when 230 callbacks were short.
FADE = 0.98
#: Longest brief callback, in times of the claim-ahead time: messages may wait for that long in any case.
BRIEF_AHEADS = 2


class CallbackPace:
    """The time that a consumer takes for one message, where callbacks run in the loop.

    While a callback runs, the loop does not turn, so that this process keeps no next look. Where callbacks
    are *brief*, it keeps them all the same: to hand every look over before each callback would cost a script
    for each queue and message. If a callback lasts long after many brief ones, the heartbeats of other
    consumers find the looks that are overdue.

    Args:
        clock: measures by its monotonic time.
        claim_ahead_s: Service time that may be claimed ahead, in seconds.
    """

    def __init__(self, clock: Clock, claim_ahead_s: float) -> None:
        self._clock = clock
        self._claim_ahead_s = claim_ahead_s
        #: Monotonic time of the last delivery.
        self.delivered_at = clock.monotonic()
        self._is_timing = False
        #: Mean service time in seconds; None before the first callback has ended.
        self.mean_s: float | None = None
        self._longest_s = math.inf

    def begin(self, is_timed: bool) -> None:
        """Note a delivery.

        Args:
            is_timed: Whether the callback runs in the loop, so that its time is measured.
        """
        self.delivered_at = self._clock.monotonic()
        self._is_timing = is_timed

    def end(self) -> None:
        """Take the time since the last delivery for the service time of its message, once."""
        if not self._is_timing:
            return
        self._is_timing = False
        seen_s = self._clock.monotonic() - self.delivered_at
        if self.mean_s is None:
            self.mean_s = self._longest_s = seen_s
        else:
            self.mean_s += LAST_SHARE * (seen_s - self.mean_s)
            self._longest_s = max(seen_s, FADE * self._longest_s)

    @property
    def is_brief(self) -> bool:
        """Whether no callback was long lately. Before the first one, this is not known."""
        return self._longest_s <= BRIEF_AHEADS * self._claim_ahead_s

    def messages_ahead(self) -> int:
        """Return how many messages fit the claim-ahead time, for a consumer without a prefetch count."""
        ahead = 1 if self.mean_s is None else int(self._claim_ahead_s / max(self.mean_s, 1e-6))
        return min(max(ahead, 1), MAX_AHEAD)

    def was_long_since(self, since: float) -> bool:
        """Return whether the last message took longer than a claim takes.

        Args:
            since: Monotonic end of the last wait for sockets. Service time is counted from there or from the
                last delivery, the later of both.
        """
        return self._clock.monotonic() - max(self.delivered_at, since) >= LONG_SERVICE_S
