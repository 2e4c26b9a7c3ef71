"""What the script ``fence`` answers."""

from __future__ import annotations

from typing import Any, NamedTuple


class Fenced(NamedTuple):
    """The answer to a fence.

    ``accepted``: no higher token was here before. ``epoch``: the token that holds now. ``remaining``: so many
    other consumers still hold something: call again.
    """

    accepted: bool
    epoch: int
    remaining: int


def read_fenced(reply: Any) -> Fenced:
    """Parse the reply."""
    return Fenced(int(reply[0]) == 1, int(reply[1]), int(reply[2]))
