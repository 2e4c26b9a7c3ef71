"""The stage that makes the message of a plain call from a template, and publishes it.

Celery and kombu repeat the same work at every call: routing, thirty headers, a producer that is bound to a
channel and unbound again, a copied queue, a retry wrapper. The first plain call of its kind takes Celery's
way, and its message becomes a template (:mod:`celery_dq.app.publishing.message_template`). Calls that are not
plain take Celery's way each time.

Monitoring tools are the normal case. When a receiver, a tool or an event observes messages, Celery's own task
sender runs for each call, with a :class:`TemplateProducer`. When a tool has replaced ``send_task``, Celery's
``send_task`` runs too. Each observer sees and may change what it would see without this stage. Only the
packing of the message is quicker, and a message that was changed beyond its headers is sent as it is.

A plain call with a dedup key sends its dedup request along, and
:mod:`celery_dq.app.publishing.dedup_stage` makes the result of the verdict. Errors, retries and their
policy are kombu's. Only the first attempt is made without kombu's wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.amqp import OF_ONE_CALL
from celery_dq.app.publishing.awaited_producer import AwaitedProducer
from celery_dq.app.publishing.buffer_stage import BufferChoice
from celery_dq.app.publishing.dedup_stage import DedupRequests, conclude_verdict
from celery_dq.app.publishing.direct_stage import publish_by_kombu, publish_direct, retry_policy
from celery_dq.app.publishing.message_template import (
    EMBED,
    Kind,
    MessageTemplate,
    MessageTemplates,
    represent,
)
from celery_dq.app.publishing.pipeline import Call, Proceed
from celery_dq.app.publishing.results import result_of
from celery_dq.app.publishing.task_apply_async import TemplateChoice, replace_apply_async
from celery_dq.app.senders import lane_of
from celery_dq.compat.kombu_messages import publish_prepared
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.producer.sender import Addressed
from celery_dq.protocols import DEDUP_PROPERTY
from celery_dq.transport.packer import PackedMessage


class TemplateStage:
    """See the module.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._buffer_choice = BufferChoice(app)
        #: Kind of call to its dedup requests, for kinds that have a dedup key.
        self._requests: dict[Kind, DedupRequests] = {}

    @cached_property
    def choice(self) -> TemplateChoice:
        """Decides whether a call uses a template; made at the first call."""
        return TemplateChoice(self._app)

    @cached_property
    def templates(self) -> MessageTemplates:
        """The templates of this app."""
        return MessageTemplates(self._app)

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`celery_dq.app.publishing.pipeline.Stage`."""
        answer = self.choice.answer()
        kind = None if answer == "celery" else self._kind_of(call)
        if kind is not None:
            template = self.templates.by_kind.get(kind)
            if template is not None:
                result = self.send_from(template, kind, call, proceed, answer == "observed")
                if result is not None:
                    return result
            elif kind not in self.templates.by_kind:
                call.published = self._learner(kind, call)
        return proceed(call)

    def _kind_of(self, call: Call) -> Kind | None:
        """The kind of a call; None when it has to go Celery's way."""
        options = call.options
        if _is_buffered(call):
            return None if call.dedup is not None else self.templates.kind_of(call.name, options)
        policy = options.get("retry_policy")
        # The deadline sets a policy with only an errback. Any other policy is the caller's choice.
        if (
            options.get("retry") is not None
            or (policy and set(policy) != {"errback"})
            or not self.choice.may_publish(options.get("ignore_result"))
        ):
            return None
        # A call with a dedup rule of its own has no kind.
        return self.templates.kind_of(call.name, options)

    def _learner(self, kind: Kind, call: Call) -> Any:
        """The callback for the message of the first call of its kind."""
        partitioned, templates = dq_of(self._app).serves_queues(), self.templates

        def learn(message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> None:
            properties = dict(message["properties"])
            request = properties.pop(DEDUP_PROPERTY, None)
            lane = lane_of(exchange, routing_key, properties["priority"] or 0, declare) if partitioned else ""
            celerys = dict(message, headers=call.headers, properties=properties)
            templates.learn(kind, lane, celerys, exchange, routing_key, call.routed)
            if call.dedup is not None and request is not None and templates.by_kind.get(kind) is not None:
                serializer = call.options.get("serializer") or self._app.conf.task_serializer
                self._requests[kind] = DedupRequests(*call.dedup, request, serializer)

        return learn

    def send_from(
        self, template: MessageTemplate, kind: Kind, call: Call, proceed: Proceed, observed: bool
    ) -> Any:
        """Send a call from its template, and return its result; None when it has to go Celery's way."""
        options = call.options
        requests = None if _is_buffered(call) else self._requests.get(kind)
        if (call.dedup and call.dedup[1]) is not (requests and requests.key):
            return None  # the task's rule has changed since the template was made
        if observed:
            return None if call.dedup is not None else self._observed(template, call, proceed)
        task_id, tenant, headers = map(options.get, ("task_id", "tenant", "headers"))
        message = self.templates.fill(template, call.args, call.kwargs, task_id, tenant, headers, requests)
        if message is None:
            return None
        if call.producer is not None:
            _put(call.producer, template, message)
        elif not publish_direct(self._app, message, options.get("retry_policy")):
            return None
        if requests is not None:
            call.request = message.dedup
            conclude_verdict(template.name, message.id, requests.rule, call.request)
        task = options.get("task_type")
        if task is not None and call.dedup is None and not dq_of(self._app).outbox.wanted_by(task):
            replace_apply_async(task, self, self.templates, self.choice, self._buffer_choice)
        return result_of(self._app, message.id, options.get("result_cls"), options.get("ignore_result"))

    # -- an observed call

    def _observed(self, template: MessageTemplate, call: Call, proceed: Proceed) -> Any:
        """Send a call with Celery's own sender, which calls its observers, on a :class:`TemplateProducer`."""
        options = call.options
        deliver: Callable[[PackedMessage], Any]
        otherwise: Callable[..., Any]
        if call.producer is not None:
            deliver, otherwise = partial(_put, call.producer, template), publish_prepared(call.producer)
        else:
            policy = options.get("retry_policy")
            deliver = partial(publish_direct, self._app, policy=policy)
            otherwise = partial(publish_by_kombu, self._app, retry_policy(self._app, policy))
        producer = TemplateProducer(self.templates, template, deliver, otherwise)
        if self.choice.send_task_is_replaced:
            call.producer = producer
            call.represent = partial(represent, self._app.amqp)
            return proceed(call)
        message = self.templates.message(
            template, call.args, call.kwargs, options.get("task_id"), options.get("tenant")
        )
        if message is None:
            return None
        more = {key: options[key] for key in OF_ONE_CALL if options.get(key) is not None}
        self._app.amqp.send_task_message(producer, call.name, message, **template.routed, **more)
        result_cls, ignored = options.get("result_cls"), options.get("ignore_result")
        return result_of(self._app, message.headers["id"], result_cls, ignored)


def _is_buffered(call: Call) -> bool:
    """Whether the verdict on a dedup key comes later than the result of the call."""
    producer = call.producer
    return producer is not None and not (type(producer) is AwaitedProducer and producer.is_direct)


def _put(producer: BufferingProducer, template: MessageTemplate, message: PackedMessage) -> None:
    if type(producer) is AwaitedProducer:
        producer.take(template.lane, message)
    else:
        producer.put(Addressed(template.lane, message.id.encode(), message.record))


class TemplateProducer(BufferingProducer):
    """The producer of one observed call: it packs the message that Celery has made from a template.

    Args:
        templates: the templates of the app.
        template: the template of the call.
        deliver: takes the packed message, and returns False when it cannot be sent in this form.
        otherwise: publishes a message that differs from the template, as ``Producer._publish``.
    """

    def __init__(
        self,
        templates: MessageTemplates,
        template: MessageTemplate,
        deliver: Callable[[PackedMessage], Any],
        otherwise: Callable[..., Any],
    ) -> None:
        super().__init__(lambda *_: Addressed("", b"", b""), lambda _: None, "redis")
        self._templates = templates
        self._template = template
        self._deliver = deliver
        self._otherwise = otherwise

    def _prepare(
        self, body: Any, serializer: Any = None, content_type: Any = None, *args: Any, **options: Any
    ) -> Any:
        # The body of a task. Others, as that of an event, are kombu's.
        if type(body) is tuple and serializer in (None, "json") and not content_type and body[2] == EMBED:
            text = self._templates.bodies.write(body[0], body[1])
            if text is not None:
                return text, "application/json", "utf-8"
        return super()._prepare(body, serializer, content_type, *args, **options)

    def _publish(self, *message: Any) -> None:
        body, priority, content_type, encoding, headers, properties, routing_key = message[:7]
        if content_type == "application/json" and encoding == "utf-8":
            target = (message[9] or "", routing_key or "")
            packed = self._templates.refill(self._template, body, priority, headers, properties, target)
            if packed is not None and self._deliver(packed) is not False:
                return
        self._otherwise(*message)
