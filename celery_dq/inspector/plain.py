"""Snapshots as values that JSON can hold, for ``celery dq … --json`` and the dashboard."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """Return a snapshot as dicts, lists, texts and numbers. Times become texts in ISO 8601.

    Values of other types become their ``str``: a path, or a UUID or a Decimal in the arguments of a task.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
