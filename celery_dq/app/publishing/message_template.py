"""The message of a plain call as a template, filled byte for byte as Celery and kombu would make the message.

The first call of a kind takes Celery's way. Its message gives the routing, headers and properties of the
kind, and places for the parts in which calls differ: the id, arguments, their representations, the tenant and
headers of the call. Any other call takes Celery's way each time: with links, groups, stamps, ETA, expiry,
routers that look at arguments and so on.

A function that writes a part of the message returns None for arguments that it does not handle. The caller
then uses Celery's code. Tests compare the two.

A template holds no header except those that Celery writes into every message (:data:`KNOWN_HEADERS`). All
others belong to one call: an option of the caller or a monitoring tool has set them.
"""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import (  # type: ignore[attr-defined]  # the first is not in its stubs
    c_make_encoder,
    encode_basestring,
    encode_basestring_ascii as encode_ascii,
)
from typing import Any, NamedTuple, TypeAlias

from celery.app.amqp import task_message
from celery.utils.saferepr import saferepr
from kombu.utils import json as kombu_json

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.amqp import OF_ONE_CALL
from celery_dq.app.publishing.dedup_stage import DedupCallRequest, DedupRequests
from celery_dq.app.publishing.results import Ids
from celery_dq.app.tenant_rules import TenantRules
from celery_dq.clock import SystemClock
from celery_dq.transport import envelope
from celery_dq.transport.packer import STAMPS, PackedMessage, Packer
from celery_dq.transport.tenant import Rule, check_tenant

_ID, _ARGS, _KWARGS, _MORE, _REPLY = ("@dq-id@", "@dq-args@", "@dq-kwargs@", "@dq-more@", "@dq-reply@")
#: Headers and properties that differ between the calls of a kind.
VARIABLE = ("id", "root_id", "argsrepr", "kwargsrepr", "correlation_id", "reply_to", "tenant")
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


def learn_template(
    app: Any,
    packer: Packer,
    lane: str,
    message: dict[str, Any],
    exchange: str,
    queue: str,
    routed: dict[str, Any],
    rule_of: Callable[[str], Rule | None],
) -> MessageTemplate | None:
    """Make a template from the message that Celery made for a call; None when calls of its kind differ more.

    Args:
        app: the app that made the call.
        packer: packs its messages.
        lane: the lane of the buffer to which the message goes; "" when it goes to no partition.
        message: the message, with the headers that Celery has given it.
        exchange: its exchange.
        queue: its routing key.
        routed: the options that Celery's router made of the options of the call.
        rule_of: finds the tenant rule of a task.
    """
    headers, properties = message["headers"], message["properties"]
    task_id, task = headers.get("id"), headers.get("task")
    if (
        exchange
        or not lane.startswith("p")
        or headers.get("root_id") != task_id
        or any(headers.get(each) is not None for each in _EMPTY_HEADERS)
        or set(headers) != KNOWN_HEADERS
        or properties.get("correlation_id") != task_id
        or properties.get("reply_to") != app.thread_oid
        or not set(properties) <= _KNOWN_PROPERTIES
        or (properties.get("priority") or 0) != (routed.get("priority") or 0)
        or message["content-type"] != "application/json"
        or message["content-encoding"] != "utf-8"
        or not isinstance(task, str)
        or OF_ONE_CALL & (app.amqp.router.lookup_route(task, (), {}, {}, None) or {}).keys()
    ):
        return None
    envelopes = []
    for which in range(4):
        template = _envelope(packer, message, queue, some_args=bool(which & 1), some_kwargs=bool(which & 2))
        if template is None:
            return None
        envelopes.append(template)
    not_shared = {*VARIABLE, "delivery_info", "priority", STAMPS}
    return MessageTemplate(
        name=task,
        queue=queue,
        lane=lane,
        priority=properties.get("priority") or 0,
        task=task.encode(),
        envelopes=tuple(envelopes),
        rule=rule_of(task),
        headers=headers,
        shared={key: value for key, value in headers.items() if key not in VARIABLE},
        properties={key: value for key, value in properties.items() if key not in not_shared},
        routed=routed,
    )


def _envelope(
    packer: Packer, message: dict[str, Any], queue: str, *, some_args: bool, some_kwargs: bool
) -> str | None:
    """The envelope of the message with placeholders, in the order that ``MessageTemplate`` documents."""
    headers = dict(message["headers"], id=_ID, root_id=_ID)
    headers["argsrepr"] = _ARGS if some_args else "()"
    headers["kwargsrepr"] = _KWARGS if some_kwargs else "{}"
    headers[_MORE] = 0
    properties = dict(message["properties"], correlation_id=_ID, reply_to=_REPLY)
    parts = packer.parts(dict(message, headers=headers, properties=properties), queue)
    text = parts.envelope.decode("utf-8", "surrogatepass").replace("%", "%%")
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
#: Characters from which on Celery shortens a representation.
MAX_REPR = 500

#: Returns the JSON text of a string, with quotes and without escaping non-ASCII characters.
_quoted = encode_basestring

_encode = kombu_json.JSONEncoder().encode
#: The part of a body that is for callbacks; a plain call has none.
EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_EMBED_END = f", {_encode(EMBED)}]"


def _plain(value: Any) -> str | None:
    kind = type(value)
    if kind is int or kind is bool or kind is float or value is None:
        return str(value)
    if kind is str and len(value) < MAX_REPR:
        return "'" + value.replace("'", "\\'") + "'" if "'" in value else f"'{value}'"
    return None


def plain_args(args: Any) -> str | None:
    """Return the ``argsrepr`` of positional arguments; None unless all are plain numbers and texts."""
    if not args:
        return "()"
    if type(args) is not tuple and type(args) is not list:
        return None
    parts = []
    for value in args:
        kind = type(value)
        # The two most frequent types, without a function call.
        if kind is int:
            parts.append(str(value))
        elif kind is str and len(value) < MAX_REPR and "'" not in value:
            parts.append(f"'{value}'")
        else:
            text = _plain(value)
            if text is None:
                return None
            parts.append(text)
    inner = ", ".join(parts)
    if len(inner) > MAX_REPR:
        return None
    if type(args) is list:
        return f"[{inner}]"
    return f"({inner},)" if len(args) == 1 else f"({inner})"


def plain_kwargs(kwargs: Any) -> str | None:
    """Return the ``kwargsrepr`` of named arguments; None unless all are plain numbers and texts."""
    if not kwargs:
        return "{}"
    if type(kwargs) is not dict:
        return None
    parts = []
    for name, value in kwargs.items():
        key, text = _plain(name), _plain(value)
        if key is None or text is None:
            return None
        parts.append(f"{key}: {text}")
    inner = ", ".join(parts)
    return None if len(inner) > MAX_REPR else f"{{{inner}}}"


class BodyWriter:
    """Writes the JSON body of a task message without callbacks, errbacks, chain or chord.

    The text is the same as from ``json.dumps`` with kombu's encoder, which creates a new C encoder for each
    call.
    """

    def __init__(self) -> None:
        self._write = _new_encoder()

    def write(self, args: Any, kwargs: Any) -> str | None:
        """Return the body; None when it cannot be written. Celery's way then raises its own error."""
        both = [args or (), kwargs or {}]
        try:
            text = _encode(both) if self._write is None else "".join(self._write(both, 0))
        except Exception:
            self._write = _new_encoder()  # the old one may be in the middle of a value
            return None
        return text[:-1] + _EMBED_END


def _new_encoder() -> Any:
    if c_make_encoder is None:
        return None
    settings = kombu_json.JSONEncoder()
    return c_make_encoder({}, settings.default, encode_ascii, None, ": ", ", ", False, False, True)


def represent(amqp: Any, message: Any) -> None:
    """Write the representations of the arguments into a message of task protocol 2 that has none.

    Args:
        amqp: the app's ``amqp``, with the limits of a representation.
        message: the message.
    """
    headers, _, (args, kwargs, _), event = message
    for name, text, values in (("args", plain_args(args), args), ("kwargs", plain_kwargs(kwargs), kwargs)):
        if text is None:
            levels = amqp.app.conf.task_repr_maxlevels
            text = saferepr(values, getattr(amqp, f"{name}repr_maxsize"), maxlevels=levels)
        headers[f"{name}repr"] = text
        if event is not None:
            event[name] = text


class MessageTemplates:
    """The message templates of one app.

    Args:
        app: a Celery app whose broker is one of celery-dq.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._packer = Packer(dq_of(app).options, SystemClock())
        self._ids = Ids(app)
        self.bodies = BodyWriter()
        #: Checked names of tenants, to their encoded form.
        self._tenants: dict[str, bytes] = {}
        #: The template of each kind that was seen; None for calls that go Celery's way.
        self.by_kind: dict[Kind, MessageTemplate | None] = {}
        self._rules = TenantRules(app)
        self._sends_event = bool(app.conf.task_send_sent_event)

    def kind_of(self, name: str, options: dict[str, Any]) -> Kind | None:
        """The kind of a call; None when it has to go Celery's way."""
        kind: list[Any] = [name]
        # None overrides an option of the task where `send_task` looks the task's options up.
        type_is_default = options.get("task_type") is None
        for option, value in options.items():
            if option in _FILLED:
                if option == "headers" and value and not only_adds(value):
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
        requests: DedupRequests | None = None,
    ) -> PackedMessage | None:
        """Make the message of a call from its template; None when it has to go Celery's way."""
        args_text = plain_args(args) if args else "()"
        kwargs_text = plain_kwargs(kwargs) if kwargs else "{}"
        if args_text is None or kwargs_text is None:
            return None
        if task_id is not None and (type(task_id) is not str or not 0 < len(task_id) <= 50):
            return None
        body = self.bodies.write(args, kwargs)
        if body is None:
            return None
        owner = (
            b"" if tenant is None and template.rule is None else self._owner(template, args, kwargs, tenant)
        )
        named = task_id is not None
        if not named:
            task_id = self._ids.new(owner)
        more = ""
        if headers:
            try:
                more = envelope.more_headers(headers)
            except (TypeError, ValueError, RecursionError):
                return None  # on Celery's way the transport raises its own error
        request = None if requests is None else requests.request_for(args, kwargs, named=named)
        reply = self._app.thread_oid
        return self._packed(template, task_id, args_text, kwargs_text, reply, owner, more, body, request)

    def _packed(
        self,
        template: MessageTemplate,
        task_id: str,
        args_text: str,
        kwargs_text: str,
        reply: str,
        owner: bytes,
        more: str,
        body: str,
        request: DedupCallRequest | None = None,
    ) -> PackedMessage:
        if args_text == "()":
            if kwargs_text == "{}":
                filled = template.envelopes[0] % (_quoted(task_id), more, _quoted(reply))
            else:
                texts = (_quoted(task_id), _quoted(kwargs_text))
                filled = template.envelopes[2] % (*texts, more, _quoted(reply))
        elif kwargs_text == "{}":
            filled = template.envelopes[1] % (_quoted(task_id), _quoted(args_text), more, _quoted(reply))
        else:
            texts = (_quoted(args_text), _quoted(kwargs_text))
            filled = template.envelopes[3] % (_quoted(task_id), *texts, more, _quoted(reply))
        priority = template.priority
        return self._packer.fill(
            template.queue, task_id, owner, template.task, priority, filled, body, request
        )

    # -- observed calls

    def message(self, template: MessageTemplate, args: Any, kwargs: Any, task_id: Any, tenant: Any) -> Any:
        """Make the message of a plain call as Celery makes it; None when it has to go Celery's way."""
        args_text, kwargs_text = plain_args(args), plain_kwargs(kwargs)
        if args_text is None or kwargs_text is None:
            return None
        if task_id is None:
            owner = self._owner(template, args, kwargs, tenant) if self._ids.name_tenants else b""
            task_id = self._ids.new(owner)
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
    ) -> PackedMessage | None:
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
        left = {key: value for key, value in properties.items() if key not in VARIABLE}
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
        return self._packed(
            template, str(task_id), str(args_text), str(kwargs_text), str(reply), owner, text, body
        )

    def _owner(self, template: MessageTemplate, args: Any, kwargs: Any, tenant: Any) -> bytes:
        """Return the encoded tenant of a call that names this one; None leaves it to the task's rule."""
        chosen = tenant
        if tenant is None:
            if template.rule is None:
                return b""
            chosen = template.rule(args or (), kwargs or {})
        known = self._tenants.get(chosen) if type(chosen) is str else None
        return self._checked(chosen, template.name, named=tenant is not None) if known is None else known

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

        The arguments after `kind` are those of :func:`learn_template`.
        """
        if len(self.by_kind) < 10_000:  # a program may put any value into the options of a call
            self.by_kind[kind] = learn_template(
                self._app, self._packer, lane, message, exchange, queue, routed, self._rules.rule
            )


def only_adds(headers: Any) -> bool:
    """Whether the headers of a call only add to those of Celery."""
    return (
        type(headers) is dict
        and all(type(key) is str for key in headers)
        and not (headers.keys() & KNOWN_HEADERS)
    )
