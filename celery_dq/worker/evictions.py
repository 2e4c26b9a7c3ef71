"""The boot step that hears, on a tenant broker, when a run of this worker has lost its dedup key."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

from celery import bootsteps

from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import claim_lost
from celery_dq.hooks import WIRES, Wires
from celery_dq.keys import every_evicted
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.ids import task_id_of

logger = logging.getLogger(__name__)

#: Seconds until it listens again after trouble.
PAUSE = 1.0
#: Seconds after which a silent connection is looked at.
PATIENCE = 15.0


class EvictionsStep(bootsteps.StartStopStep):
    """Sends :data:`~celery_dq.dedup.signals.claim_lost` for runs of this worker.

    The scripts publish every eviction; one that happens while nobody listens is counted, but not told. Does
    nothing on other brokers, nor where no task says anything of dedup and nobody is to be told: a call may
    have a key of its own, but most apps use none, and each worker would hold a connection more.
    """

    requires = ("celery_dq.worker.bootsteps:ConsumerStep",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._app = consumer.app
        self._ear: _Ear | None = None
        wires = consumer.conninfo.transport_options.get(WIRES)
        if isinstance(wires, Wires) and consumer.conninfo.transport_cls in TENANT_SCHEMES:
            self._wires = wires
            options = wires.options
            self._ear = _Ear(every_evicted(options.environment, options.key_prefix), self._heard)

    def start(self, consumer: Any) -> None:
        """The connection may be a new one after a reconnect."""
        if self._ear is not None and self._concerned:
            self._ear.listen(consumer.connection.default_channel.own_clients())

    @property
    def _concerned(self) -> bool:
        return bool(claim_lost.receivers) or any(
            rule_of(task) is not None for task in self._app.tasks.values()
        )

    def shutdown(self, consumer: Any) -> None:
        """Nothing runs any more."""
        if self._ear is not None:
            self._ear.stop()

    def _heard(self, said: str) -> None:
        tag, _, scope = said.partition("\0")
        gate = self._wires.gate
        if gate is None or tag not in gate.running_tags():
            return  # another worker's
        claim, _, message_id = tag.partition("/")
        size, _, rest = scope.encode().partition(b":")
        key, task_id = rest[int(size) :].decode(), task_id_of(message_id)
        logger.warning("The dedup claim %s was taken from %s.", key, task_id)
        claim_lost.send(sender=self._app, key=key, task_id=task_id, token=int(claim))


class _Ear:
    """A thread that listens.

    Arguments:
        pattern: of the channels.
        hear: called from the thread with each message.
    """

    def __init__(self, pattern: str, hear: Callable[[str], None]) -> None:
        self._pattern = pattern
        self._hear = hear
        # On it nobody else says anything.
        self._own = f"{pattern}:{uuid.uuid4().hex}"
        self._connect: Callable[[], Any] | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self, connect: Callable[[], Any]) -> None:
        """Begin to listen, or do so on another client from the next trouble on."""
        self._connect = connect
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dq-dedup-evictions", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not None and self._connect is not None:
            with contextlib.suppress(Exception):  # it then ends a little later
                self._connect().publish(self._own, "")
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._listen_once()

    def _listen_once(self) -> None:
        try:
            self._listen()
        except Exception as exc:
            if not self._stopped.is_set():
                logger.info("Evictions of dedup claims are not heard: %s.", exc)
            # Not at once: the server may be restarting.
            self._stopped.wait(PAUSE)

    def _listen(self) -> None:
        assert self._connect is not None
        with self._connect().pubsub(ignore_subscribe_messages=True) as heard:
            heard.psubscribe(self._pattern)
            heard.subscribe(self._own)
            while not self._stopped.is_set():
                message = heard.get_message(timeout=PATIENCE)
                if message is not None and message["data"]:
                    data = message["data"]
                    self._hear(data.decode("utf-8", "replace") if isinstance(data, bytes) else data)
