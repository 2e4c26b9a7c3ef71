"""The claims of a channel without an answer: how many there may be, and how they share the free capacity."""

from __future__ import annotations

import math

#: Maximum number of claims under way.
MAX_CLAIMS = 16
#: Messages that the claims under way bring together, by the mean of the last ones. More claims would spread
#: the acks over more queues, and each call carries those of one queue.
BATCH = 16
#: Messages that each of several claims asks for, at least, so that it pays for itself.
MIN_SHARE = 8


class ClaimsUnderWay:
    """The claims of one channel without an answer, at most one for each queue.

    One of them *leads*: only this one may bring a suspect and discards. So two claims never bring two
    suspects, and several claims bring no more discards than one.
    """

    def __init__(self) -> None:
        #: The most messages that each claim may bring, by :attr:`Queue.key`.
        self._wanted: dict[str, int] = {}
        self._leader: str | None = None
        self._mean_brought: float = BATCH

    def __contains__(self, key: object) -> bool:
        return key in self._wanted

    @property
    def may_lead(self) -> bool:
        """Whether the next claim leads."""
        return self._leader is None

    @property
    def may_bring(self) -> int:
        """The most messages that all claims may bring."""
        return sum(self._wanted.values())

    def share(self, want: int, ready: int) -> int:
        """Return how many messages the next claim asks for; 0 for no claim.

        Args:
            want: Number of messages that fit the capacity, beside those that the claims under way may bring.
            ready: Number of queues from which a claim may be sent.
        """
        most = min(math.ceil(BATCH / max(self._mean_brought, 1.0)), MAX_CLAIMS)
        claims = min(most - len(self._wanted), ready)
        return 0 if claims <= 0 else max(min(want, max(-(-want // claims), MIN_SHARE)), 0)

    def add(self, key: str, want: int) -> bool:
        """Add a claim from the queue with this key for *want* messages; return whether it leads."""
        self._wanted[key] = want
        if self._leader is None:
            self._leader = key
        return self._leader == key

    def answered(self, key: str, message_count: int | None) -> None:
        """Remove a claim that brought *message_count* messages; None if it failed."""
        del self._wanted[key]
        if self._leader == key:
            self._leader = None
        if message_count is not None:
            self._mean_brought = 0.8 * self._mean_brought + 0.2 * message_count
