"""The quick way of a plain call into the buffer: a template of its message, filled in.

A *plan* is learnt from the first call of its kind, which goes Celery's whole way. Then routing, headers and
properties of that kind are known, and of the next call only id, arguments, their representations and the
tenant are new. Everything else (links, groups, stamps, ETA, expiry, own headers, routers that look at
arguments, receivers of ``before_task_publish`` …) takes Celery's way each time.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from celery import Celery, signals
from celery._state import _task_stack  # type: ignore[attr-defined]  # not in its stubs
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute

from celery_dq.app.amqp import TenantRules, WiredAMQP
from celery_dq.producer.sender import Addressed
from celery_dq.producer.template import BodyWriter, Ids, json_is_kombus, plain_args, plain_kwargs, quoted
from celery_dq.transport.redis.publisher import STAMPS, stamp
from celery_dq.transport.redis.record import TEXT, Record, pack_joined
from celery_dq.transport.tenant import Rule, check_tenant

__all__ = ["FastCalls", "Plan", "in_task"]

#: Options that make a kind of call.
_KIND = frozenset(
    ("queue", "priority", "ignore_result", "time_limit", "soft_time_limit", "serializer", "delivery_mode")
)
#: Options that a filled-in template takes from the call.
_FILLED = frozenset(
    ("task_id", "tenant", "result_cls", "task_type", "add_to_parent", "retry", "retry_policy")
)
_ID, _ARGS, _KWARGS, _REPLY = ("@dq-id@", "@dq-args@", "@dq-kwargs@", "@dq-reply@")
_before, _after, _sent = signals.before_task_publish, signals.after_task_publish, signals.task_sent
_KNOWN_PROPERTIES = frozenset(
    ("correlation_id", "reply_to", "delivery_mode", "priority", "delivery_info", "tenant", STAMPS)
)
#: Where Celery has the stacks of tasks that run, unless it keeps them per thread.
_running: Any = getattr(getattr(_task_stack, "_local", None), "__storage__", None)
#: Makes a named tuple without the detour over its own ``__new__``.
_addressed = tuple.__new__


def in_task() -> bool:
    """Whether a task calls: its call is the child of another one."""
    # While nobody runs a task its storage is empty, and that is quicker to see than the missing stack.
    if _running is not None and not _running:
        return False
    return bool(_task_stack.stack)


class Plan(NamedTuple):
    """What calls of one kind share.

    :param name: of the task.
    :param lane: where they go.
    :param envelopes: templates, by whether there are args (1) and kwargs (2). They take the id, then the
        representations that there are, then the address for replies.
    :param rule: from the arguments to the tenant.
    """

    name: str
    lane: str
    priority: int
    task: bytes
    envelopes: tuple[str, ...]
    rule: Rule | None


class FastCalls:
    """The plans of one app in one process.

    :param app: a Celery app whose broker is one of celery-dq.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._amqp = app.amqp
        self._ids = Ids()
        self._bodies = BodyWriter()
        #: Names that were checked, encoded.
        self._tenants: dict[str, bytes] = {}
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        self._rules = TenantRules(app)
        self._router = app.amqp.router
        self.pid = os.getpid()
        self._stock = self._is_stock()

    def _is_stock(self) -> bool:
        """Whether this app's messages are built by Celery's own code, and nobody looks at them on the way."""
        app, amqp = self._app, self._amqp
        conf = app.conf
        build = amqp.create_task_message
        return (
            type(app).send_task is Celery.send_task
            and getattr(build, "__func__", None) is AMQP.as_task_v2
            and _definers(type(amqp), "_create_task_sender") == [WiredAMQP, AMQP]
            and min(amqp.argsrepr_maxsize, amqp.kwargsrepr_maxsize) >= 1024
            and (conf.task_serializer or "json") == "json"
            and not conf.task_compression
            and not conf.task_send_sent_event
            and all(isinstance(route, MapRoute) for route in amqp.router.routes)
            and json_is_kombus()
        )

    @property
    def allowed(self) -> bool:
        """Whether any call may go the quick way now: nobody listens to signals, or has changed routes."""
        return (
            self._stock
            and not _before.receivers
            and not _after.receivers
            and not _sent.receivers
            # Not `amqp.router`: kombu's cached properties are slow to read.
            and self._amqp.__dict__.get("router") is self._router
        )

    def plan(self, kind: tuple[Any, ...]) -> Plan | None:
        """What is known of calls of the kind; None when they go Celery's way."""
        return self._plans.get(kind)

    def knows(self, kind: tuple[Any, ...]) -> bool:
        """Whether a call of the kind was seen; it may be one that always goes Celery's way."""
        return kind in self._plans

    def kind_of(self, name: str, options: dict[str, Any]) -> tuple[Any, ...] | None:
        """The kind of a call; None when it has to go Celery's way."""
        kind: list[Any] = [name]
        # Where `send_task` looks the task's own options up, None overrides them.
        nothing_says = options.get("task_type") is None
        for option, value in options.items():
            if option in _FILLED:
                continue
            if value is None:
                if nothing_says:
                    kind += (option, None)  # a pair, as a queue may be called like an option
                continue
            if option not in _KIND or type(value) not in (str, int, bool, float):
                return None
            kind += (option, value)
        return tuple(kind)

    def fill(
        self, plan: Plan, args: Any, kwargs: Any, task_id: Any = None, tenant: Any = None
    ) -> tuple[str, Addressed] | None:
        """The id and the message of a call whose plan is known; None: go Celery's way."""
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
            return None  # Celery's way raises Celery's error
        if tenant is None and plan.rule is None:
            owner = b""
        else:
            chosen = (
                tenant if tenant is not None or plan.rule is None else plan.rule(args or (), kwargs or {})
            )
            known = self._tenants.get(chosen) if type(chosen) is str else None
            owner = self._checked(chosen, plan.name, named=tenant is not None) if known is None else known
        reply = quoted(self._app.thread_oid)
        if args_text == "()":
            if kwargs_text == "{}":
                filled = plan.envelopes[0] % (quoted(task_id), reply)
            else:
                filled = plan.envelopes[2] % (quoted(task_id), quoted(kwargs_text), reply)
        elif kwargs_text == "{}":
            filled = plan.envelopes[1] % (quoted(task_id), quoted(args_text), reply)
        else:
            filled = plan.envelopes[3] % (quoted(task_id), quoted(args_text), quoted(kwargs_text), reply)
        # The body is ASCII.
        content = (filled + body).encode("utf-8", "surrogatepass")
        record = pack_joined(owner, plan.task, plan.priority, TEXT, content, len(content) - len(body))
        return task_id, _addressed(Addressed, (plan.lane, task_id.encode(), record))

    def _checked(self, tenant: Any, name: str, *, named: bool) -> bytes:
        where = f"{name}: tenant" if named else f"tenant of task {name}"
        checked = check_tenant(tenant, where=where)
        owner = checked.encode()
        if len(self._tenants) < 10_000:
            self._tenants[checked] = owner
        return owner

    # -- learning

    def learn(
        self, kind: tuple[Any, ...], lane: str, message: dict[str, Any], exchange: str, queue: str
    ) -> None:
        """Keep what the calls of a kind share, from the message that Celery made for one of them."""
        if len(self._plans) < 10_000:  # kinds may be made of anything a program puts into its options
            self._plans[kind] = self._make_plan(lane, message, exchange, queue)

    def _make_plan(self, lane: str, message: dict[str, Any], exchange: str, queue: str) -> Plan | None:
        headers, properties = message["headers"], message["properties"]
        task_id, task = headers.get("id"), headers.get("task")
        if (
            exchange
            or not lane.startswith("p")
            or headers.get("root_id") != task_id
            or any(headers.get(each) is not None for each in ("parent_id", "eta", "expires"))
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
        return Plan(task, lane, priority, task.encode(), tuple(envelopes), self._rules.rule(task))

    @staticmethod
    def _envelope(message: dict[str, Any], queue: str, *, some_args: bool, some_kwargs: bool) -> str | None:
        """The envelope of the message with places to fill in, in the order that a plan promises."""
        headers = dict(message["headers"], id=_ID, root_id=_ID)
        headers["argsrepr"] = _ARGS if some_args else "()"
        headers["kwargsrepr"] = _KWARGS if some_kwargs else "{}"
        properties = dict(message["properties"], correlation_id=_ID, reply_to=_REPLY)
        properties.pop(STAMPS, None)
        sample = dict(message, headers=headers, properties=properties)
        packed = stamp(sample, queue, "", int, 0).outgoing.record
        text = Record.unpack(packed).envelope.decode("utf-8", "surrogatepass").replace("%", "%%")
        places = [_ID, *([_ARGS] if some_args else ()), *([_KWARGS] if some_kwargs else ()), _REPLY]
        if any(text.count(f'"{place}"') != 1 for place in places):
            return None
        if sorted(places, key=text.index) != places:
            return None
        for place in places:
            text = text.replace(f'"{place}"', "%s")
        return text


def _definers(made: type, name: str) -> list[type]:
    """The classes that define a method, the nearest first."""
    return [each for each in made.__mro__ if name in vars(each)]
