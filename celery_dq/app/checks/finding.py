"""One result of ``celery dq doctor``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from redis.exceptions import TryAgainError

#: The remedy where :func:`slot_moves`.
WAIT_FOR_SLOT = "Wait for the end of the move, and run the command again."


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: ``ok``, ``warning`` or ``error``, by the first letter of the code.
        code: ``E001`` and so on. Codes are stable: Django's ``SILENCED_SYSTEM_CHECKS`` names them.
        problem: the result in one sentence.
        remedy: the action to take; "" when there is none.
    """

    level: Literal["ok", "warning", "error"] = field(init=False)
    code: str
    problem: str
    remedy: str = ""

    def __post_init__(self) -> None:
        level = {"I": "ok", "W": "warning", "E": "error"}[self.code[0]]
        object.__setattr__(self, "level", level)


def reason_of(error: BaseException) -> str:
    """Return the text of a library's error as the end of a sentence, without its own full stops."""
    text = str(error) or type(error).__name__
    return text.rstrip(". ").replace(". ", ": ")


def slot_moves(error: BaseException) -> bool:
    """Return whether an error, or the one behind it, says that a slot of a Redis Cluster moves."""
    return isinstance(error, TryAgainError) or isinstance(error.__cause__, TryAgainError)
