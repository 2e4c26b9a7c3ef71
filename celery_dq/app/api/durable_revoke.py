"""``app.control``: a durable revoke.

Celery's revoke notifies the workers that run now, and each keeps it in memory: a worker that starts later
runs the task. Here the broker gets the revoke first. It cancels a waiting message, and remembers the id for a
task that is published later.
"""

from __future__ import annotations

from typing import Any

from kombu.utils.functional import maybe_list

from celery_dq.app.api.api import dq_of

#: The commands that revoke tasks by their ids. ``app.control.revoke``, ``result.revoke``, ``celery control``
#: and flower all broadcast one of them.
_REVOKES = ("revoke", "terminate")


class DurableRevoke:
    """Mixed over the app's Control class by ``celery_dq.setup``, to make every revoke durable."""

    app: Any

    def broadcast(
        self,
        command: Any,
        arguments: Any = None,
        destination: Any = None,
        connection: Any = None,
        reply: bool = False,
        timeout: float = 1.0,
        limit: int | None = None,
        callback: Any = None,
        channel: Any = None,
        pattern: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Send a command to all workers; a revoke goes to the broker first.

        No worker need run for it. A waiting or delayed message is marked, delivered to the next worker for
        Celery's bookkeeping (state REVOKED, chords), and never runs. The same holds for an id that is
        published within ``dq_tombstone_ttl``.

        Args:
            command: The name of the command.
            arguments: Its arguments.
            destination: Names of workers. Then only these get the command, as in Celery, and not the broker.
            connection: A kombu connection; default: one of the app's pool.
            reply: Passed to Celery's ``broadcast``, like the next four.
            timeout: Seconds to wait for replies.
            limit: Number of replies to wait for.
            callback: Called with each reply.
            channel: A channel of the connection.
            pattern: Names of workers; only these get the command, as by `destination`.
            args: Passed to Celery's ``broadcast``.
            kwargs: Passed to Celery's ``broadcast``; further arguments of the command are among them.

        Raises:
            kombu.exceptions.OperationalError: The broker cannot be reached.
            InvalidRequest: An id is not a text. No task was revoked.
        """
        if command in _REVOKES and not (destination or pattern):
            given = {**(arguments or {}), **kwargs}.get("task_id")
            dq_of(self.app).revoke([*(maybe_list(given) or ())], connection=connection)
        return super().broadcast(  # type: ignore[misc]  # of Celery's Control
            *(command, arguments, destination, connection, reply, timeout, limit, callback, channel),
            *(pattern, *args),
            **kwargs,
        )
