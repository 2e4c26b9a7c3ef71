"""The boot step that gives verdicts in a worker whose broker gives none."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from typing import Any

from celery import bootsteps

from celery_dq.clock import SystemClock
from celery_dq.dedup.coordinator import Coordinator
from celery_dq.dedup.keeper import Keeper
from celery_dq.dedup.local import LocalCoordinator
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.server import OwnRedis, redis_of
from celery_dq.errors import ConfigurationError
from celery_dq.hooks import WIRES, Wires
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.worker.claims import Claims
from celery_dq.worker.pool_flush import guard_flush
from celery_dq.worker.wishes import Wishes


class ClaimsStep(bootsteps.StartStopStep):
    """Asks for the key of every task that takes part in dedup.

    Does nothing on a tenant broker. Where no task says anything of dedup calls may have keys of their own; it
    connects when the first one comes.

    Raises:
        ConfigurationError: A task takes part, and there is no Redis to keep claims in: set ``dq_dedup_url``.
    """

    # Made after the step of led queues, and so around it, and stopped before it: a message that is given back
    # has let go of its key by then, and the token that its task sees is the leader's.
    requires = ("celery.worker.consumer.tasks:Tasks", "celery_dq.worker.singleton:SingletonStep")

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._claims: Claims | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._rung = False
        app = consumer.app
        wires = consumer.conninfo.transport_options.get(WIRES)
        if not isinstance(wires, Wires) or consumer.conninfo.transport_cls in TENANT_SCHEMES:
            return
        try:
            coordinator = _coordinator(app, wires, consumer.hostname)
        except ConfigurationError:
            if any(rule_of(task) is not None for task in app.tasks.values()):
                raise
            return  # most apps use neither dedup nor Redis
        claims = self._claims = Claims(consumer, coordinator, Wishes(app).of, SystemClock())
        subscriber = coordinator.new_client if isinstance(coordinator, OwnRedis) else None
        claims.keeper = Keeper(coordinator, wires.options.lease_us / 1e6, self._ring, claims.lost, subscriber)
        claims.look_soon = self._ring

    def start(self, consumer: Any) -> None:
        """The event loop may be a new one after a reconnect; the pool runs by now."""
        if self._claims is not None:
            guard_flush(consumer.pool, self._claims.flushed)
        if self._claims is not None and consumer.hub is not None:
            if self._bell is None:
                self._bell = socket.socketpair()
                for end in self._bell:
                    end.setblocking(False)
            consumer.hub.add_reader(self._bell[0], self._heard)
        self._consumer = consumer

    def stop(self, consumer: Any) -> None:
        """Before a reconnect, and at the end."""
        if self._claims is not None:
            self._claims.forget_parked()

    def shutdown(self, consumer: Any) -> None:
        """Leases run out by themselves; what was parked goes back to the broker with its connection."""
        if self._claims is not None and self._claims.keeper is not None:
            self._claims.keeper.stop()
        if self._bell is not None:
            if consumer.hub is not None:
                consumer.hub.remove_reader(self._bell[0])
            for end in self._bell:
                end.close()

    def _ring(self) -> None:
        """From any thread: look at what is parked, where tasks may be given to the pool."""
        if self._bell is not None:
            with contextlib.suppress(OSError):
                self._bell[1].send(b"1")
        elif hasattr(self, "_consumer") and not self._rung:
            # Without an event loop (green pools) the consumer may sit in a read for seconds: the timer, which
            # starts tasks with an ETA, does not.
            self._rung = True
            self._consumer.timer.call_after(0, self._timed)

    def _timed(self) -> None:
        assert self._claims is not None
        self._rung = False
        self._claims.look()

    def _heard(self) -> None:
        assert self._bell is not None
        assert self._claims is not None
        with contextlib.suppress(BlockingIOError):
            self._bell[0].recv(4096)
        self._claims.look()


def _coordinator(app: Any, wires: Wires, hostname: str) -> Coordinator:
    try:
        url = redis_of(app, wires.options)
    except ConfigurationError:
        if not str(app.conf.broker_read_url or app.conf.broker_url or "").startswith("memory://"):
            raise
        # One process has all the workers that there are.
        wires.coordinator = local = LocalCoordinator()
        return local
    return OwnRedis(url, wires.options, f"{hostname}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
