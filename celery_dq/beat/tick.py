"""The identity of a tick: an id and a stamp that are the same for every beat that sends the tick."""

from __future__ import annotations

import uuid
from typing import Any

__all__ = ["TickStamps", "task_id_of"]

#: The namespace of the UUIDs of ticks.
NAMESPACE = uuid.UUID("5f0f3a60-7b1c-4b1e-9d0e-2f6a3f1f8f11")
#: Milliseconds for which the broker keeps the number of an entry's last tick. A beat that was stopped while
#: it sent this tick may continue so much later. Without a limit, markers of deleted entries would stay.
MARKER_TTL_MS = 7 * 24 * 3_600_000


def task_id_of(environment: str, entry_key: str, number: int) -> str:
    """Return the task id of tick `number` of an entry."""
    return str(uuid.uuid5(NAMESPACE, f"{environment}/{entry_key}/{number}"))


class TickStamps(dict[str, Any]):
    """A mapping with the same stamp for every queue, so that any route of the message finds it.

    Args:
        entry_key: The producer sequence of the entry.
        number: Number of the tick.
        task_id: The task id of the tick.
    """

    def __init__(self, entry_key: str, number: int, task_id: str) -> None:
        super().__init__()
        self._stamp = (entry_key, number, task_id, MARKER_TTL_MS)

    def get(self, queue: str, default: Any = None) -> Any:
        """Return the stamp, for any `queue`."""
        return self._stamp
