"""``app.dq``: everything that a program can ask of, or tell, its queues."""

from __future__ import annotations

from typing import Any

from celery_dq.hooks import Wires


def dq_of(app: Any) -> DQ:
    """Return ``app.dq``, made at first need (an unpickled app has none yet)."""
    face: DQ | None = app.__dict__.get("dq")
    if face is None:
        face = app.__dict__.setdefault("dq", DQ(app))
    return face


class DQ:
    def __init__(self, app: Any) -> None:
        self._app = app
        self.wires = Wires("x", lambda: object())

    def revoke(self, ids: list[str], connection: Any = None) -> None:
        pass
