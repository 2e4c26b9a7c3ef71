"""The message of a task as a template, made of the message of the first call of its kind.

The first call takes Celery's way. Its message gives the routing, headers and properties of the kind, and
places for the parts in which calls differ. :mod:`celery_dq.app.publishing.template_filling` fills them in.

A template holds no header except those that Celery writes into every message (:data:`KNOWN_HEADERS`). All
others belong to one call: an option of the caller or a monitoring tool has set them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from celery_dq.app.publishing.amqp import OF_ONE_CALL
from celery_dq.transport.packer import STAMPS, Packer
from celery_dq.transport.tenant import Rule

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
