"""Message templates of plain calls.

A template is made of the message of the first call of its kind, which takes Celery's way. It has the routing,
headers and properties of that kind. The next call adds its id, arguments, their representations, the tenant
and its own headers. Any other call takes Celery's way each time: with links, groups, stamps, ETA, expiry,
routers that look at arguments and so on.

A template holds no header except those that Celery writes into every message (:data:`KNOWN_HEADERS`). All
others belong to one call: an option of the caller or a monitoring tool has set them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from celery.app.amqp import task_message

from celery_dq.app.publishing.amqp import OF_ONE_CALL, TenantRules
from celery_dq.app.publishing.observers import Observers
from celery_dq.per_process import OwnerProcess
from celery_dq.producer.sender import Addressed
from celery_dq.producer.template import (
    EMBED,
    BodyWriter,
    Ids,
    plain_args,
    plain_kwargs,
    quoted,
)
from celery_dq.transport import envelope
from celery_dq.transport.redis.store.publisher import STAMPS, stamp
from celery_dq.transport.redis.store.record import TEXT, RedisRecord, pack_joined
from celery_dq.transport.tenant import Rule, check_tenant

__all__ = ["Kind", "MessageTemplates", "MessageTemplate"]

#: The common part of the calls with one template: the name of the task, and options with their values.
Kind: TypeAlias = tuple[Any, ...]

#: Options by which calls are of different kinds.
_KIND = frozenset(
    ("queue", "priority", "ignore_result", "time_limit", "soft_time_limit", "serializer", "delivery_mode")
)
#: Options that a template takes from each call.
_FILLED = frozenset(
    ("task_id", "tenant", "headers", "result_cls", "task_type", "add_to_parent", "retry", "retry_policy")
)
_ID, _ARGS, _KWARGS, _MORE, _REPLY = ("@dq-id@", "@dq-args@", "@dq-kwargs@", "@dq-more@", "@dq-reply@")
#: Headers and properties that differ between the calls of a kind.
_VARIABLE = ("id", "root_id", "argsrepr", "kwargsrepr", "correlation_id", "reply_to", "tenant")
_KNOWN_PROPERTIES = frozenset(
    ("correlation_id", "reply_to", "delivery_mode", "priority", "delivery_info", "tenant", STAMPS)
)
#: The headers that Celery writes into every message. All others, such as a trace, belong to a single call.
KNOWN_HEADERS = {
    "lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries",
    "timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin",
    "ignore_result", "replaced_task_nesting", "stamped_headers", "stamps",
}  # fmt: skip
#: Headers of Celery that are empty in a plain call.
_EMPTY_HEADERS = ("parent_id", "eta", "expires", "shadow", "group", "group_index", "stamped_headers")
#: Makes a named tuple without a call of its own ``__new__``.
_addressed = tuple.__new__


class MessageTemplate(NamedTuple):
    """The parts that calls of one kind share.

    Attributes:
        name: the name of the task.
        queue: the queue to which the messages go.
        lane: the lane of the buffer to which the messages go.
        priority: the priority of the messages.
        task: the encoded name of the task.
        envelopes: four templates, at the index 1 (there are args) + 2 (there are kwargs). They take the id,
            the representations of args and kwargs where there are some, the text of further headers, and the
            address for replies.
        rule: computes the tenant from the arguments.
        headers: the headers of the first message, without those of its call only.
        shared: the headers with the same value in each message.
        properties: the properties with the same value in each message.
        routed: the options that Celery's router made of the options of the call.
    """

    name: str
    queue: str
    lane: str
    priority: int
    task: bytes
    envelopes: tuple[str, ...]
    rule: Rule | None
    headers: dict[str, Any]
    shared: dict[str, Any]
    properties: dict[str, Any]
    routed: dict[str, Any]


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
        self.owner = OwnerProcess()
        #: Whether calls that are not buffered may use a template; None until a stage has asked.
        self.publishes: bool | None = None
        self.observers = Observers(app)
        self._sends_event = bool(app.conf.task_send_sent_event)

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
                if option == "headers" and value and not _extra(value):
                    return None
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
        self,
        template: MessageTemplate,
        args: Any,
        kwargs: Any,
        task_id: Any = None,
        tenant: Any = None,
        headers: Any = None,
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
        body = self.body(args, kwargs)
        if body is None:
            return None
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
        more = ""
        if headers:
            try:
                more = envelope.more_headers(headers)
            except (TypeError, ValueError, RecursionError):
                return None  # on Celery's way the transport raises its own error
        reply = self._app.thread_oid
        return task_id, self._record(template, task_id, args_text, kwargs_text, reply, owner, more, body)

    def body(self, args: Any, kwargs: Any) -> str | None:
        """Write the body of a plain call; None when it has to go Celery's way, which raises its own error."""
        try:
            return self._bodies.write(args, kwargs)
        except Exception:
            self._bodies = BodyWriter()
            return None

    @staticmethod
    def _record(
        template: MessageTemplate,
        task_id: str,
        args_text: str,
        kwargs_text: str,
        reply: str,
        owner: bytes,
        more: str,
        body: str,
    ) -> Addressed:
        if args_text == "()":
            if kwargs_text == "{}":
                filled = template.envelopes[0] % (quoted(task_id), more, quoted(reply))
            else:
                filled = template.envelopes[2] % (quoted(task_id), quoted(kwargs_text), more, quoted(reply))
        elif kwargs_text == "{}":
            filled = template.envelopes[1] % (quoted(task_id), quoted(args_text), more, quoted(reply))
        else:
            texts = (quoted(args_text), quoted(kwargs_text))
            filled = template.envelopes[3] % (quoted(task_id), *texts, more, quoted(reply))
        # The body is ASCII.
        content = (filled + body).encode("utf-8", "surrogatepass")
        record = pack_joined(owner, template.task, template.priority, TEXT, content, len(content) - len(body))
        return _addressed(Addressed, (template.lane, task_id.encode(), record))

    # -- observed calls

    def message(self, template: MessageTemplate, args: Any, kwargs: Any, task_id: Any) -> Any:
        """Make the message of a plain call as Celery makes it; None when it has to go Celery's way."""
        args_text, kwargs_text = plain_args(args), plain_kwargs(kwargs)
        if args_text is None or kwargs_text is None:
            return None
        if task_id is None:
            task_id = self._ids.new()
        headers = {
            **template.headers,
            "id": task_id,
            "root_id": task_id,
            "argsrepr": args_text,
            "kwargsrepr": kwargs_text,
            # A receiver may change it.
            "timelimit": list(template.headers["timelimit"]),
            "stamps": {},
        }
        event = None
        if self._sends_event:
            event = {"uuid": task_id, "root_id": task_id, "parent_id": None, "name": template.name}
            event |= {"args": args_text, "kwargs": kwargs_text, "retries": 0, "eta": None, "expires": None}
        properties = {"correlation_id": task_id, "reply_to": self._app.thread_oid}
        return task_message(headers, properties, (args or (), kwargs or {}, dict(EMBED)), event)

    def refill(
        self,
        template: MessageTemplate,
        body: Any,
        priority: Any,
        headers: dict[str, Any],
        properties: dict[str, Any],
        target: tuple[str, str],
    ) -> Addressed | None:
        """Pack a message that Celery has made; None when it differs from the template.

        Args:
            template: the template of the call.
            body: the serialized body.
            priority: the priority of the message.
            headers: its headers, which a tool or receiver may have changed.
            properties: its properties, which a tool or receiver may have changed.
            target: its exchange and its routing key.
        """
        task_id = headers.get("id")
        left = {key: value for key, value in properties.items() if key not in _VARIABLE}
        args_text, kwargs_text = headers.get("argsrepr"), headers.get("kwargsrepr")
        reply, tenant = properties.get("reply_to"), properties.get("tenant", "")
        if (
            target != ("", template.queue)
            or (priority or 0) != template.priority
            or left != template.properties
            or {**headers, **template.shared} != headers
            or not (headers.get("root_id") == task_id == properties.get("correlation_id"))
            or not all(type(each) is str for each in (task_id, args_text, kwargs_text, reply, tenant, body))
            or not 0 < len(str(task_id)) <= 50
        ):
            return None
        more = {key: value for key, value in headers.items() if key not in KNOWN_HEADERS}
        try:
            text = envelope.more_headers(more) if more else ""
        except (TypeError, ValueError, RecursionError):
            return None
        owner = self._tenants.get(tenant)
        if owner is None:
            owner = self._checked(tenant, template.name, named=True)
        return self._record(
            template, str(task_id), str(args_text), str(kwargs_text), str(reply), owner, text, body
        )

    def _checked(self, tenant: Any, name: str, *, named: bool) -> bytes:
        where = f"{name}: tenant" if named else f"tenant of task {name}"
        checked = check_tenant(tenant, where=where)
        owner = checked.encode()
        if len(self._tenants) < 10_000:
            self._tenants[checked] = owner
        return owner

    # -- learning

    def learn(
        self,
        kind: Kind,
        lane: str,
        message: dict[str, Any],
        exchange: str,
        queue: str,
        routed: dict[str, Any],
    ) -> None:
        """Make the template of a kind from the message that Celery made for one of its calls.

        Args:
            kind: the kind of the call.
            lane: the lane of the buffer to which the message goes; "" when it goes to no partition.
            message: the message, with the headers that Celery has given it.
            exchange: its exchange.
            queue: its routing key.
            routed: the options that Celery's router made of the options of the call.
        """
        if len(self._templates) < 10_000:  # a program may put any value into the options of a call
            self._templates[kind] = self._make_template(lane, message, exchange, queue, routed)

    def _make_template(
        self, lane: str, message: dict[str, Any], exchange: str, queue: str, routed: dict[str, Any]
    ) -> MessageTemplate | None:
        headers, properties = message["headers"], message["properties"]
        task_id, task = headers.get("id"), headers.get("task")
        if (
            exchange
            or not lane.startswith("p")
            or headers.get("root_id") != task_id
            or any(headers.get(each) is not None for each in _EMPTY_HEADERS)
            or set(headers) != KNOWN_HEADERS
            or properties.get("correlation_id") != task_id
            or properties.get("reply_to") != self._app.thread_oid
            or not set(properties) <= _KNOWN_PROPERTIES
            or (properties.get("priority") or 0) != (routed.get("priority") or 0)
            or message["content-type"] != "application/json"
            or message["content-encoding"] != "utf-8"
            or not isinstance(task, str)
            or OF_ONE_CALL & (self._router.lookup_route(task, (), {}, {}, None) or {}).keys()
        ):
            return None
        envelopes = []
        for which in range(4):
            template = self._envelope(message, queue, some_args=bool(which & 1), some_kwargs=bool(which & 2))
            if template is None:
                return None
            envelopes.append(template)
        not_shared = {*_VARIABLE, "delivery_info", "priority", STAMPS}
        return MessageTemplate(
            name=task,
            queue=queue,
            lane=lane,
            priority=properties.get("priority") or 0,
            task=task.encode(),
            envelopes=tuple(envelopes),
            rule=self._rules.rule(task),
            headers=headers,
            shared={key: value for key, value in headers.items() if key not in _VARIABLE},
            properties={key: value for key, value in properties.items() if key not in not_shared},
            routed=routed,
        )

    @staticmethod
    def _envelope(message: dict[str, Any], queue: str, *, some_args: bool, some_kwargs: bool) -> str | None:
        """The envelope of the message with placeholders, in the order that ``MessageTemplate`` documents."""
        headers = dict(message["headers"], id=_ID, root_id=_ID)
        headers["argsrepr"] = _ARGS if some_args else "()"
        headers["kwargsrepr"] = _KWARGS if some_kwargs else "{}"
        headers[_MORE] = 0
        properties = dict(message["properties"], correlation_id=_ID, reply_to=_REPLY)
        properties.pop(STAMPS, None)
        sample = dict(message, headers=headers, properties=properties)
        packed = stamp(sample, queue, "", int, 0).outgoing.record
        text = RedisRecord.unpack(packed).envelope.decode("utf-8", "surrogatepass").replace("%", "%%")
        # Further headers follow the last one, each with a comma before it.
        text = text.replace(f',"{_MORE}":0', f'"{_MORE}"')
        places = [_ID, *([_ARGS] if some_args else ()), *([_KWARGS] if some_kwargs else ()), _MORE, _REPLY]
        if any(text.count(f'"{place}"') != 1 for place in places):
            return None
        if sorted(places, key=text.index) != places:
            return None
        for place in places:
            text = text.replace(f'"{place}"', "%s")
        return text


def _extra(headers: Any) -> bool:
    """Whether the headers of a call only add to those of Celery."""
    return (
        type(headers) is dict
        and all(type(key) is str for key in headers)
        and not (headers.keys() & KNOWN_HEADERS)
    )
