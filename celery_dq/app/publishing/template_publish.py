"""The template publish of a plain, unbuffered call, on a connection of the app's pool.

Celery and kombu repeat the same work at every call: routing, thirty headers, a producer that is bound to a
channel and unbound again, a copied queue, a retry wrapper. The first plain call of its kind takes Celery's
way, and its message becomes a template (:mod:`celery_dq.app.publishing.message_template`). Calls that are not
plain, or that a tool observes, take Celery's way each time. A plain call with a dedup key sends its dedup
request along, and :mod:`celery_dq.app.publishing.dedup_call` makes the caller's result of the verdict.

Errors, retries and their policy are kombu's. Only the first attempt is made without kombu's wrapper.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kombu import Producer
from kombu.pools import ProducerPool

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.dedup_call import (
    DedupCallRequest,
    DedupRequests,
    DedupRules,
    conclude_verdict,
    covering_result,
)
from celery_dq.app.publishing.message_template import MessageTemplates, in_task
from celery_dq.app.publishing.recording_producer import LEARN_OPTION
from celery_dq.app.publishing.result_preparation import NO_SERVER_ASKED
from celery_dq.app.senders import partition_lane
from celery_dq.dedup.key import Key
from celery_dq.dedup.rule import Dedup
from celery_dq.protocols import DEDUP_PROPERTY
from celery_dq.transport.redis.channel import Channel
from celery_dq.transport.redis.store.publisher import StampedMessage
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.record import with_dedup

__all__ = ["TemplatePublish"]


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

    def insist(self, connection: Any, policy: dict[str, Any], failed: Exception | None) -> None:
        """Publish with kombu's retries.

        Args:
            connection: kombu's connection.
            policy: how often to retry, see Celery's ``task_publish_retry_policy``.
            failed: the error of the first attempt, None when none was made.

        Raises:
            kombu.exceptions.OperationalError: The message could not be sent.
        """
        self._failed = failed
        self._channel = None

        def attempt() -> None:
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            self.on(connection.default_channel if self._channel is None else self._channel)

        connection.transport_options.update(policy)
        connection.ensure(self, attempt, **policy)()


class TemplatePublish:
    """Wraps the app's ``send_task``, inside the wrappers of the buffer and of the deadline.

    Args:
        app: a Celery app.
        send_task: the wrapped ``send_task``.
    """

    def __init__(self, app: Any, send_task: Callable[..., Any]) -> None:
        self._app = app
        self._send_task = send_task
        self._dedup = DedupRules(app)
        self._paths: _TemplatePaths | None = None

    def __call__(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a task by name; see Celery's ``send_task``.

        Raises:
            kombu.exceptions.OperationalError: The call could not be sent.
            DuplicateCall: Another call covers this one, and its rule says that this is an error.
            InvalidKey: No dedup key can be made of the call's arguments.
        """
        ways = self._paths
        if ways is None or ways.pid != os.getpid():
            ways = self._paths = _TemplatePaths(self._app)
        kind = None if more else ways.kind_of(name, options)
        if kind is not None:
            # A call with a dedup rule of its own has no kind, so the task's rule holds here.
            found = self._dedup.find(name, None)
            result = ways.send(kind, found, args, kwargs, options)
            if result is not None:
                return result
            learner = ways.learner(kind, found)
            if learner is not None:
                options[LEARN_OPTION] = learner
        return self._send_task(name, args, kwargs, *more, **options)


class _TemplatePaths:
    """The plain calls of one app in one process."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._fast = MessageTemplates(app)
        self._amqp = app.amqp
        #: Kind of call to its dedup requests, for kinds that have a dedup key.
        self._requests: dict[tuple[Any, ...], DedupRequests] = {}
        self.pid = os.getpid()
        self._possible = (
            dq_of(app).serves_queues()
            and ProducerPool.Producer is Producer
            and bool(app.conf.task_publish_retry)
        )

    @property
    def _allowed(self) -> bool:
        """Whether any call may be published from a template now."""
        return self._possible and not in_task() and self._fast.allowed

    def kind_of(self, name: str, options: dict[str, Any]) -> tuple[Any, ...] | None:
        """The kind of a call; None when it has to go Celery's way."""
        get = options.get
        policy = get("retry_policy")
        # The deadline sets a policy with only an errback. Any other policy is the caller's choice.
        if not self._allowed or get("retry") is not None or (policy and set(policy) != {"errback"}):
            return None
        return self._fast.kind_of(name, options)

    def learner(self, kind: tuple[Any, ...], dedup: tuple[Dedup, Key] | None) -> Callable[..., None] | None:
        """The callback for the message of the first call of its kind; None when the kind is known."""
        if self._fast.knows(kind):
            return None

        def learn(message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> None:
            properties = dict(message["properties"])
            request = properties.pop(DEDUP_PROPERTY, None)
            lane = "" if exchange else partition_lane(routing_key, properties["priority"] or 0)
            self._fast.learn(kind, lane, dict(message, properties=properties), exchange, routing_key)
            if dedup is not None and request is not None and self._fast.plan(kind) is not None:
                self._requests[kind] = DedupRequests(*dedup, request)

        return learn

    def send(
        self,
        kind: tuple[Any, ...],
        dedup: tuple[Dedup, Key] | None,
        args: Any,
        kwargs: Any,
        options: dict[str, Any],
    ) -> Any:
        """Send a call of a known kind, and return its result; None when it has to go Celery's way."""
        app, plan = self._app, self._fast.plan(kind)
        pool = self._amqp.producer_pool
        requests = self._requests.get(kind)
        if (
            plan is None
            # The task's rule may have changed since the template was made.
            or (dedup and dedup[1]) is not (requests and requests.key)
            or type(pool) is not ProducerPool
        ):
            return None
        ignored = options.get("ignore_result")
        if not ignored and type(app.backend).on_task_call.__module__ not in NO_SERVER_ASKED:
            return None
        filled = self._fast.fill(plan, args, kwargs, options.get("task_id"), options.get("tenant"))
        if filled is None:
            return None
        task_id, addressed = filled
        named = bool(options.get("task_id"))
        request = None if requests is None else requests.request_for(args, kwargs, named=named)
        queue = addressed.lane.partition("/")[2]
        connection = pool.connections.acquire(block=True)
        try:
            channel = connection._default_channel if connection.connected else None
            if channel is not None and (
                type(channel).basic_publish is not Channel.basic_publish
                or channel.transients.exists(channel.client, queue)
            ):
                return None
            posting = _Publish(queue, task_id, addressed.payload, request)
            self._post(connection, channel, posting, options.get("retry_policy"))
        except BaseException:
            # A pooled producer replaces its connection in the same way.
            pool.connections.replace(connection)
            raise
        finally:
            connection.release()
        if requests is not None and request is not None:
            conclude_verdict(plan.name, task_id, requests.rule, request)
        result = (options.get("result_cls") or app.AsyncResult)(task_id)
        result.ignored = ignored
        return result if request is None else covering_result(app, result, request, named=named)

    def _post(self, connection: Any, channel: Any, posting: _Publish, policy: Any) -> None:
        failed = None
        if channel is not None and not channel.closed:
            try:
                return posting.on(channel)
            except Exception as exc:
                failed = exc
        defaults = self._app.conf.task_publish_retry_policy or {}
        posting.insist(connection, dict(defaults, **(policy or {})), failed)
        return None
