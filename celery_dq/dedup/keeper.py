"""Keeps the leases of one process alive, and hears when one of its waiting calls may start or has its result.

A thread of its own, because a long task or a blocked event loop must not lose its claims.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from celery_dq.dedup.coordinator import Coordinator, Holding
from celery_dq.dedup.redis import RedisCoordinator

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

#: Renewals in a lease: two may fail before it is lost.
RENEWALS = 3


class Keeper:
    """The thread that renews.

    Arguments:
        coordinator: of whose calls.
        lease: seconds that a lease holds.
        on_turn: called from the thread when waiting calls should be looked at.
        on_lost: called from the thread with a holding that is ours no more.
        subscriber: makes a redis-py client of its own for the channel of the owner; None when nobody tells.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        lease: float,
        on_turn: Callable[[], None],
        on_lost: Callable[[Holding], None],
        subscriber: Callable[[], Any] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._pause = lease / RENEWALS
        self._on_turn = on_turn
        self._on_lost = on_lost
        self._subscriber = subscriber
        self._holdings: set[Holding] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, holding: Holding) -> None:
        """Renew this one from now on."""
        self._holdings.add(holding)
        self.start()

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dq-dedup-keeper", daemon=True)
            self._thread.start()

    def drop(self, holding: Holding) -> None:
        """Renew this one no more."""
        self._holdings.discard(holding)

    def stop(self) -> None:
        """End the thread; leases run out by themselves."""
        self._stopped.set()
        if self._thread is not None:
            if isinstance(self._coordinator, RedisCoordinator):
                with contextlib.suppress(Exception):  # it then ends at its next renewal
                    self._coordinator.ring()
            self._thread.join(5.0)

    def _run(self) -> None:
        listening: Any = None
        while not self._stopped.is_set():
            listening = self._turn(listening)

    def _turn(self, listening: Any) -> Any:
        """Renew once, and wait; return what is listened to, None after trouble."""
        try:
            if listening is None and self._subscriber is not None:
                assert isinstance(self._coordinator, RedisCoordinator)
                listening = self._subscriber().pubsub(ignore_subscribe_messages=True)
                listening.subscribe(self._coordinator.channel)
            self._beat()
            self._listen(listening)
        except Exception:
            # Whatever fails, a Redis that restarts above all: the leases hold a while yet.
            logger.warning("Dedup claims could not be renewed; trying again.", exc_info=True)
            self._stopped.wait(min(self._pause, 1.0))
            return None
        return listening

    def _beat(self) -> None:
        holdings = list(self._holdings)
        for holding, alive in zip(holdings, self._coordinator.renew(holdings), strict=True):
            if not alive and holding in self._holdings:
                self._holdings.discard(holding)
                self._on_lost(holding)
        self._on_turn()

    def _listen(self, listening: Any) -> None:
        """Until the next renewal is due."""
        if listening is None:
            self._stopped.wait(self._pause)
            return
        if listening.get_message(timeout=self._pause) is not None:
            self._on_turn()
