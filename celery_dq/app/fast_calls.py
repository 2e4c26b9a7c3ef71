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
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute

from celery_dq.app.amqp import TenantRules, WiredAMQP
from celery_dq.producer.sender import Addressed
from celery_dq.producer.template import BodyWriter, Ids, json_is_kombus, plain_args, plain_kwargs, quoted
from celery_dq.transport.redis.publisher import STAMPS, stamp
from celery_dq.transport.redis.record import TEXT, Record, pack_record
from celery_dq.transport.tenant import Rule, check_tenant

__all__ = ["FastCalls"]

#: Options that make a kind of call.
_KIND = frozenset(
    ("queue", "priority", "ignore_result", "time_limit", "soft_time_limit", "serializer", "delivery_mode")
)
#: Options that a filled-in template takes from the call.
_FILLED = frozenset(
    ("task_id", "tenant", "result_cls", "task_type", "add_to_parent", "retry", "retry_policy")
)
_ID, _ARGS, _KWARGS, _REPLY = ("@dq-id@", "@dq-args@", "@dq-kwargs@", "@dq-reply@")
_SIGNALS = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)
_KNOWN_PROPERTIES = frozenset(
    ("correlation_id", "reply_to", "delivery_mode", "priority", "delivery_info", "tenant", STAMPS)
)


class Plan(NamedTuple):
    """What calls of one kind share.

    :param lane: where they go.
    :param envelopes: templates, by whether there are args and kwargs.
    :param rule: from the arguments to the tenant.
    """

    lane: str
    priority: int
    task: bytes
    envelopes: dict[tuple[bool, bool], str]
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
        for signal in _SIGNALS:
            if signal.receivers:
                return False
        # Not `amqp.router`: kombu's cached properties are slow to read.
        return self._stock and self._amqp.__dict__.get("router") is self._router

    def fills(self, kind: tuple[Any, ...]) -> bool:
        """Whether calls of the kind have a template."""
        return self._plans.get(kind) is not None

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
                    kind.append(option)
                continue
            if option not in _KIND or type(value) not in (str, int, bool, float):
                return None
            kind += (option, value)
        return tuple(kind)

    def fill(
        self, kind: tuple[Any, ...], args: Any, kwargs: Any, options: dict[str, Any]
    ) -> tuple[str, Addressed] | None:
        """The id and the message of a call of a kind that is known; None: go Celery's way."""
        plan = self._plans.get(kind)
        if plan is None:
            return None
        args_text, kwargs_text = plain_args(args), plain_kwargs(kwargs)
        if args_text is None or kwargs_text is None:
            return None
        task_id = options.get("task_id")
        if task_id is None:
            task_id = self._ids.new()
        elif type(task_id) is not str or not 0 < len(task_id) <= 50:
            return None
        try:
            body = self._bodies.write(args, kwargs).encode()
        except Exception:
            self._bodies = BodyWriter()
            return None  # Celery's way raises Celery's error
        tenant = options.get("tenant")
        if tenant is None and plan.rule is not None:
            tenant = plan.rule(args or (), kwargs or {})
        values = {
            "id": quoted(task_id),
            "args": quoted(args_text),
            "kwargs": quoted(kwargs_text),
            "reply": quoted(self._app.thread_oid),
        }
        template = plan.envelopes[args_text != "()", kwargs_text != "{}"]
        envelope = (template % values).encode("utf-8", "surrogatepass")
        owner = self._tenants.get(tenant) if type(tenant) is str else None
        if owner is None:
            owner = self._checked(tenant, kind[0], options)
        record = pack_record(owner, plan.task, plan.priority, TEXT, 0, 0, envelope, body)
        return task_id, Addressed(plan.lane, task_id.encode(), record)

    def _checked(self, tenant: Any, name: str, options: dict[str, Any]) -> bytes:
        where = f"tenant of task {name}" if options.get("tenant") is None else f"{name}: tenant"
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
            self._plans[kind] = self._plan(lane, message, exchange, queue)

    def _plan(self, lane: str, message: dict[str, Any], exchange: str, queue: str) -> Plan | None:
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
        envelopes = {}
        for some_args in (False, True):
            for some_kwargs in (False, True):
                template = self._envelope(message, queue, some_args, some_kwargs)
                if template is None:
                    return None
                envelopes[some_args, some_kwargs] = template
        return Plan(lane, properties.get("priority") or 0, task.encode(), envelopes, self._rules.rule(task))

    @staticmethod
    def _envelope(message: dict[str, Any], queue: str, some_args: bool, some_kwargs: bool) -> str | None:
        """The envelope of the message with places to fill in."""
        headers = dict(message["headers"], id=_ID, root_id=_ID)
        headers["argsrepr"] = _ARGS if some_args else "()"
        headers["kwargsrepr"] = _KWARGS if some_kwargs else "{}"
        properties = dict(message["properties"], correlation_id=_ID, reply_to=_REPLY)
        properties.pop(STAMPS, None)
        sample = dict(message, headers=headers, properties=properties)
        packed = stamp(sample, queue, "", int, 0).outgoing.record
        text = Record.unpack(packed).envelope.decode("utf-8", "surrogatepass").replace("%", "%%")
        places = {_ID: "%(id)s", _REPLY: "%(reply)s"}
        if some_args:
            places[_ARGS] = "%(args)s"
        if some_kwargs:
            places[_KWARGS] = "%(kwargs)s"
        for place, name in places.items():
            if text.count(f'"{place}"') != 1:
                return None
            text = text.replace(f'"{place}"', name)
        return text


def _definers(made: type, name: str) -> list[type]:
    """The classes that define a method, the nearest first."""
    return [each for each in made.__mro__ if name in vars(each)]
