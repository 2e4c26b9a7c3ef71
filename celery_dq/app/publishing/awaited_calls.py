"""Awaited calls: ``await task.adelay(…)`` and its siblings, on the tenant broker.

An awaited call takes the way of every call: Celery's ``apply_async``, the stages of
:mod:`celery_dq.app.publishing.pipeline`, the signals, the templates. Its producer
(:mod:`celery_dq.app.publishing.awaited_producer`) keeps the message, as the buffer's producer does. A
coroutine then exchanges it with Redis, within the deadline and by the circuit breaker of the plain calls. The
verdict on a dedup key is concluded after the answer.

A thread runs the parts that cannot be awaited: the first call of a process, which reads settings and scripts,
the declaration of a queue, a message for an exchange, and each call on a broker without asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import redis
from kombu.exceptions import LimitExceeded, OperationalError
from kombu.pools import ProducerPool

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.amqp import no_free_connection
from celery_dq.app.publishing.awaited_producer import (
    AwaitedMessage,
    AwaitedProducer,
    template_of_producers,
)
from celery_dq.app.publishing.dedup_stage import DedupStage, conclude_verdict
from celery_dq.app.publishing.direct_stage import (
    CallLimits,
    DirectStage,
    publish_by_kombu,
    publish_direct,
)
from celery_dq.app.publishing.results import NO_SERVER_ASKED
from celery_dq.app.timeouts import Deadline
from celery_dq.clock import SystemClock
from celery_dq.compat.celery_calls import in_task
from celery_dq.compat.kombu_messages import library_errors
from celery_dq.per_loop import PerLoop
from celery_dq.per_process import OwnerProcess
from celery_dq.transport.aliases import CLUSTER_SCHEME, TENANT_SCHEMES
from celery_dq.transport.packer import Packer
from celery_dq.transport.redis.store.asyncio_publisher import (
    AsyncioBroker,
    BlockingPushNeeded,
    LoopPublishers,
    Publication,
)
from celery_dq.transport.redis.store.publisher import may_wait_for_room, pauses_for_room
from celery_dq.transport.redis.store.server_errors import BacklogFull, refusals_named

T = TypeVar("T")

#: Maximum number of connections of one loop where ``broker_pool_limit`` sets none.
MOST_CONNECTIONS = 10
#: Options with which a caller chooses the connection of a call.
_OWN_CONNECTION = ("producer", "connection", "publisher")


class AsyncioPublishing:
    """The parts of awaited calls that all loops of a process share, and the publishers of each loop.

    Args:
        app: A Celery app.
        broker: Its broker.

    Attributes:
        broker: The same.
        connection: A kombu connection that is never opened. It knows the errors of the transport.
        producers: The attributes of the producers of calls.
        recoverable: Errors after which a call is tried again.
        publishers: The publishers of each loop.
    """

    def __init__(self, app: Any, broker: AsyncioBroker) -> None:
        self.broker = broker
        self.connection = app.connection_for_write()
        packer = Packer(dq_of(app).options, SystemClock())
        self.producers = template_of_producers(packer, self.connection.transport_cls)
        self.recoverable: tuple[type[BaseException], ...] = self.connection.recoverable_connection_errors
        limit = app.conf.broker_pool_limit or MOST_CONNECTIONS
        self.publishers = PerLoop(partial(LoopPublishers, broker, limit))


class _NotDirect(Exception):
    """The queue of a template is transient by now, so that Celery has to make the message. None was sent."""


@dataclass(slots=True, eq=False)
class _Found:
    """The finding of a process about its broker.

    Attributes:
        owner: The process.
        is_known: Whether it has looked.
        publishing: The parts of awaited calls; None on a broker without asyncio.
    """

    owner: OwnerProcess = field(default_factory=OwnerProcess)
    is_known: bool = False
    publishing: AsyncioPublishing | None = None


class AwaitedCalls:
    """``app.asend_task``, and the way of ``adelay`` and ``aapply_async``.

    Args:
        app: A Celery app that was set up.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._found = _Found()
        #: Those of parent processes. They are kept, because the end of a connection of asyncio would act on
        #: the selector of the parent's loop.
        self._inherited: list[_Found] = []

    async def __call__(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send a task by name; see Celery's ``send_task``, whose options it has.

        Raises:
            kombu.exceptions.OperationalError: The call could not be sent.
            DuplicateCall: Another call covers this one, and its rule says that this is an error.
        """
        return await self.send(self._app.send_task, name, args, kwargs, **options)

    async def send(self, send: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make a call by a method of Celery, and await its exchange with the broker.

        Args:
            send: ``apply_async`` of a task or a signature, or ``send_task``.
            args: Its arguments.
            options: Its options.

        Returns:
            The result that `send` returns without asyncio.
        """
        if in_task():
            # Celery knows by the thread that the call is a child of the task. It is tried until it is sent.
            return send(*args, **options)
        found = self._found
        if not found.owner.is_current:
            self._inherited.append(found)
            found = self._found = _Found()
        publishing = found.publishing
        if publishing is None or any(options.get(name) is not None for name in _OWN_CONNECTION):
            if self._app.conf.task_always_eager and send is not self._app.send_task:
                return send(*args, **options)
            plain = partial(send, *args, **options)
            plain = plain if found.is_known else partial(self._send_first, found, plain)
            return await self._with_room(partial(asyncio.to_thread, plain))
        publishers = await publishing.publishers.get()
        await publishers.turns.wait()
        producer = options["producer"] = AwaitedProducer(publishing.producers)
        try:
            result = send(*args, **options)
        except BaseException:
            if producer.limits is not None and producer.limits.breaker is not None:
                producer.limits.breaker.abstained()
            raise
        for addressed in producer.buffered:
            await dq_of(self._app).buffer.producer.aput(addressed)
        if producer.messages:
            try:
                await self._stage(DirectStage).send_awaited(
                    producer.limits, partial(self._send_all, publishing, producer)
                )
            except _NotDirect:
                del options["producer"]
                return await self._with_room(partial(asyncio.to_thread, send, *args, **options))
        return self._concluded(producer, result)

    def _stage(self, kind: type[T]) -> T:
        found: T = next(each for each in self._app.send_task.stages if isinstance(each, kind))
        return found

    # -- the broker of a process

    def _send_first(self, found: _Found, send: Callable[[], Any]) -> Any:
        """Make a plain call, which opens a connection within its deadline, and then look at the broker."""
        try:
            result = send()
        except BacklogFull:
            self._look_at_broker(found)
            raise
        self._look_at_broker(found)
        return result

    def _look_at_broker(self, found: _Found) -> None:
        app = self._app
        connection = app.connection_for_write()
        # A broker in a list of several is chosen by kombu, at each connection.
        is_one = connection.transport_cls == "dq-sentinel" or len(connection.alt) <= 1
        if not (
            is_one
            and connection.transport_cls in TENANT_SCHEMES
            and connection.transport_cls != CLUSTER_SCHEME
            and type(app.amqp.producer_pool) is ProducerPool
            and type(app.backend).on_task_call.__module__ in NO_SERVER_ASKED
        ):
            found.is_known = True
        elif not found.is_known:
            # While the broker does not answer, the next call looks again.
            with suppress(OperationalError, redis.RedisError, OSError), app.producer_or_acquire() as producer:
                broker = AsyncioBroker(producer.channel)
                if broker.serves:
                    found.publishing = AsyncioPublishing(app, broker)
                found.is_known = True

    # -- one call

    async def _send_all(self, publishing: AsyncioPublishing, producer: AwaitedProducer) -> None:
        try:
            for message in producer.messages:
                await self._send(publishing, message, producer.limits)
        except Exception:
            # The errors of a plain call. Their names are looked up only when there is one.
            with library_errors(publishing.connection), refusals_named():
                raise

    async def _send(self, publishing: AsyncioPublishing, message: AwaitedMessage, limits: CallLimits) -> None:
        packed, broker = message.packed, publishing.broker
        if packed is None or not broker.knows(packed.queue):
            await self._with_room(partial(self._send_in_thread, broker, message, limits))
            return
        publishers = await publishing.publishers.get()
        publication, begins = Publication(packed), time.monotonic()
        pauses: Iterator[float] | None = None
        refused: BacklogFull | None = None
        for retries in count():
            try:
                await publishers.push(publication, _left_s(limits))
                return
            except LimitExceeded as error:
                if refused is not None:
                    raise refused from None  # its time was over before the last attempt
                raise no_free_connection(time.monotonic() - begins, publishers.limit) from error
            except BlockingPushNeeded:
                await self._in_thread(
                    limits, publish_direct, packed, limits.whole_policy(self._app), publication.stamped
                )
                return
            except BacklogFull as error:
                pauses = pauses or pauses_for_room(dq_of(self._app).options, SystemClock())
                next_s = next(pauses, None) if error.waits else None
                if next_s is None:
                    raise
                # The message is not stored, so it may get another number.
                publication, pause_s, refused = Publication(packed), next_s, error
            except publishing.recoverable as error:
                pause_s = _pause_s(limits, limits.whole_policy(self._app), retries, error)
            await asyncio.sleep(pause_s)

    async def _with_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make a call in a thread again until its tenant has room, and wait for that without a thread.

        Raises:
            BacklogFull: There was no room.
        """
        pauses: Iterator[float] | None = None
        while True:
            token = may_wait_for_room.set(False)
            try:
                return await attempt()
            except BacklogFull as error:
                pauses = pauses or pauses_for_room(dq_of(self._app).options, SystemClock())
                pause_s = next(pauses, None) if error.waits else None
                if pause_s is None:
                    raise
            finally:
                may_wait_for_room.reset(token)
            await asyncio.sleep(pause_s)

    async def _send_in_thread(
        self, broker: AsyncioBroker, message: AwaitedMessage, limits: CallLimits
    ) -> None:
        """Publish a message in a thread: to an exchange, or to a queue that the process does not know yet."""
        packed = message.packed
        if packed is not None and await self._in_thread(
            limits, publish_direct, packed, limits.whole_policy(self._app)
        ):
            broker.durable.add(packed.queue)
        elif message.prepared:
            await self._in_thread(limits, publish_by_kombu, limits.whole_policy(self._app), *message.prepared)
        else:
            raise _NotDirect

    async def _in_thread(self, limits: CallLimits, publish: Callable[..., T], *arguments: Any) -> T:
        def publish_in_time() -> T:
            # The thread has a copy of the context.
            dq_of(self._app).deadline.call.set(limits.limited)
            return publish(self._app, *arguments)

        return await asyncio.to_thread(publish_in_time)

    def _concluded(self, producer: AwaitedProducer, result: Any) -> Any:
        """Return the result of a call, after the verdict on its dedup key."""
        call = producer.call
        if call is None or call.request is None or call.dedup is None:
            return result
        conclude_verdict(call.name, result.id, call.dedup[0], call.request)
        return self._stage(DedupStage).answer(call, result)


def _left_s(limits: CallLimits) -> float | None:
    """Return the seconds until the last attempt may begin; None without a limit."""
    limited = limits.limited
    return None if limited is None else max(limited.latest - time.monotonic(), 0.0)


def _pause_s(limits: CallLimits, policy: dict[str, Any], retries: int, error: BaseException) -> float:
    """Return the pause before the next attempt, as kombu makes it; raise when there is none.

    Args:
        limits: The limits of the call.
        policy: Its whole retry policy.
        retries: Number of attempts after the first one.
        error: The error of the last attempt.
    """
    get = policy.get
    most, errback = get("max_retries"), get("errback")
    if most is not None and retries >= most:
        raise error
    interval_s = min(get("interval_start", 1) + get("interval_step", 1) * retries, get("interval_max", 1))
    if not isinstance(errback, Deadline):
        if errback is not None:
            errback(error, interval_s)
        return float(interval_s)
    pause_s = 0.0 if limits.limited is None else errback.pause_s(limits.limited, error)
    return max(float(interval_s), pause_s)
