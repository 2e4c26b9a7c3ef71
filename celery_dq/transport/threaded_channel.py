"""The channel of a transport whose fetcher has a thread of its own: queues, bindings and delivery.

A store keeps the queues and the bindings for all processes. Kombu's own tables are those of one process, in
which a reply finds only queues that this process has declared. The channels of Redis share two functions.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from kombu.transport.base import to_rabbitmq_queue_arguments  # type: ignore[attr-defined]  # not in its stubs

from celery_dq.errors import described
from celery_dq.per_process import OwnerProcess
from celery_dq.shown import shown_logger
from celery_dq.transport.bases import VirtualChannel
from celery_dq.transport.fetcher import QueueSubscription
from celery_dq.transport.packer import STAMPS
from celery_dq.transport.threaded_transport import ThreadedTransport

__all__ = [
    "Binding",
    "BindingTable",
    "QueueDirectory",
    "ThreadedChannel",
    "handle_transient",
    "queue_arguments",
    "warn_of_ignored",
]

logger = shown_logger(__name__)

#: Maximum number of messages that are taken ahead for consumers without a prefetch count.
MOST_AHEAD = 100
#: A transient queue with this many messages gets no more broadcasts: its user has gone or cannot keep up.
TRANSIENT_CAP = 1000
#: Argument of RabbitMQ, its name in kombu's ``Queue``, and the remedy.
_IGNORED = (
    (
        "x-expires",
        "expires",
        "a queue that is kept is never deleted; give auto_delete=True as well, or delete it",
    ),
    ("x-message-ttl", "message_ttl", "give each message an expiration (in Celery, expires=…)"),
    ("x-max-length", "max_length", "nothing here bounds a queue"),
    ("x-max-length-bytes", "max_length_bytes", "nothing here bounds a queue"),
    ("x-dead-letter-exchange", "x-dead-letter-exchange", "see app.dq.dead_letters"),
)

Consumer = tuple[str, Callable[[Any], Any], bool]


class Binding(NamedTuple):
    """One binding of an exchange.

    Attributes:
        routing_key: The routing key or pattern.
        queue: Name of the bound queue.
        transient: Whether the binding ends with the connection that made it.
    """

    routing_key: str
    queue: str
    transient: bool


class BindingTable(Protocol):
    """The bindings of all exchanges, as a store keeps them for all processes."""

    def bind(self, exchange: str, queue: str, routing_key: str, transient: bool) -> None:
        """Add a binding; a transient one ends with its queue. A second call changes nothing."""

    def unbind(self, exchange: str, queue: str, routing_key: str) -> None:
        """Remove a binding, if it exists."""

    def table(self, exchange: str, fresh: bool = False) -> Sequence[Binding]:
        """Return the bindings of an exchange; with `fresh`, all that were confirmed before the call."""


class QueueDirectory(Protocol):
    """The queues of a store.

    A *transient* queue is declared by its user and deleted after its last user: replies to remote control,
    mailboxes of workers, events. The queues of users that were killed are deleted some time later.
    """

    def declare(self, queue: str, transient: bool = False) -> None:
        """Create a queue, and note this connection as a user of a transient one. Idempotent."""

    def exists(self, queue: str) -> bool:
        """Whether any process has declared the queue."""

    def size(self, queue: str) -> int:
        """How many messages wait, without delayed messages and messages in flight."""

    def loads(self, queues: Sequence[str]) -> Sequence[int | None]:
        """How many messages are in each queue; None for a queue that does not exist."""

    def purge(self, queue: str) -> int:
        """Delete the waiting and the delayed messages, but none in flight; return how many."""

    def delete(self, queue: str) -> None:
        """Delete the queue with its messages."""

    def leave(self, queue: str) -> None:
        """End this connection's use of a transient queue; the last user deletes it."""


class ThreadedChannel(VirtualChannel):
    """A channel that delivers from the inboxes that a fetcher's thread fills.

    Args:
        connection: The transport.
        **kwargs: Further arguments of kombu.
    """

    #: Read by kombu.
    supports_fanout = True

    def __init__(self, connection: ThreadedTransport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        # Kombu forgets the connection of a closed channel.
        self._transport = connection
        self._owner = OwnerProcess()
        self._subscriptions: dict[str, QueueSubscription] = {}
        self._called: dict[str, deque[Consumer]] = {}
        self._transients: set[str] = set()

    @property
    def in_flight(self) -> Any:
        """The in-flight messages of the connection."""
        return self._transport.in_flight

    # -- for subclasses ----------------------------------------------------------

    def read_message(self, queue: str, claimed: Any) -> Any:
        """Make the message of an item of an inbox; None for one that is not to be delivered."""
        raise NotImplementedError

    def discard(self, message: Any) -> None:
        """End a message that must not run, and report its task to Celery."""
        raise NotImplementedError

    # -- declaring -------------------------------------------------------------

    def uses(self, queue: str) -> bool:
        """Whether this transient queue was declared on this channel."""
        return queue in self._transients

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        """Return the arguments of a queue together with those of kombu's ``Queue``, such as ``expires``."""
        return queue_arguments(arguments, options)

    def _new_queue(self, queue: str, auto_delete: bool = False, **kwargs: Any) -> None:
        self._transport.queues.declare(queue, auto_delete)
        if auto_delete:
            self._transients.add(queue)
        else:
            warn_of_ignored(queue, kwargs.get("arguments"))

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return bool(self._transport.queues.exists(queue))

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        self._transport.bindings.bind(exchange, queue, routing_key or "", queue in self._transients)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", *args: Any, **kwargs: Any
    ) -> None:
        """Remove a binding, including one that another process made."""
        self.state.binding_delete(queue, exchange, routing_key)
        self._transport.bindings.unbind(exchange or "amq.direct", queue, routing_key)

    def get_table(self, exchange: str, fresh: bool = False) -> list[tuple[Any, ...]]:
        """Return the bindings of *exchange* that all processes have made."""
        kind = self.typeof(exchange)
        return [
            kind.prepare_bind(binding.queue, exchange, binding.routing_key, None)
            for binding in self._transport.bindings.table(exchange, fresh)
        ]

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        if not exchange:
            return [routing_key or default or self.deadletter_queue or ""]
        queues = self._matching(exchange, routing_key)
        if not queues and self.typeof(exchange).type == "direct":
            # The reply queue may have been bound a moment ago, through another server of the store.
            queues = self._matching(exchange, routing_key, fresh=True)
        default = default or self.deadletter_queue
        if not queues and default is not None:
            warnings.warn(
                f"No queue is bound to exchange {exchange!r} with routing key {routing_key!r}: the message "
                f"goes to queue {default!r}",
                stacklevel=2,
            )
            self._new_queue(default)
            queues = [default]
        return queues

    def _matching(self, exchange: str, routing_key: str, fresh: bool = False) -> list[str]:
        kind = self.typeof(exchange)
        return sorted(kind.lookup(self.get_table(exchange, fresh), exchange, routing_key, None))

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Delete *queue* with its messages, also if another connection declared it."""
        if if_empty and self._size(queue):
            return
        super().queue_delete(queue, if_unused=if_unused, if_empty=if_empty, **kwargs)
        self._transients.discard(queue)
        self._transport.queues.delete(queue)

    def _delete(self, queue: str, exchange: str, routing_key: str, *args: Any, **kwargs: Any) -> None:
        self._transport.bindings.unbind(exchange, queue, routing_key or "")

    def _size(self, queue: str) -> int:
        return int(self._transport.queues.size(queue))

    def _purge(self, queue: str) -> int:
        return int(self._transport.queues.purge(queue))

    # -- publishing ------------------------------------------------------------

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Publish a message once per queue: the stamps of a failed attempt stay on the message.

        Raises the store's connection error on a closed channel, and when the store did not answer.
        """
        if self.closed:
            raise self._transport.unusable("The channel was closed: publish on a new one")
        result = super().basic_publish(message, exchange, routing_key, **kwargs)
        message["properties"].pop(STAMPS, None)
        return result

    def _inplace_augment_message(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        # No base64: a record holds raw bytes, and base64 adds a third to the size.
        message["properties"]["delivery_info"].update(exchange=exchange, routing_key=routing_key)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        raise NotImplementedError

    def published(self, queues: Iterable[str]) -> None:
        """Look for messages of these queues at once, where this channel consumes them."""
        for queue in queues:
            subscription = self._subscriptions.get(queue)
            if subscription is not None:
                subscription.look_now()

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        table = self._transport.bindings.table(exchange)
        lasting = sorted({binding.queue for binding in table if not binding.transient})
        passing = sorted({binding.queue for binding in table if binding.transient} - {*lasting})
        loads = self._transport.queues.loads(passing) if passing else []
        for queue, load in zip(passing, loads, strict=True):
            if load is not None and load < TRANSIENT_CAP:
                lasting.append(queue)
            elif load is not None:
                logger.warning(
                    "Transient queue %s holds %d messages; a broadcast to exchange %s was not copied to it. "
                    "Its user has gone or cannot keep up.",
                    queue,
                    load,
                    exchange,
                    extra={"event": "broadcast_dropped"},
                )
        for queue in lasting:
            self._put(queue, message)

    # -- consuming -------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        """Consume *queue*; several consumers of one queue on a channel receive messages in rotation."""
        self._transport.refuse_inherited()
        self._tag_to_queue[consumer_tag] = queue
        self._active_queues.append(queue)
        self._consumers.add(consumer_tag)
        self._called.setdefault(queue, deque()).append((consumer_tag, callback, no_ack))
        if queue not in self._subscriptions:
            self._transport.queues.declare(queue, queue in self._transients)
            subscription = self._subscriptions[queue] = self._transport.subscribe(self, queue)
            self._transport.start_fetcher().add(subscription)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop a consumer. Messages that were taken and not delivered are requeued."""
        queue = self._tag_to_queue.get(consumer_tag)
        if queue is not None:
            kept = deque(each for each in self._called.get(queue, ()) if each[0] != consumer_tag)
            if kept:
                self._called[queue] = kept
            else:
                self._called.pop(queue, None)
                subscription = self._subscriptions.get(queue)
                if subscription is not None:
                    self._transport.cancel(subscription)
                    del self._subscriptions[queue]
        super().basic_cancel(consumer_tag)

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Change the prefetch count, and let the fetcher take more messages if it allows."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self._transport.look_again()

    def _reset_cycle(self) -> None:
        """Do nothing: the transport delivers the messages."""

    def room(self, subscription: QueueSubscription) -> int:
        """How many messages the fetcher may claim for *subscription* now; called in the fetcher's thread."""
        qos = self.qos
        if self.closed or not qos.can_consume():
            return 0
        ahead = sum(len(each.inbox) for each in tuple(self._transport.ready) if each.channel is self)
        allowed = qos.can_consume_max_estimate()
        room = (MOST_AHEAD if allowed is None else allowed) - ahead
        # Each queue gets its share of the prefetch count.
        return min(room, max(room // max(len(self._subscriptions), 1), 1)) if room > 0 else 0

    def deliver_one(self, subscription: QueueSubscription) -> bool:
        """Deliver the oldest message of *subscription* if the prefetch count allows.

        Returns:
            Whether a message was delivered.
        """
        queue, inbox = subscription.queue, subscription.inbox
        consumers = self._called.get(queue)
        while inbox and consumers and self.qos.can_consume():
            message = self.read_message(queue, inbox[0])
            if message is None or message.discard:
                inbox.popleft()
                if message is not None:
                    self.discard(message)
                continue
            consumers.rotate(-1)
            _, callback, no_ack = consumers[-1]
            if not no_ack:
                # Count the message before it leaves the inbox, so that the fetcher never takes one too many.
                self.qos.append(message, message.delivery_tag)
            inbox.popleft()
            if no_ack:
                self.in_flight.finish(message.delivery_tag)
            if queue in self._transients:
                handle_transient(
                    partial(callback, message),
                    f"queue {queue}",
                    in_worker=self._transport.worker is not None,
                    passing=self._transport.connection_errors,
                )
            else:
                callback(message)
            return True
        return False

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return one message at once, or None. Expired and unreadable messages are passed over."""
        while claimed := self._transport.take_one(queue):
            message = self.read_message(queue, claimed[0])
            if message is not None and message.discard:
                self.discard(message)
            elif message is not None:
                if no_ack:
                    self.in_flight.finish(message.delivery_tag)
                else:
                    self.qos.append(message, message.delivery_tag)
                return message
        return None

    def message_to_python(self, raw_message: Any) -> Any:
        """Return the message unchanged: the transport delivers message objects."""
        return raw_message

    def send_acks_now(self, held: object = None) -> None:
        """Let the fetcher send the pending acks, and claim messages for which there is room now."""
        self._transport.look_again()

    def has_unconfirmed_acks(self, queue: str) -> bool:
        """Whether a message of a queue has ended, and the broker may still confirm it; from any thread."""
        return self._transport.has_unconfirmed_acks(queue)

    # -- the end ---------------------------------------------------------------

    def close(self) -> None:
        """Requeue the messages that were not acknowledged, and leave the transient queues."""
        if self.closed:
            return
        if not self._owner.is_current:
            # A forked child closes an inherited channel: the in-flight messages belong to the parent.
            self.closed = True
            self._transport.close_channel(self)
            return
        transients, self._transients = self._transients, set()
        super().close()
        self._transport.flush()
        for queue in transients:
            self._transport.leave(queue)


def handle_transient(
    handle: Callable[[], Any], origin: str, *, in_worker: bool, passing: tuple[type[BaseException], ...]
) -> Any:
    """Decode and handle a message of a transient queue or a broadcast: remote control, an event, a reply.

    Celery's receivers of these raise what their content causes, and a dead letter would help no one. A worker
    logs one that it cannot handle, and goes on. A program gets the error of its own receiver.

    Args:
        handle: Decodes the message, and calls its receivers.
        origin: Name of its queue, or a word for the broadcasts.
        in_worker: Whether this process is a worker.
        passing: Errors of the connection, which are raised.

    Returns:
        The result of `handle`; True for a message that was passed over.
    """
    try:
        return handle()
    except passing:
        raise
    except Exception as error:
        if not in_worker:
            raise
        logger.error(
            "A message of %s could not be handled, and is dropped: %s. Look for a program other than Celery "
            "that publishes there.",
            origin,
            described(error),
            extra={"event": "transient_message_dropped"},
        )
        return True


def queue_arguments(arguments: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return RabbitMQ's arguments of a queue; kombu 5.5 drops the options on its virtual transports.

    Args:
        arguments: ``queue_arguments`` of kombu's ``Queue``.
        options: its ``expires``, ``message_ttl``, ``max_length``, ``max_length_bytes`` and ``max_priority``.
    """
    return dict(to_rabbitmq_queue_arguments(dict(arguments or {}), **options))


def warn_of_ignored(queue: str, arguments: Mapping[str, Any] | None) -> None:
    """Warn, once per process and queue, of arguments without an effect on an ordinary queue."""
    for argument, spelled, remedy in _IGNORED:
        value = (arguments or {}).get(argument)
        if value is not None:
            warnings.warn(
                f"Queue {queue!r} is declared with {spelled} = {value!r}, without effect here: {remedy}.",
                UserWarning,
                stacklevel=2,
            )
