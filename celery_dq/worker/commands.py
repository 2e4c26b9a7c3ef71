"""What ``celery inspect`` can ask a worker of celery-dq."""

from __future__ import annotations

from typing import Any

from celery.worker.control import control_command, inspect_command

from celery_dq.hooks import WIRES, Wires


@inspect_command()
def leaders(state: Any) -> list[dict[str, Any]]:
    """Which queues this worker leads, since when, and with which fencing token."""
    terms = _terms(state)
    return [] if terms is None else [row._asdict() for row in terms.report()]


@control_command(args=[("queue", str)], signature="<queue>")
def resign(state: Any, queue: str) -> Any:
    """Hand a led queue over to the next candidate when the running message has ended."""
    terms = _terms(state)
    leads = {row.queue: bool(row.token) for row in terms.report()} if terms is not None else {}
    if queue not in leads:
        return {"error": f"this worker does not volunteer for a queue {queue!r}"}
    if not leads[queue]:
        return {"ok": f"stands by for {queue!r}, and has nothing to hand over"}
    terms.resign(queue, "asked to")
    return {"ok": f"hands over {queue!r}"}


def _terms(state: Any) -> Any:
    wires = state.consumer.conninfo.transport_options.get(WIRES)
    return wires.terms if isinstance(wires, Wires) else None
