"""Mix behaviour into the classes from which a Celery app makes its parts, and attributes into its requests.

Celery makes ``app.amqp`` and ``app.control`` from ``app.amqp_cls`` and ``app.control_cls``, each a class or
the name of one. Users put their own classes there. The mixin is therefore put over the class that is found
when the part is made.

``app.control`` gets a durable revoke. Celery's revoke notifies the workers that run now, and each keeps it in
memory: a worker that starts later runs the task. Here the broker gets the revoke first. It cancels a waiting
message, and remembers the id for a task that is published later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery.app.task import Context
from celery.result import EagerResult
from celery.utils.imports import symbol_by_name
from kombu.utils.functional import maybe_list

from celery_dq.app.api.api import dq_of
from celery_dq.dedup.machine import Verdict
from celery_dq.protocols import (
    DEDUP_HEADER,
    DELIVERIES_HEADER,
    QUEUE_HEADER,
    RESOURCE_HEADER,
    TOKEN_HEADER,
)
from celery_dq.singleton.guard import Guard
from celery_dq.transport.resource_set import resources_of


@dataclass(frozen=True)
class MixedIn:
    """A callable in the place where Celery expects the class of a part.

    It is not a class made at run time, because a pickled app contains ``amqp_cls`` and ``control_cls``.

    Attributes:
        base: The app's own class, or its name.
        mixin: The class to mix over it.
    """

    base: Any
    mixin: type

    def __call__(self, app: Any) -> Any:
        """Make the part."""
        base: Any = symbol_by_name(self.base)
        made: Any = base if issubclass(base, self.mixin) else mixed_class(base, self.mixin)
        return made(app=app)


def mixed_class(base: type, mixin: type) -> type:
    """Return a class of the name of `base` with `mixin` in front of it."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def mix_into(app: Any, part: str, mixin: type) -> None:
    """Mix `mixin` into the part of `app`, also when the part exists already. Idempotent.

    Args:
        app: A Celery app.
        part: ``"amqp"`` or ``"control"``: the cached property of the app.
        mixin: The class to mix in.
    """
    attribute = f"{part}_cls"
    base = getattr(app, attribute)
    if not (isinstance(base, MixedIn) and base.mixin is mixin):
        setattr(app, attribute, MixedIn(base, mixin))
    made = app.__dict__.get(part)  # Celery's cached_property keeps it there
    if made is not None and not isinstance(made, mixin):
        made.__class__ = mixed_class(type(made), mixin)
        # Celery builds its sender once; the next publish builds it again, through the mixin.
        made.__dict__.pop("send_task_message", None)


def define_attributes() -> None:
    """Give requests and eager results defaults of attributes, for when no broker sets them. Idempotent.

    Without them ``self.request.dq_token`` raises ``AttributeError`` in a task that runs in the caller's
    process (``apply``, ``task_always_eager``), and ``self.request.dq_deliveries`` on every first delivery.
    """
    # Celery leaves attributes of the class out of request.headers, so that a retry inherits none of these.
    request: Any = Context
    defaults: tuple[tuple[str, Any], ...] = (
        (TOKEN_HEADER, 0),
        (DELIVERIES_HEADER, 0),
        (QUEUE_HEADER, ""),
        (RESOURCE_HEADER, _OnlyResource()),
        (DEDUP_HEADER, None),
    )
    for name, default in defaults:
        setattr(request, name, default)
    request.dq_term_ending = property(_term_ending)
    eager: Any = EagerResult
    # An eager task always runs, whatever its key is.
    eager.verdict = Verdict.ACCEPT
    eager.covering = property(_own_id)


class _OnlyResource:
    """The resource of a message that no set has: its tenant. The header of a message of a set hides this."""

    def __get__(self, request: Any, owner: object = None) -> str:
        """Return the tenant that the caller has named."""
        properties = None if request is None else request.properties
        tenant = str((properties or {}).get("tenant") or "")
        return tenant if resources_of(tenant) is None else ""


def _term_ending(request: Any) -> bool:
    """Return whether the term in which a message of a singleton queue runs is ending."""
    guard, token = Guard.current, request.dq_token
    # A run under a dedup lock has a token, too, but no queue.
    if guard is None or not (token and request.dq_queue):
        return False
    return guard.is_ending(request.dq_queue, token)


def _own_id(result: Any) -> Any:
    """Return the task id: an accepted call is covered by itself."""
    return result.id


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
                The same holds for ``pattern``.
            connection: A kombu connection; default: one of the app's pool.
            args: Passed to Celery's ``broadcast``.
            kwargs: Passed to Celery's ``broadcast``; further arguments of the command are among them.

        Raises:
            kombu.exceptions.OperationalError: The broker cannot be reached.
            InvalidRequest: An id is not a text. No task was revoked.
        """
        # Celery's parameters are reply, timeout, limit, callback, channel and pattern.
        pattern = args[5] if len(args) > 5 else kwargs.get("pattern")
        if command in _REVOKES and not (destination or pattern):
            given = {**(arguments or {}), **kwargs}.get("task_id")
            dq_of(self.app).revoke([*(maybe_list(given) or ())], connection=connection)
        broadcast = super().broadcast  # type: ignore[misc]  # of Celery's Control
        return broadcast(command, arguments, destination, connection, *args, **kwargs)
