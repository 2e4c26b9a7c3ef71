"""Message templates of plain calls.

A template is made of the message of the first call of its kind, which takes Celery's way. It has the routing,
headers and properties of that kind. The next call adds its id, arguments, their representations and the
tenant. Any other call takes Celery's way each time: with links, groups, stamps, ETA, expiry, own headers,
routers that look at arguments, receivers of ``before_task_publish`` and so on. So does every call while a
monitoring tool has replaced a method that a template would skip, because the tool must see each call.
"""

from __future__ import annotations

import os
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from celery import Celery, signals
from celery._state import _task_stack  # type: ignore[attr-defined]  # not in its stubs
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from kombu import Producer

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.amqp import DQAmqp, TenantRules
from celery_dq.producer.sender import Addressed
from celery_dq.producer.template import BodyWriter, Ids, json_is_kombus, plain_args, plain_kwargs, quoted
from celery_dq.transport.redis.store.publisher import STAMPS, stamp
from celery_dq.transport.redis.store.record import TEXT, RedisRecord, pack_joined
from celery_dq.transport.tenant import Rule, check_tenant

__all__ = ["Kind", "MessageTemplates", "MessageTemplate", "in_task"]

#: What calls with the same template have in common: the name of the task, and options with their values.
Kind: TypeAlias = tuple[Any, ...]

#: Options by which calls are of different kinds.
_KIND = frozenset(
    ("queue", "priority", "ignore_result", "time_limit", "soft_time_limit", "serializer", "delivery_mode")
)
#: Options that a template takes from each call.
_FILLED = frozenset(
    ("task_id", "tenant", "result_cls", "task_type", "add_to_parent", "retry", "retry_policy")
)
_ID, _ARGS, _KWARGS, _REPLY = ("@dq-id@", "@dq-args@", "@dq-kwargs@", "@dq-reply@")
_before, _after, _sent = signals.before_task_publish, signals.after_task_publish, signals.task_sent
_KNOWN_PROPERTIES = frozenset(
    ("correlation_id", "reply_to", "delivery_mode", "priority", "delivery_info", "tenant", STAMPS)
)
#: Headers that Celery writes into every message. Other headers, such as a trace, may belong to a single call.
_KNOWN_HEADERS = {
    "lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries",
    "timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin",
    "ignore_result", "replaced_task_nesting", "stamped_headers", "stamps",
}  # fmt: skip
#: Headers of Celery that are empty in a plain call.
_EMPTY_HEADERS = ("parent_id", "eta", "expires", "shadow", "group", "group_index", "stamped_headers")
#: Celery's storage of the stacks of running tasks, unless Celery keeps them per thread.
_running: Any = getattr(getattr(_task_stack, "_local", None), "__storage__", None)
#: Makes a named tuple without a call of its own ``__new__``.
_addressed = tuple.__new__


def in_task() -> bool:
    """Whether a task makes the call: then the call is a child of that task."""
    # The storage is empty while no task runs. Looking at it is quicker than looking for the stack.
    if _running is not None and not _running:
        return False
    return bool(_task_stack.stack)


class MessageTemplate(NamedTuple):
    """The parts that calls of one kind share.

    Attributes:
        name: the name of the task.
        lane: the lane of the buffer to which the messages go.
        priority: the priority of the messages.
        task: the encoded name of the task.
        envelopes: four templates, at the index 1 (there are args) + 2 (there are kwargs). They take the id,
            the representations of args and kwargs where there are some, and the address for replies.
        rule: computes the tenant from the arguments.
    """

    name: str
    lane: str
    priority: int
    task: bytes
    envelopes: tuple[str, ...]
    rule: Rule | None


class MessageTemplates:
    """The message templates of one app in one process.

    Args:
        app: a Celery app whose broker is one of celery-dq.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._amqp = app.amqp
        self._ids = Ids()
        self._bodies = BodyWriter()
        #: Checked names of tenants, to their encoded form.
        self._tenants: dict[str, bytes] = {}
        self._templates: dict[Kind, MessageTemplate | None] = {}
        self._rules = TenantRules(app)
        self._router = app.amqp.router
        self.pid = os.getpid()
        #: Whether calls that are not buffered may use a template; None until a stage has asked.
        self.publishes: bool | None = None
        self._skipped = (Celery.send_task, Producer.publish, Producer._publish)
        self._stock = self._is_stock()

    def _is_stock(self) -> bool:
        """Whether Celery's own code builds this app's messages, and no tool or event observes them."""
        app, amqp = self._app, self._amqp
        conf = app.conf
        build = amqp.create_task_message
        return (
            type(app).send_task is Celery.send_task
            and dq_of(app).own_send_task is None
            and _is_original(Celery.send_task, "celery.app.base")
            and _is_original(Producer.publish, "kombu.messaging")
            and _is_original(Producer._publish, "kombu.messaging")
            and getattr(build, "__func__", None) is AMQP.as_task_v2
            and _is_original(AMQP.as_task_v2, "celery.app.amqp")
            and _definers(type(amqp), "_create_task_sender") == [DQAmqp, AMQP]
            and min(amqp.argsrepr_maxsize, amqp.kwargsrepr_maxsize) >= 1024
            and (conf.task_serializer or "json") == "json"
            and not conf.task_compression
            and not conf.task_send_sent_event
            and all(isinstance(route, MapRoute) for route in amqp.router.routes)
            and json_is_kombus()
        )

    @property
    def allowed(self) -> bool:
        """Whether a call may use a template now: no receiver, route or replaced method forbids it."""
        # `amqp.router` would be slow to read: it is a cached property of kombu.
        amqp = self._amqp.__dict__
        send_task, publish, publish_prepared = self._skipped
        return (
            self._stock
            and not _before.receivers
            and not _after.receivers
            and not _sent.receivers
            and amqp.get("router") is self._router
            and amqp.get("send_task_message") is amqp.get("task_sender")
            and Celery.send_task is send_task
            and Producer.publish is publish
            and Producer._publish is publish_prepared
        )

    def get(self, kind: Kind) -> MessageTemplate | None:
        """The template of calls of the kind; None when they go Celery's way."""
        return self._templates.get(kind)

    def knows(self, kind: Kind) -> bool:
        """Whether a call of the kind was seen; the kind may be one that always goes Celery's way."""
        return kind in self._templates

    def kind_of(self, name: str, options: dict[str, Any]) -> Kind | None:
        """The kind of a call; None when it has to go Celery's way."""
        kind: list[Any] = [name]
        # None overrides an option of the task where `send_task` looks the task's options up.
        type_is_default = options.get("task_type") is None
        for option, value in options.items():
            if option in _FILLED:
                continue
            if value is None:
                if type_is_default:
                    kind += (option, None)  # a pair, because a queue may have the name of an option
                continue
            if option not in _KIND or type(value) not in (str, int, bool, float):
                return None
            kind += (option, value)
        return tuple(kind)

    def fill(
        self, template: MessageTemplate, args: Any, kwargs: Any, task_id: Any = None, tenant: Any = None
    ) -> tuple[str, Addressed] | None:
        """Make the id and the message of a call from its template; None when it has to go Celery's way."""
        args_text = plain_args(args) if args else "()"
        kwargs_text = plain_kwargs(kwargs) if kwargs else "{}"
        if args_text is None or kwargs_text is None:
            return None
        if task_id is None:
            task_id = self._ids.new()
        elif type(task_id) is not str or not 0 < len(task_id) <= 50:
            return None
        try:
            body = self._bodies.write(args, kwargs)
        except Exception:
            self._bodies = BodyWriter()
            return None  # on Celery's way Celery raises its own error
        if tenant is None and template.rule is None:
            owner = b""
        else:
            chosen = (
                tenant
                if tenant is not None or template.rule is None
                else template.rule(args or (), kwargs or {})
            )
            known = self._tenants.get(chosen) if type(chosen) is str else None
            owner = self._checked(chosen, template.name, named=tenant is not None) if known is None else known
        reply = quoted(self._app.thread_oid)
        if args_text == "()":
            if kwargs_text == "{}":
                filled = template.envelopes[0] % (quoted(task_id), reply)
            else:
                filled = template.envelopes[2] % (quoted(task_id), quoted(kwargs_text), reply)
        elif kwargs_text == "{}":
            filled = template.envelopes[1] % (quoted(task_id), quoted(args_text), reply)
        else:
            filled = template.envelopes[3] % (quoted(task_id), quoted(args_text), quoted(kwargs_text), reply)
        # The body is ASCII.
        content = (filled + body).encode("utf-8", "surrogatepass")
        record = pack_joined(owner, template.task, template.priority, TEXT, content, len(content) - len(body))
        return task_id, _addressed(Addressed, (template.lane, task_id.encode(), record))

    def _checked(self, tenant: Any, name: str, *, named: bool) -> bytes:
        where = f"{name}: tenant" if named else f"tenant of task {name}"
        checked = check_tenant(tenant, where=where)
        owner = checked.encode()
        if len(self._tenants) < 10_000:
            self._tenants[checked] = owner
        return owner

    # -- learning

    def learn(self, kind: Kind, lane: str, message: dict[str, Any], exchange: str, queue: str) -> None:
        """Make the template of a kind from the message that Celery made for one of its calls."""
        if len(self._templates) < 10_000:  # a program may put any value into the options of a call
            self._templates[kind] = self._make_template(lane, message, exchange, queue)

    def _make_template(
        self, lane: str, message: dict[str, Any], exchange: str, queue: str
    ) -> MessageTemplate | None:
        headers, properties = message["headers"], message["properties"]
        task_id, task = headers.get("id"), headers.get("task")
        if (
            exchange
            or not lane.startswith("p")
            or headers.get("root_id") != task_id
            or any(headers.get(each) is not None for each in _EMPTY_HEADERS)
            or not set(headers) <= _KNOWN_HEADERS
            or properties.get("correlation_id") != task_id
            or properties.get("reply_to") != self._app.thread_oid
            or not set(properties) <= _KNOWN_PROPERTIES
            or message["content-type"] != "application/json"
            or message["content-encoding"] != "utf-8"
            or not isinstance(task, str)
        ):
            return None
        envelopes = []
        for which in range(4):
            template = self._envelope(message, queue, some_args=bool(which & 1), some_kwargs=bool(which & 2))
            if template is None:
                return None
            envelopes.append(template)
        priority = properties.get("priority") or 0
        return MessageTemplate(task, lane, priority, task.encode(), tuple(envelopes), self._rules.rule(task))

    @staticmethod
    def _envelope(message: dict[str, Any], queue: str, *, some_args: bool, some_kwargs: bool) -> str | None:
        """The envelope of the message with placeholders, in the order that ``MessageTemplate`` documents."""
        headers = dict(message["headers"], id=_ID, root_id=_ID)
        headers["argsrepr"] = _ARGS if some_args else "()"
        headers["kwargsrepr"] = _KWARGS if some_kwargs else "{}"
        properties = dict(message["properties"], correlation_id=_ID, reply_to=_REPLY)
        properties.pop(STAMPS, None)
        sample = dict(message, headers=headers, properties=properties)
        packed = stamp(sample, queue, "", int, 0).outgoing.record
        text = RedisRecord.unpack(packed).envelope.decode("utf-8", "surrogatepass").replace("%", "%%")
        places = [_ID, *([_ARGS] if some_args else ()), *([_KWARGS] if some_kwargs else ()), _REPLY]
        if any(text.count(f'"{place}"') != 1 for place in places):
            return None
        if sorted(places, key=text.index) != places:
            return None
        for place in places:
            text = text.replace(f'"{place}"', "%s")
        return text


def _is_original(method: Any, module: str) -> bool:
    """Whether a method is the one that its library defines, not the replacement of a tool."""
    wrapped = hasattr(method, "__wrapped__")
    return isinstance(method, FunctionType) and method.__module__ == module and not wrapped


def _definers(made: type, name: str) -> list[type]:
    """The classes that define a method, in the order of the MRO."""
    return [each for each in made.__mro__ if name in vars(each)]
