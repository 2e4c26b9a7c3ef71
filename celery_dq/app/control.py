"""``app.control``: a revoke that lasts.

Celery's revoke tells the workers that run now, and each keeps it in memory: a worker that starts
later runs the task. Here the broker is told first. It takes back what waits, and remembers the id
for a task that is published later.
"""

from __future__ import annotations

from typing import Any

from celery_dq.app.face import dq_of


class LastingControl:
    """Mixed over the app's Control class by ``celery_dq.setup``."""

    app: Any

    def revoke(self, task_id: Any, destination: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Revoke a task, or a list of tasks, in the broker and in all workers.

        Needs no worker: what waits or is delayed is handed, flagged, to the next worker for
        Celery's bookkeeping (state REVOKED, chords) and never runs; an id that is published within
        ``dq_tombstone_ttl`` is treated the same. `destination` names single workers: then only they
        are told, as in Celery, and the broker is not.

        Raises:
            kombu.exceptions.OperationalError: The broker cannot be reached.
        """
        if destination is None:
            ids = [task_id] if isinstance(task_id, str) else list(task_id)
            dq_of(self.app).revoke(ids, connection=kwargs.get("connection"))
        return super().revoke(task_id, destination, *args, **kwargs)  # type: ignore[misc]  # of Celery's Control
