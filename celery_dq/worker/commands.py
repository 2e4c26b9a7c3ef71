"""What ``celery inspect`` can ask a worker of celery-dq."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from celery_dq.hooks import WIRES, Wires


@inspect_command()
def leaders(state: Any) -> list[dict[str, Any]]:
    """Which queues this worker leads, since when, and with which fencing token."""
    wires = state.consumer.conninfo.transport_options.get(WIRES)
    terms: Any = wires.terms if isinstance(wires, Wires) else None
    return [] if terms is None else [row._asdict() for row in terms.report()]
