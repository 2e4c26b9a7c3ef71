"""The boot step that reports, on a tenant broker, that a run of this worker has lost its dedup lock."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from typing import Any

from celery_dq.context import AppContext
from celery_dq.daemon_threads import start_daemon
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import dedup_lock_lost
from celery_dq.keys import every_evicted
from celery_dq.shown import shown_logger
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.store.message_ids import Delivery, delivery_of, task_id_of
from celery_dq.worker.bootsteps import ContextStep

logger = shown_logger(__name__)

#: Seconds until the listener connects again after an error.
PAUSE = 1.0
#: Seconds after which a silent connection is checked.
PATIENCE = 15.0


class EvictionsStep(ContextStep):
    """Sends :data:`~celery_dq.dedup.signals.dedup_lock_lost` for runs of this worker.

    The scripts publish every eviction. An eviction during a lost connection is counted, but not reported. The
    step does nothing on other brokers. It also does nothing if no task has a dedup rule and the signal has no
    receiver, so that the workers of most apps need no further connection.
    """

    requires = ("celery_dq.worker.bootsteps:ConsumerStep",)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Make the listener, on a tenant broker."""
        self._app, self._context, options = consumer.app, context, context.options
        pattern = every_evicted(options.environment, options.key_prefix)
        self._listener = _EvictionListener(pattern, self._on_evicted)
        return consumer.conninfo.transport_cls in TENANT_SCHEMES

    def start(self, consumer: Any) -> None:
        """Listen on the present connection, which is a new one after a reconnect."""
        if self._concerned:
            self._listener.listen(consumer.connection.default_channel.own_clients())

    @property
    def _concerned(self) -> bool:
        return bool(dedup_lock_lost.receivers) or any(
            rule_of(task) is not None for task in self._app.tasks.values()
        )

    def shutdown(self, consumer: Any) -> None:
        """Stop listening: no task runs now."""
        self._listener.stop()

    def _on_evicted(self, channel: str, payload: str) -> None:
        run, _, scope = payload.partition("\0")
        claim, _, message_id = run.partition("/")
        evicted = Delivery(channel.removesuffix("evicted"), claim, message_id)
        capacity = self._context.capacity
        if capacity is None or all(delivery_of(tag) != evicted for tag in capacity.running_tags()):
            return  # the run of another worker
        size, _, rest = scope.encode().partition(b":")
        key, task_id = rest[int(size) :].decode(), task_id_of(message_id)
        logger.warning(
            "Task %s lost its dedup lock %s; another run may have begun.",
            task_id,
            key,
            extra={"event": "dedup_lock_lost"},
        )
        dedup_lock_lost.send(sender=self._app, key=key, task_id=task_id, token=int(claim))


class _EvictionListener:
    """A thread that listens to channels.

    Args:
        pattern: the pattern of the channels.
        on_message: called from the thread with the channel and the text of each message.
    """

    def __init__(self, pattern: str, on_message: Callable[[str, str], None]) -> None:
        self._pattern = pattern
        self._on_message = on_message
        # A channel of this listener only, to wake the thread.
        self._own = f"{pattern}:{uuid.uuid4().hex}"
        self._connect: Callable[[], Any] | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self, connect: Callable[[], Any]) -> None:
        """Begin to listen. A thread that listens already uses the new client from its next error on."""
        self._connect = connect
        if self._thread is None:
            self._thread = start_daemon(self._run, "dq-dedup-evictions")

    def stop(self) -> None:
        """End the thread and close its connections."""
        self._stopped.set()
        if self._thread is not None and self._connect is not None:
            client = self._connect()
            with contextlib.suppress(Exception):  # without the message the thread ends a little later
                client.publish(self._own, "")
            self._thread.join(1.0)
            client.connection_pool.disconnect()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._listen_once()

    def _listen_once(self) -> None:
        try:
            self._listen()
        except Exception as exc:
            if not self._stopped.is_set():
                logger.info(
                    "This worker does not receive evictions of dedup locks (%s); it connects again in %g s.",
                    exc,
                    PAUSE,
                    extra={"event": "dedup_evictions_not_received"},
                )
            # Pause, because the server may be restarting.
            self._stopped.wait(PAUSE)

    def _listen(self) -> None:
        assert self._connect is not None
        with self._connect().pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.psubscribe(self._pattern)
            pubsub.subscribe(self._own)
            while not self._stopped.is_set():
                message = pubsub.get_message(timeout=PATIENCE)
                if message is not None and message["data"]:
                    self._on_message(_text(message["channel"]), _text(message["data"]))


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
