"""The stage that makes the message of a plain call from a template, and publishes it.

Celery and kombu repeat the same work at every call: routing, thirty headers, a producer that is bound to a
channel and unbound again, a copied queue, a retry wrapper. The first plain call of its kind takes Celery's
way, and its message becomes a template (:mod:`celery_dq.app.publishing.message_template`). Calls that are not
plain, or that a tool observes, take Celery's way each time. A plain call with a dedup key sends its dedup
request along, and :mod:`celery_dq.app.publishing.dedup_stage` makes the caller's result of the verdict.

Errors, retries and their policy are kombu's. Only the first attempt is made without kombu's wrapper.
"""

from __future__ import annotations

import os
from typing import Any

from kombu import Producer
from kombu.pools import ProducerPool

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.buffer_stage import BufferChoice
from celery_dq.app.publishing.dedup_stage import DedupCallRequest, DedupRequests, conclude_verdict
from celery_dq.app.publishing.message_template import Kind, MessageTemplate, MessageTemplates, in_task
from celery_dq.app.publishing.pipeline import Call, Proceed
from celery_dq.app.publishing.results import (
    NO_SERVER_ASKED,
    flushing_result_class,
    prepare_for_results,
    result_of,
)
from celery_dq.app.publishing.task_apply_async import replace_apply_async
from celery_dq.app.senders import lane_of
from celery_dq.producer.sender import Addressed
from celery_dq.protocols import DEDUP_PROPERTY
from celery_dq.transport.redis.channel import Channel
from celery_dq.transport.redis.store.publisher import StampedMessage
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.record import with_dedup

__all__ = ["TemplateStage"]


class TemplateStage:
    """See the module.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._choice = BufferChoice(app)
        #: The message templates of this process.
        self.templates: MessageTemplates | None = None
        #: Kind of call to its dedup requests, for kinds that have a dedup key.
        self._requests: dict[Kind, DedupRequests] = {}

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`celery_dq.app.publishing.pipeline.Stage`."""
        templates = self.templates
        if templates is None or templates.pid != os.getpid():
            templates = self.templates = MessageTemplates(self._app)
        kind = self._kind_of(templates, call)
        if kind is not None:
            template = templates.get(kind)
            if template is not None:
                result = self.send_from(template, kind, call)
                if result is not None:
                    return result
            elif not templates.knows(kind):
                call.published = self._learner(templates, kind, call)
        if call.producer is not None:
            prepare_for_results(self._app, dq_of(self._app).deadline)
            flushing_result_class(self._app)
        return proceed(call)

    def _kind_of(self, templates: MessageTemplates, call: Call) -> Kind | None:
        """The kind of a call; None when it has to go Celery's way."""
        if not templates.allowed or in_task():
            return None
        options = call.options
        if call.producer is not None:
            return None if call.dedup is not None else templates.kind_of(call.name, options)
        policy = options.get("retry_policy")
        # The deadline sets a policy with only an errback. Any other policy is the caller's choice.
        if options.get("retry") is not None or (policy and set(policy) != {"errback"}):
            return None
        # A call with a dedup rule of its own has no kind.
        return templates.kind_of(call.name, options) if self._publishes(templates) else None

    def _publishes(self, templates: MessageTemplates) -> bool:
        """Whether a call that is not buffered may be published from a template in this app."""
        known = templates.publishes
        if known is None:
            known = templates.publishes = (
                dq_of(self._app).serves_queues()
                and ProducerPool.Producer is Producer
                and bool(self._app.conf.task_publish_retry)
            )
        return known

    def _learner(self, templates: MessageTemplates, kind: Kind, call: Call) -> Any:
        """The callback for the message of the first call of its kind."""
        partitioned = dq_of(self._app).serves_queues()

        def learn(message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> None:
            properties = dict(message["properties"])
            request = properties.pop(DEDUP_PROPERTY, None)
            lane = lane_of(exchange, routing_key, properties["priority"] or 0, declare) if partitioned else ""
            templates.learn(kind, lane, dict(message, properties=properties), exchange, routing_key)
            if call.dedup is not None and request is not None and templates.get(kind) is not None:
                self._requests[kind] = DedupRequests(*call.dedup, request)

        return learn

    def send_from(self, template: MessageTemplate, kind: Kind, call: Call) -> Any:
        """Send a call from its template, and return its result; None when it has to go Celery's way."""
        sent = (
            self._buffer(template, call) if call.producer is not None else self._publish(template, kind, call)
        )
        if sent is None:
            return None
        return result_of(self._app, sent, call.options.get("result_cls"), call.options.get("ignore_result"))

    def _fill(self, template: MessageTemplate, call: Call) -> tuple[str, Addressed] | None:
        assert self.templates is not None
        get = call.options.get
        return self.templates.fill(template, call.args, call.kwargs, get("task_id"), get("tenant"))

    # -- a buffered call

    def _buffer(self, template: MessageTemplate, call: Call) -> str | None:
        """Put the message into the buffer, and return its id."""
        filled = self._fill(template, call)
        if filled is None:
            return None
        dq_of(self._app).buffer.producer.put(filled[1])
        task = call.options.get("task_type")
        if task is not None and self.templates is not None:
            replace_apply_async(task, self, self.templates, self._choice)
        return filled[0]

    # -- a call that is not buffered

    def _publish(self, template: MessageTemplate, kind: Kind, call: Call) -> str | None:
        """Publish the message on a connection of the app's pool, and return its id."""
        app, options = self._app, call.options
        pool = app.amqp.producer_pool
        requests = self._requests.get(kind)
        if (
            # The task's rule may have changed since the template was made.
            (call.dedup and call.dedup[1]) is not (requests and requests.key)
            or type(pool) is not ProducerPool
            or not (
                options.get("ignore_result") or type(app.backend).on_task_call.__module__ in NO_SERVER_ASKED
            )
        ):
            return None
        filled = self._fill(template, call)
        if filled is None:
            return None
        task_id, addressed = filled
        if requests is not None:
            call.request = requests.request_for(call.args, call.kwargs, named=call.named)
        queue = addressed.lane.partition("/")[2]
        connection = pool.connections.acquire(block=True)
        try:
            channel = connection._default_channel if connection.connected else None
            if channel is not None and (
                type(channel).basic_publish is not Channel.basic_publish
                or channel.transients.exists(channel.client, queue)
            ):
                call.request = None
                return None
            publish = _Publish(queue, task_id, addressed.payload, call.request)
            publish.attempt(connection, channel, self._policy(options.get("retry_policy")))
        except BaseException:
            # A pooled producer replaces its connection in the same way.
            pool.connections.replace(connection)
            raise
        finally:
            connection.release()
        if requests is not None:
            conclude_verdict(template.name, task_id, requests.rule, call.request)
        return task_id

    def _policy(self, policy: Any) -> dict[str, Any]:
        return dict(self._app.conf.task_publish_retry_policy or {}, **(policy or {}))


class _Publish:
    """The publish of one message; kombu's ``ensure`` gives it a new channel after a reconnect."""

    def __init__(self, queue: str, task_id: str, record: bytes, request: DedupCallRequest | None) -> None:
        self._queue = queue
        self._task_id = task_id
        self._record = record if request is None else with_dedup(record, request.section)
        self._request = request
        self._stamped: StampedMessage | None = None
        self._failed: Exception | None = None

    def revive(self, channel: Any) -> None:
        """Take the channel of a new connection; kombu calls it."""
        self._channel = channel

    def on(self, channel: Any) -> None:
        """Publish on this channel. All attempts have the first stamp, so the broker stores one copy."""
        target: Queue = channel.queue(self._queue)
        if self._stamped is None:
            self._stamped = channel.publisher.number(target, self._task_id, self._record, self._request)
        channel.publisher.push(target, [self._stamped])

    def attempt(self, connection: Any, channel: Any, policy: dict[str, Any]) -> None:
        """Publish on the open channel, and after an error with kombu's retries.

        Args:
            connection: kombu's connection.
            channel: the open channel of the connection; None when it has none.
            policy: how often to retry, see Celery's ``task_publish_retry_policy``.

        Raises:
            kombu.exceptions.OperationalError: The message could not be sent.
        """
        if channel is not None and not channel.closed:
            try:
                return self.on(channel)
            except Exception as exc:
                self._failed = exc
        self._channel = None

        def attempt() -> None:
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            self.on(connection.default_channel if self._channel is None else self._channel)

        connection.transport_options.update(policy)
        connection.ensure(self, attempt, **policy)()
        return None
