"""``app.send_task``, which every ``apply_async`` and ``delay`` calls: an ordered tuple of stages.

Each stage either returns the result of the call, or passes the call on to the next stage. The order is
``STAGES`` in ``celery_dq.wiring``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.call_tenants import CallTenants
from celery_dq.app.publishing.results import Ids, flushing_result_class, prepare_for_results
from celery_dq.compat.celery_calls import in_task
from celery_dq.dedup.key import MakeKey
from celery_dq.dedup.rule import Dedup
from celery_dq.producer.buffering_producer import BufferingProducer, Published

#: The option with which Celery's ``send_task`` passes the :class:`Call` down to the task sender.
CALL_OPTION = "dq_call"
#: The parameters of Celery's ``send_task`` after ``name``, ``args`` and ``kwargs``.
PARAMETERS = (
    "countdown", "eta", "task_id", "producer", "connection", "router", "result_cls", "expires", "publisher",
    "link", "link_error", "add_to_parent", "group_id", "group_index", "retries", "chord", "reply_to",
    "time_limit", "soft_time_limit", "root_id", "parent_id", "route_name", "shadow", "chain", "task_type",
    "replaced_task_nesting",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Call:
    """One call of ``send_task``.

    Attributes:
        name: the name of the task.
        args: the positional arguments of the task.
        kwargs: the named arguments of the task.
        options: the options of the call, as for Celery's ``send_task``.
        in_task: whether a running task makes the call.
        dedup: the dedup rule of the call and its key maker; None when the call takes no part in dedup.
        request: the dedup request, once the message is published; the broker's verdict is in it.
        producer: the buffer's producer when the call is buffered; None when it is published at once.
        published: is called with the message that Celery makes of the call.
        headers: the headers that Celery has given this message, before a receiver saw them.
        represent: writes the representations of the arguments into the message, in Celery's place; None
            leaves it to Celery.
        routed: the options that Celery's router has made of the options of the call.
    """

    name: str
    args: Any
    kwargs: Any
    options: dict[str, Any]
    in_task: bool = field(default_factory=in_task)
    dedup: tuple[Dedup, MakeKey] | None = None
    request: Any = None
    producer: BufferingProducer | None = None
    published: Published | None = None
    headers: dict[str, Any] = field(default_factory=dict)
    represent: Callable[[Any], None] | None = None
    routed: dict[str, Any] = field(default_factory=dict)

    @property
    def named(self) -> bool:
        """Whether the caller chose the task id, so that the caller, a chain, chord or group knows it."""
        return bool(self.options.get("task_id"))

    @property
    def counts(self) -> bool:
        """Whether the call has a countdown, so that its ETA is by the clock of this machine."""
        return bool(self.options.get("countdown"))


Proceed: TypeAlias = Callable[[Call], Any]


class Stage(Protocol):
    """One step of a call. A stage belongs to one app and is made with it."""

    def send(self, call: Call, proceed: Proceed) -> Any:
        """Return the result of the call, or of ``proceed(call)``, which passes it to the next stage."""


class CallPipeline:
    """Replaces ``send_task`` on one app.

    Args:
        stages: the stages in their order; the last one never proceeds.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        send: Proceed = _no_stage_left
        for stage in reversed(self.stages):
            send = partial(stage.send, proceed=send)
        self._send = send

    def __call__(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a task by name; see Celery's ``send_task``.

        Raises:
            kombu.exceptions.OperationalError: The call could not be sent.
            DuplicateCall: Another call covers this one, and its rule says that this is an error.
            InvalidKey: No dedup key can be made of the call's arguments.
        """
        if more:
            positional = dict(zip(PARAMETERS, more, strict=False))
            if len(more) > len(PARAMETERS) or positional.keys() & options.keys():
                raise TypeError(f"send_task() got an argument twice, or too many of them: {more!r}")
            options.update(positional)
        return self._send(Call(name, args, kwargs, options))


def _no_stage_left(call: Call) -> Any:
    raise RuntimeError(f"{call.name} was not sent: the last stage of the pipeline has passed it on")


class CelerysWay:
    """The last stage: Celery routes the call, builds its message and publishes it.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        #: A ``send_task`` that a program has put on the app. It is called instead of the class's method.
        self._own: Callable[..., Any] | None = dq_of(app).own_send_task
        self._ids = Ids(app)
        self._tenants = CallTenants(app)

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`Stage`."""
        app = self._app
        options = {CALL_OPTION: call, **call.options}
        if not options.get("ignore_result"):
            prepare_for_results(app, dq_of(app).deadline)
        if call.producer is not None:
            options["producer"] = call.producer
            flushing_result_class(app)
        if call.represent is not None:
            # Celery takes a third of its time for a message to make them.
            options["argsrepr"] = options["kwargsrepr"] = ""
        if not options.get("task_id") and self._ids.name_tenants:
            # The body of a chord has an id.
            tenant = self._tenants.of_call(
                call.name, options.get("tenant"), call.args or (), call.kwargs or {}
            )
            options["task_id"] = self._ids.new(tenant.encode())
        if self._own is not None:
            return self._own(call.name, call.args, call.kwargs, **options)
        # Looked up at each call, because monitoring tools replace the class's method at any time.
        return type(app).send_task(app, call.name, call.args, call.kwargs, **options)
