"""The arguments of a task in a form, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from celery_dq.errors import InvalidRequest
from celery_dq.inspector.plain import plain

__all__ = ["ARGUMENTS", "as_json", "changed_arguments"]

#: The fields of a form, in order.
ARGUMENTS = ("args", "kwargs")
#: Characters of JSON that a form takes for each of them.
LONGEST_JSON = 100_000


def as_json(value: Any) -> str:
    """Return arguments as a form has them; "" for those that cannot be read."""
    return "" if value is None else json.dumps(plain(value), ensure_ascii=False)


def changed_arguments(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a form that differ. An empty field leaves them as they are.

    Raises:
        InvalidRequest: A field is not JSON, or too long.
    """
    changes = {}
    for part in ARGUMENTS:
        text = given.get(part, "").strip()
        if text and (value := _read(part, text)) != plain(before[part]):
            changes[part] = value
    return changes


def _read(part: str, text: str) -> Any:
    if len(text) > LONGEST_JSON:
        raise InvalidRequest(f"{part}: the form takes {LONGEST_JSON} characters; use the command line")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{part} = {text[:60]!r} is not JSON: {exc}") from None
