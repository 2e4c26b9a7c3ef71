"""One result of ``celery dq doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "reason_of"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: ``ok``, ``warning`` or ``error``.
        code: ``E001`` and so on. Codes are stable: Django's ``SILENCED_SYSTEM_CHECKS`` names them.
        problem: the result in one sentence.
        remedy: the action to take; "" when there is none.
    """

    level: Literal["ok", "warning", "error"]
    code: str
    problem: str
    remedy: str = ""


def reason_of(error: BaseException) -> str:
    """Return the text of a library's error as the end of a sentence, without its own full stops."""
    text = str(error) or type(error).__name__
    return text.rstrip(". ").replace(". ", ": ")
