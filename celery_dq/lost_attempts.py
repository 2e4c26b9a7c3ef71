"""Whether a message or its broker is the reason for which attempts to publish it lose their connections.

A server or a proxy closes the connection of a message that exceeds one of its limits. A server that goes away
closes all connections. One attempt cannot tell the two apart. A row of attempts can: in between, the broker
answers other commands on new connections, or it does not.
"""

from __future__ import annotations

import re

__all__ = ["MOST_LOSSES", "MOST_SMALL_LOSSES", "LostAttempts", "means_too_large"]

#: Attempts in a row after whose losses the message is the reason. A storm that closes every second connection
#: loses them, and spares the commands in between, once in 4,000 rows.
MOST_LOSSES = 6
#: The same for a message that no limit of Redis can be about, so that only a proxy may be the reason, or a
#: storm: the pauses before so many attempts take 100 s.
MOST_SMALL_LOSSES = 12
#: Seconds before the third attempt; each further pause is twice as long. A storm may end meanwhile, and a
#: large message is not sent again and again at once.
FIRST_PAUSE_S = 0.1


class LostAttempts:
    """Attempts to publish one message or batch, in a row. Pure.

    Its owner connects again before each attempt, and the broker answers at least one command there.

    Attributes:
        count: Losses in a row since a connection could not be opened, or since the begin.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def lost(self, most: int = MOST_LOSSES) -> bool:
        """Note that the connection was closed after the message, or a part of it, was sent.

        Args:
            most: Losses in a row after which the message is the reason.

        Returns:
            Whether the message is the reason: a further attempt would fail, too.
        """
        self.count += 1
        return self.count >= most

    def broker_failed(self) -> None:
        """Note that the broker cannot be reached, does not answer in time, or refuses commands."""
        self.count = 0

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return 0.0 if self.count < 2 else FIRST_PAUSE_S * 2.0 ** (self.count - 2)


def means_too_large(answer: str) -> bool:
    """Whether a server or a proxy refused a message for its size, and will refuse it again."""
    return bool(re.search(r"too (large|big|long)\b|larger than|exceeds .*(limit|maximum|size)", answer, re.I))
