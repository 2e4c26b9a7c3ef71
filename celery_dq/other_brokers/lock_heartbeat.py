"""The heartbeat of the dedup locks of one process.

The thread renews the leases, and receives the wake-ups for waiting calls that may start or have their result.
It is a thread, because a long task or a blocked event loop must not lose its dedup locks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import redis

from celery_dq.dedup.coordinator import Coordinator, HeldDedupLock
from celery_dq.other_brokers.redis_coordinator import SILENCE, RedisCoordinator
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger

__all__ = ["DedupLockHeartbeat"]

logger = shown_logger(__name__)

#: Renewals per lease: two may fail before the lease ends.
RENEWALS = 3


class DedupLockHeartbeat:
    """The thread that renews the dedup locks.

    Args:
        coordinator: renews the leases.
        lease: seconds that a lease holds.
        on_turn: called from the thread when the waiting calls should be checked.
        on_lost: called from the thread with a dedup lock that this process has lost.
        subscriber: makes a redis-py client for the channel of the owner; None when there is no channel.
        on_silence: called from the thread with the error of each request without an answer.
        on_answer: called from the thread after each answer.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        lease: float,
        on_turn: Callable[[], None],
        on_lost: Callable[[HeldDedupLock], None],
        subscriber: Callable[[], Any] | None,
        on_silence: Callable[[Exception], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._pause = lease / RENEWALS
        self._on_turn = on_turn
        self._on_lost = on_lost
        self._subscriber = subscriber
        self._on_silence = on_silence
        self._on_answer = on_answer
        self._trouble = Outage(logger, "dedup_renewal")
        self._holdings: set[HeldDedupLock] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, holding: HeldDedupLock) -> None:
        """Renew this dedup lock from now on."""
        self._holdings.add(holding)
        self.start()

    def start(self) -> None:
        """Start the thread unless it runs already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dq-dedup-heartbeat", daemon=True)
            self._thread.start()

    def drop(self, holding: HeldDedupLock) -> None:
        """Stop renewing this dedup lock."""
        self._holdings.discard(holding)

    def stop(self) -> None:
        """End the thread. Leases that are left expire."""
        self._stopped.set()
        if self._thread is not None:
            if isinstance(self._coordinator, RedisCoordinator):
                with contextlib.suppress(Exception):  # without it the thread ends at its next renewal
                    self._coordinator.wake()
            self._thread.join(5.0)

    def _run(self) -> None:
        listening: Any = None
        while not self._stopped.is_set():
            listening = self._turn(listening)

    def _turn(self, listening: Any) -> Any:
        """Renew once, and wait. Return the subscription, None after an error."""
        try:
            if listening is None and self._subscriber is not None:
                assert isinstance(self._coordinator, RedisCoordinator)
                listening = self._subscriber().pubsub(ignore_subscribe_messages=True)
                listening.subscribe(self._coordinator.channel)
            self._beat()
            self._listen(listening)
        except Exception as error:
            # Continue after every error, such as a restart of Redis: the leases have not expired yet.
            if isinstance(error, SILENCE):
                self._on_silence(error)
            else:
                self._trouble.began(
                    "This process cannot renew its dedup locks (%s: %s). They end with their leases "
                    "unless a renewal succeeds before; check the Redis of dq_dedup_url.",
                    type(error).__name__,
                    error,
                    exc_info=None if isinstance(error, redis.ResponseError) else error,
                )
            if listening is not None:
                with contextlib.suppress(Exception):
                    listening.close()
            self._stopped.wait(min(self._pause, 1.0))
            return None
        return listening

    def _beat(self) -> None:
        holdings = list(self._holdings)
        for holding, alive in zip(holdings, self._coordinator.renew(holdings), strict=True):
            if not alive and holding in self._holdings:
                self._holdings.discard(holding)
                self._on_lost(holding)
        self._trouble.over("This process renews its dedup locks again.")
        self._on_answer()
        self._on_turn()

    def _listen(self, listening: Any) -> None:
        """Wait for a wake-up, until the next renewal is due."""
        if listening is None:
            self._stopped.wait(self._pause)
            return
        if listening.get_message(timeout=self._pause) is not None:
            self._on_turn()
