"""Numbers as the forms of the dashboard have them."""

from __future__ import annotations

__all__ = ["exact"]


def exact(value: float) -> str:
    """Return a number in its short form, or in full if that would lose digits."""
    short = f"{value:g}"
    return short if float(short) == value and "e" not in short else repr(value)
