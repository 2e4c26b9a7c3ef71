"""The answer of the script ``fence``."""

from __future__ import annotations

from typing import Any, NamedTuple


class FenceReply(NamedTuple):
    """The answer of the script.

    Attributes:
        accepted: the partition has not seen a higher fencing token before.
        epoch: the fencing token that holds now.
        remaining: number of other consumers that still have messages in flight: call again.
    """

    accepted: bool
    epoch: int
    remaining: int


def read_fence_reply(reply: Any) -> FenceReply:
    """Parse the reply."""
    return FenceReply(int(reply[0]) == 1, int(reply[1]), int(reply[2]))
