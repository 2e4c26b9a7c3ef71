"""``app.control``: a durable revoke.

Celery's revoke notifies the workers that run now, and each keeps it in memory: a worker that starts later
runs the task. Here the broker gets the revoke first. It cancels a waiting message, and remembers the id for a
task that is published later.
"""

from __future__ import annotations

from typing import Any

from celery_dq.app.api.api import dq_of


class DurableRevoke:
    """Mixed over the app's Control class by ``celery_dq.setup``, to make ``revoke`` durable."""

    app: Any

    def revoke(self, task_id: Any, destination: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Revoke a task, or a list of tasks, in the broker and in all workers.

        No worker need run. A waiting or delayed message is marked, delivered to the next worker for Celery's
        bookkeeping (state REVOKED, chords), and never runs. The same holds for an id that is published within
        ``dq_tombstone_ttl``.

        Args:
            task_id: The id of a task, or a list of ids.
            destination: Names of workers. Then only these get the revoke, as in Celery, and not the broker.
            args: Passed to Celery's ``revoke``.
            kwargs: Passed to Celery's ``revoke``.

        Raises:
            kombu.exceptions.OperationalError: The broker cannot be reached.
        """
        if destination is None:
            ids = [task_id] if isinstance(task_id, str) else list(task_id)
            dq_of(self.app).revoke(ids, connection=kwargs.get("connection"))
        return super().revoke(task_id, destination, *args, **kwargs)  # type: ignore[misc]  # of Celery's Control
