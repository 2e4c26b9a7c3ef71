"""The kombu transport of the tenant broker, consumed by a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any

import redis
from kombu.utils.eventio import ERR, READ, poll

from celery_dq.transport.bases import VirtualChannel, VirtualTransport
from celery_dq.transport.in_flight.in_flight_messages import RIDE_ALONG_S
from celery_dq.transport.redis.channel import Channel
from celery_dq.transport.redis.connection_context import ConnectionContext
from celery_dq.transport.redis.consuming.broadcasts import Broadcasts
from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads
from celery_dq.transport.redis.consuming.delivery import ChannelDelivery
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.transport import Transport
from celery_dq.transport.threaded_transport import ThreadedTransport
from celery_dq.waker import Waker

logger = logging.getLogger(__name__)


class ThreadIdentity(ConsumerIdentity):
    """A consumer identity with a consumer thread."""

    def _new_heartbeat(self) -> Any:
        self.in_flight.acks_wait = True
        return ConsumerThreads(self)


class ThreadContext(ConnectionContext):
    """The context of a connection whose process has a consumer thread."""

    identity_class = ThreadIdentity


class Cycle:
    """The part of kombu's poller that its Redis channels call."""

    _in_protected_read = False

    def __init__(self, wake: Callable[[], None]) -> None:
        self.after_read: set[Any] = set()
        self._wake = wake
        self.is_driven = True

    def add(self, channel: Any) -> None:
        """Do nothing: the channel is consumed by a thread."""

    discard = add

    def wake(self, within_s: float = RIDE_ALONG_S) -> None:
        """Deliver, if a message may be delivered now."""
        self._wake()

    def close(self) -> None:
        """Do nothing: each channel ends its own part."""

    def watch_again(self) -> None:
        """Do nothing."""

    def forget_connection(self, connection: Any) -> None:
        """Do nothing."""


class SocketFlag:
    """A flag for which one thread or greenlet waits, and that any thread or signal handler sets."""

    def __init__(self) -> None:
        self._waker = Waker(lambda: None)
        self._poller: Any = None
        self._is_set = False

    def set(self) -> None:
        """Set the flag, and wake the waiter."""
        self._is_set = True
        self._waker.wake()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, and reset it; return False after `timeout_s` seconds."""
        if self._poller is None:
            self._poller = poll()
            self._poller.register(self._waker.fileno(), READ | ERR)
        if not self._is_set:
            self._poller.poll(timeout_s)
        self._waker.clear()
        was_set, self._is_set = self._is_set, False
        return was_set

    def close(self) -> None:
        """Close the sockets."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        self._waker.close()


class OneAnswer:
    """An answer that the consumer thread has read, with the interface of a subscriber of redis-py."""

    connection = None

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def parse_response(self, *_: Any, **__: Any) -> Any:
        """Return the answer."""
        return self._answer

    def handle_message(self, *_: Any) -> None:
        """Do nothing: the consumer thread has done its book-keeping."""


class ThreadChannel(Channel):
    """A channel whose queues a thread consumes."""

    consumer: ChannelDelivery  # type: ignore[assignment]  # until the other one has gone

    def _new_consumer(self) -> Any:
        options = self.context.options
        self._broadcasts: Broadcasts | None = None
        return ChannelDelivery(self, self.process, options.claim_ahead_us / 1e6, options.watchdog_us / 1e6)

    # -- the delivering side

    def wake_delivery(self) -> None:
        """Let the transport deliver; callable from any thread."""
        self.connection_wake()

    @property
    def connection_wake(self) -> Callable[[], None]:
        """The function that wakes the delivery."""
        transport = self.connection
        return (lambda: None) if transport is None else transport.wake_delivery

    @property
    def has_new_partitions(self) -> bool:
        """Whether the number of partitions of a queue may have changed."""
        allocated = self.consumer.allocated_partitions
        differs = self._seen_partitions != self.process.partition_maps.changes or (
            allocated is not None and allocated.differs
        )
        return differs and self._looks_at_partitions

    @property
    def _looks_at_partitions(self) -> bool:
        return self.process.clock.monotonic() >= self._resumes_at

    def tick(self) -> None:
        """Follow what has changed, before messages are delivered."""
        consumer = self.consumer
        if consumer.failure is not None:
            self._broken = True
            raise self._connection_error(consumer.failure)
        try:
            if self._starting:
                self.start_consumers()
            allocated = consumer.allocated_partitions
            follows = allocated is not None and allocated.has_changed()
            if follows:
                self._seen_partitions = -1
            if self._seen_partitions != self.process.partition_maps.changes and self._looks_at_partitions:
                self.follow_partitions()
            consumer.watchdog.decide(may_stop=self.capacity is not None)
        except self.connection_errors:
            self._broken = True
            raise

    def _connection_error(self, failure: Exception) -> Exception:
        if isinstance(failure, self.connection_errors):
            return failure
        error = redis.ConnectionError(f"The consumer thread failed: {failure!r}")
        error.__cause__ = failure
        return error

    # -- consuming

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Change the prefetch count, and claim more messages if it allows."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self.process.heartbeat.wake()

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        """See the base class."""
        if queue in self._fanout_queues or not self.transients.exists(self.client, queue):
            super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
            if queue in self._fanout_queues:
                self._follow_broadcasts()
            return
        self.context.refuse_inherited()
        # Kombu's base class wraps the payload and calls back.
        VirtualChannel.basic_consume(self, queue, no_ack, callback, consumer_tag, **kwargs)
        self.consumer.attach()
        listen = partial(self.consumer.claims.listen, self.transients.key(queue))
        self.process.heartbeat.request(partial(listen, partial(self._receive_transient, queue)))
        if not kwargs.get("nowait"):
            self.start_consumers()
            self.ahead.clear()

    def _receive_transient(self, queue: str, raw: bytes) -> None:
        self.consumer.receive_other(partial(self._deliver_transient, queue, raw))

    def _deliver_transient(self, queue: str, raw: bytes) -> bool:
        self.handle_transient(
            lambda: self.connection._deliver(self.transients.decode(raw), queue), f"queue {queue}"
        )
        return True

    def _follow_broadcasts(self) -> None:
        thread, consumer = self.process.heartbeat, self.consumer
        if self._broadcasts is None:
            self._broadcasts = consumer.claims.broadcasts = Broadcasts(
                thread.new_client, self._receive_broadcast, self.process.refusals
            )
            consumer.attach()
        topics = [topic for queue in self.active_fanout_queues for topic in self._topics_of(queue)]
        self._broadcasts.follow(topics)
        thread.wake()

    def _topics_of(self, queue: str) -> list[str]:
        if hasattr(self, "_get_subscribe_topics"):
            return list(self._get_subscribe_topics(queue))
        return [self._get_subscribe_topic(queue)]

    def _receive_broadcast(self, answer: Any) -> None:
        self.consumer.receive_other(partial(self._deliver_broadcast, answer))

    def _deliver_broadcast(self, answer: Any) -> bool:
        receive = partial(self._receive_one, OneAnswer(answer))  # type: ignore[attr-defined]
        try:
            return bool(self.handle_transient(receive, "the broadcasts"))
        except Empty:
            return False

    def _unsubscribe_from(self, queue: str) -> None:
        """Do nothing: :meth:`_follow_broadcasts` follows."""

    def basic_cancel(self, consumer_tag: str) -> None:
        """See the base class."""
        queue = self._tag_to_queue.get(consumer_tag)
        if queue is None:
            return
        if queue in self.active_fanout_queues:
            self._basic_cancel(consumer_tag)
            self._follow_broadcasts()
            return
        if self.transients.is_declared(queue):
            thread, key = self.process.heartbeat, self.transients.key(queue)
            thread.run_between_trips(partial(self.consumer.claims.unlisten, key), 1.0)
        else:
            self._starting.pop(consumer_tag, None)
            self.consumer.stop_consumer(consumer_tag)
        VirtualChannel.basic_cancel(self, consumer_tag)

    # -- acknowledging

    def send_acks_now(self) -> None:
        """Wait for the confirmation of acks, in a program that does not wait for messages now.

        Raises:
            redis.ConnectionError: The broker did not answer. The acks stay pending.
        """
        consumer = self.consumer
        if self.capacity is None and not consumer.is_asked and not consumer.flush():
            raise redis.ConnectionError("Redis did not confirm an acknowledgement, which is sent again")

    def send_acks_at_shutdown(self) -> None:
        """Do nothing: the consumer thread sends acks until its end."""

    def _send_acks(self) -> None:
        self.consumer.flush()

    def on_readable(self, *_: Any) -> Any:
        """Do nothing: no event loop reads."""


class ThreadTransport(ThreadedTransport, Transport):
    """The kombu transport of the tenant broker, consumed by a thread."""

    Channel = ThreadChannel
    implements = Transport.implements
    context_class = ThreadContext
    connection_errors = Transport.connection_errors
    channel_errors = Transport.channel_errors

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._woken: Any = SocketFlag()
        self.cycle = Cycle(self._acks_changed)
        self.context.poller = self.cycle

    def start_fetcher(self) -> Any:
        """Do nothing: the thread starts with the first consumer."""

    def refuse_inherited(self) -> None:
        """Refuse to use a connection that was inherited through a fork; raises a connection error."""
        self.context.refuse_inherited()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Deliver messages in the event loop *loop* from now on."""
        self._loop = loop
        self._attach()
        loop.on_tick.add(self._tick)

    def _tick(self) -> None:
        if self._has_undelivered():
            # Not delivered in the tick: the tick of the pool may already be over in this turn. The pool
            # would then write the task to its child only after the next event.
            self._waker.wake()

    def _has_undelivered(self) -> bool:
        return any(channel.consumer.has_undelivered for channel in tuple(self.channels))

    def _acks_changed(self) -> None:
        if self._has_undelivered():
            self.wake_delivery()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """See the base class."""
        channels = tuple(self.channels)
        for channel in channels:
            channel.consumer.begin_asking()
        try:
            super().drain_events(connection, timeout)
        finally:
            for channel in channels:
                channel.consumer.is_asked = False

    def _deliver_all(self) -> None:
        for channel in tuple(self.channels):
            channel.tick()
            channel.consumer.start_ready()
        super()._deliver_all()

    def _deliver_one(self) -> bool:
        for channel in tuple(self.channels):
            if channel.consumer.failure is not None or self._loop is None:
                channel.tick()
            if channel.consumer.deliver_one():
                if len(self.channels) > 1 and channel in self.channels:  # the callback may have closed it
                    self.channels.remove(channel)
                    self.channels.append(channel)
                return True
        return False

    def close_connection(self, connection: Any) -> None:
        """Close all channels."""
        self.context.unregister_consumer()
        VirtualTransport.close_connection(self, connection)
        if self._loop is not None:
            self._loop.on_tick.discard(self._tick)
        self._waker.close()
        self._woken.close()

    def flush(self) -> None:
        """Do nothing: each channel waits for its own acks."""
