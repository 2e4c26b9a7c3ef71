"""The boot steps that celery-dq adds to a worker."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import bootsteps

from celery_dq.clock import SystemClock
from celery_dq.hooks import WIRES, Wires
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.message import Message
from celery_dq.worker.gate import Gate
from celery_dq.worker.lifecycle import Lifecycle
from celery_dq.worker.pool_deaths import notice_deaths
from celery_dq.worker.pool_results import hear_results
from celery_dq.worker.turns import Turns

logger = logging.getLogger(__name__)


class ConsumerStep(bootsteps.StartStopStep):
    """Connects Celery's consumer with the tenant broker.

    Does nothing for other brokers. ``start`` and ``stop`` run at every reconnect;
    the ties made here last as long as the worker.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._gate: Gate | None = None
        self._lifecycle: Lifecycle | None = None
        wires = consumer.conninfo.transport_options.get(WIRES)
        if isinstance(wires, Wires) and consumer.conninfo.transport_cls in TENANT_SCHEMES:
            options = wires.options
            clock = SystemClock()
            lifecycle = Lifecycle(consumer.pool, clock, options.dead_letter_failures)
            self._lifecycle = lifecycle
            gate = Gate(consumer, lifecycle, options.claim_ahead_us / 1e6)
            self._gate = wires.gate = gate
            if not lifecycle.asks_first:
                lifecycle.turns = Turns(consumer, lambda: gate.closing)
            for name, reason in (
                ("on_unknown_message", "unknown message"),
                ("on_unknown_task", "unknown task"),
                ("on_invalid_task", "invalid task"),
            ):
                setattr(consumer, name, partial(_bury_then, getattr(consumer, name), reason))
            consumer.on_decode_error = partial(_on_decode_error, consumer.on_decode_error)
            consumer.create_task_handler = partial(
                _careful_handler, consumer, lifecycle, consumer.create_task_handler
            )

    def start(self, consumer: Any) -> None:
        """The pool runs by now, and has its own methods in place."""
        if self._lifecycle is not None:
            self._lifecycle.guard_flush(consumer.pool)
            self._lifecycle.reserve_again()
            notice_deaths(consumer.pool)
            hear_results(consumer.pool)

    def stop(self, consumer: Any) -> None:
        """The connection is lost, or the worker stops."""
        if self._lifecycle is not None and self._lifecycle.turns is not None:
            self._lifecycle.turns.give_back()

    def shutdown(self, consumer: Any) -> None:
        """The pool is drained or killed: whatever is still held may run elsewhere."""
        if self._gate is not None:
            self._gate.over = True


def _bury_then(handler: Any, reason: str, body: Any, message: Any, *args: Any) -> Any:
    """Keep what this worker cannot run as a dead letter; Celery would drop it."""
    if isinstance(message, Message):
        message.burial = f"{reason}: {args[0]}"[:500] if args else reason
    return handler(body, message, *args)


def _careful_handler(consumer: Any, lifecycle: Lifecycle, make: Any, *args: Any, **kwargs: Any) -> Any:
    """Return Celery's handler, under which no message stops the worker.

    Celery expects a message that names a task to be made like one. A body of another shape, or a header of
    another type, raises whatever it raises, ends the worker, goes back to its place and ends the next one.
    """
    handle = make(*args, **kwargs)

    def on_task_received(message: Any) -> Any:
        try:
            return handle(message)
        except (*consumer.connection_errors, *consumer.conninfo.channel_errors):
            raise
        except Exception as exc:
            if (
                not isinstance(message, Message)
                or message.acknowledged
                or message.delivery_tag in lifecycle.in_pool
            ):
                raise
            logger.exception("Message %s goes to the dead letters: it is no valid task.", message.message_id)
            message.bury(f"invalid task: {type(exc).__name__}: {exc}"[:500])
            return None

    return on_task_received


def _on_decode_error(handler: Any, message: Any, exc: BaseException) -> Any:
    if isinstance(message, Message):
        # Celery acknowledges what it cannot decode, and it is gone.
        message.bury(f"undecodable: {type(exc).__name__}: {exc}"[:500])
    return handler(message, exc)
