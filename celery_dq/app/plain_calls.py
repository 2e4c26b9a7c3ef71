"""The quick way of a plain, unbuffered call: a filled-in template, pushed on a connection of the app's pool.

What a call costs in Celery and kombu is mostly the same work done anew: routing, thirty headers, a producer
that is bound to a channel and unbound again, a queue that is copied, a retry wrapper. Of a plain call all
that is known from the first of its kind (:mod:`celery_dq.app.fast_calls`), which goes Celery's way and is
watched. Whatever is not plain, or watched by somebody else, goes Celery's way each time. A plain call with
a dedup key takes its ticket along, and its caller gets what :mod:`celery_dq.app.duplicates` makes of the
verdict.

Errors, retries and their policy are kombu's: only the first attempt is made without its wrapper.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

from kombu import Producer
from kombu.pools import ProducerPool

from celery_dq.app.duplicates import DedupRules, Ticket, Tickets, conclude, covered
from celery_dq.app.face import dq_of
from celery_dq.app.fast_calls import FastCalls, in_task
from celery_dq.app.senders import partition_lane
from celery_dq.app.watched import LEARN_OPTION
from celery_dq.dedup.key import Key
from celery_dq.dedup.rule import Dedup
from celery_dq.hooks import DEDUP
from celery_dq.transport.redis.channel import Channel
from celery_dq.transport.redis.publisher import Stamped
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.record import with_dedup

__all__ = ["PlainCalls"]

#: Modules whose backends do nothing with the producer that they are given before a call.
_BACKENDS = ("celery.backends.base", "celery.backends.redis")


class _Posting:
    """One message on its way; kombu's ``ensure`` gives it a new channel when it has connected anew."""

    def __init__(self, queue: str, task_id: str, record: bytes, ticket: Ticket | None) -> None:
        self._queue = queue
        self._task_id = task_id
        self._record = record if ticket is None else with_dedup(record, ticket.section)
        self._ticket = ticket
        self._stamped: Stamped | None = None
        self._failed: Exception | None = None

    def revive(self, channel: Any) -> None:
        """Called by kombu."""
        self._channel = channel

    def on(self, channel: Any) -> None:
        """Publish on this channel. The stamp of the first attempt stays: one that arrived is not repeated."""
        target: Queue = channel.queue(self._queue)
        if self._stamped is None:
            self._stamped = channel.publisher.number(target, self._task_id, self._record, self._ticket)
        channel.publisher.push(target, [self._stamped])

    def insist(self, connection: Any, policy: dict[str, Any], failed: Exception | None) -> None:
        """Publish with kombu's retries.

        :param connection: kombu's.
        :param policy: how often to retry, see Celery's ``task_publish_retry_policy``.
        :param failed: why the first attempt failed, when it was made already.

        Raises:
            kombu.exceptions.OperationalError: It could not be sent.
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


class PlainCalls:
    """Stands before the app's ``send_task``, behind the buffer and the deadline of a call.

    :param app: a Celery app.
    :param send_task: its own.
    """

    def __init__(self, app: Any, send_task: Callable[..., Any]) -> None:
        self._app = app
        self._send_task = send_task
        self._dedup = DedupRules(app)
        self._ways: _Ways | None = None

    def __call__(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a task by name; see Celery's ``send_task``.

        Raises:
            kombu.exceptions.OperationalError: It could not be sent.
            DuplicateCall: Another one covers it, and its rule says that this is an error.
            InvalidKey: No dedup key can be made of its arguments.
        """
        ways = self._ways
        if ways is None or ways.pid != os.getpid():
            ways = self._ways = _Ways(self._app)
        kind = None if more else ways.kind_of(name, options)
        if kind is not None:
            # A rule of the call's own has no kind, so this one is the task's.
            found = self._dedup.find(name, None)
            result = ways.send(kind, found, args, kwargs, options)
            if result is not None:
                return result
            learner = ways.learner(kind, found)
            if learner is not None:
                options[LEARN_OPTION] = learner
        return self._send_task(name, args, kwargs, *more, **options)


class _Ways:
    """The plain calls of one app in one process."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._fast = FastCalls(app)
        self._amqp = app.amqp
        self._send_message: Any = None
        #: Of the kinds that have a dedup key.
        self._tickets: dict[tuple[Any, ...], Tickets] = {}
        self._publish = (Producer.publish, Producer._publish)
        self.pid = os.getpid()
        self._possible = (
            dq_of(app).serves_queues()
            and all(_is_untouched(method, "kombu.messaging") for method in self._publish)
            and ProducerPool.Producer is Producer
            and bool(app.conf.task_publish_retry)
        )

    @property
    def _allowed(self) -> bool:
        """Whether any call may go this way now."""
        return (
            self._possible
            and not in_task()
            and Producer.publish is self._publish[0]
            and Producer._publish is self._publish[1]
            and self._fast.allowed
        )

    def kind_of(self, name: str, options: dict[str, Any]) -> tuple[Any, ...] | None:
        """The kind of a call; None when it has to go Celery's way."""
        get = options.get
        policy = get("retry_policy")
        # The deadline of calls is one, and else a policy is what the caller says of this call.
        if not self._allowed or get("retry") is not None or (policy and set(policy) != {"errback"}):
            return None
        return self._fast.kind_of(name, options)

    def learner(self, kind: tuple[Any, ...], dedup: tuple[Dedup, Key] | None) -> Callable[..., None] | None:
        """What is to see the message of this call, the first one of its kind; None when all is known."""
        if self._fast.knows(kind):
            return None

        def learn(message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> None:
            properties = dict(message["properties"])
            ticket = properties.pop(DEDUP, None)
            lane = "" if exchange else partition_lane(routing_key, properties["priority"] or 0)
            self._fast.learn(kind, lane, dict(message, properties=properties), exchange, routing_key)
            if dedup is not None and ticket is not None and self._fast.plan(kind) is not None:
                self._tickets[kind] = Tickets(*dedup, ticket)
            self._send_message = self._amqp.__dict__.get("send_task_message")

        return learn

    def send(
        self,
        kind: tuple[Any, ...],
        dedup: tuple[Dedup, Key] | None,
        args: Any,
        kwargs: Any,
        options: dict[str, Any],
    ) -> Any:
        """Send a call of a known kind, and return its result; None: it has to go Celery's way."""
        app, plan = self._app, self._fast.plan(kind)
        pool = self._amqp.producer_pool
        tickets = self._tickets.get(kind)
        if (
            plan is None
            # The task may have got another rule since.
            or (dedup and dedup[1]) is not (tickets and tickets.key)
            or type(pool) is not ProducerPool
            or self._amqp.__dict__.get("send_task_message") is not self._send_message
        ):
            return None
        ignored = options.get("ignore_result")
        backend = None if ignored else app.backend
        if backend is not None and type(backend).on_task_call.__module__ not in _BACKENDS:
            return None
        filled = self._fast.fill(plan, args, kwargs, options.get("task_id"), options.get("tenant"))
        if filled is None:
            return None
        task_id, addressed = filled
        named = bool(options.get("task_id"))
        ticket = None if tickets is None else tickets.ticket(args, kwargs, named=named)
        queue = addressed.lane.partition("/")[2]
        connection = pool.connections.acquire(block=True)
        try:
            channel = connection._default_channel if connection.connected else None
            if channel is not None and (
                type(channel).basic_publish is not Channel.basic_publish
                or channel.transients.holds(channel.client, queue)
            ):
                return None
            if backend is not None:
                with connection._reraise_as_library_errors():
                    backend.on_task_call(None, task_id)
            posting = _Posting(queue, task_id, addressed.payload, ticket)
            self._post(connection, channel, posting, options.get("retry_policy"))
        except BaseException:
            # As a pooled producer does.
            pool.connections.replace(connection)
            raise
        finally:
            connection.release()
        if tickets is not None and ticket is not None:
            conclude(app, plan.name, task_id, tickets.rule, ticket)
        result = (options.get("result_cls") or app.AsyncResult)(task_id)
        result.ignored = ignored
        return result if ticket is None else covered(app, result, ticket, named=named)

    def _post(self, connection: Any, channel: Any, posting: _Posting, policy: Any) -> None:
        failed = None
        if channel is not None and not channel.closed:
            try:
                return posting.on(channel)
            except Exception as exc:
                failed = exc
        defaults = self._app.conf.task_publish_retry_policy or {}
        posting.insist(connection, dict(defaults, **(policy or {})), failed)
        return None


def _is_untouched(method: Any, module: str) -> bool:
    """Whether no monitoring tool has put its own in the place of a method."""
    wrapped = hasattr(method, "__wrapped__")
    return isinstance(method, FunctionType) and method.__module__ == module and not wrapped
