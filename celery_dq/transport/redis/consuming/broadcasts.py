"""Receives the broadcasts of remote control and events for one channel, by PUB/SUB."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any

import redis

from celery_dq.transport.redis.consuming.consumer_thread import RETRY_AFTER_REFUSAL_S
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS
from celery_dq.transport.redis.store.server_errors import RefusalLog

#: Seconds between two health checks of the connection.
HEALTH_CHECK_SECONDS = 25.0


class Broadcasts:
    """The subscriptions of one channel. The consumer thread calls all methods but :meth:`follow`.

    Args:
        new_client: Makes the client of the connection.
        receive: Called with each answer of the server.
        refusals: Logs the subscriptions that Redis refuses.
    """

    def __init__(
        self, new_client: Callable[[], redis.Redis], receive: Callable[[Any], None], refusals: RefusalLog
    ) -> None:
        self._new_client: Callable[[], Any] = new_client
        self._refusals = refusals
        #: Whether a subscription was refused, which is tried again at the next check.
        self._is_refused = False
        self._receive = receive
        self._wanted: frozenset[str] = frozenset()
        self._subscribed: frozenset[str] = frozenset()
        self._pubsub: Any = None
        #: Monotonic time at which :meth:`turn` must be called.
        self.turn_at = math.inf

    def follow(self, topics: Collection[str]) -> None:
        """Subscribe to these topics, and to no other ones, from the next turn of the thread on."""
        self._wanted, self.turn_at = frozenset(topics), -math.inf

    @property
    def connection(self) -> Any:
        """The redis-py connection; None without one."""
        return None if self._pubsub is None else self._pubsub.connection

    def turn(self, now: float) -> bool:
        """Subscribe, or check the connection; return whether there is another connection.

        Raises:
            redis.RedisError: The connection is broken.
        """
        before, self.turn_at = self.connection, now + HEALTH_CHECK_SECONDS
        if self._is_refused:
            self._is_refused, self._subscribed = False, frozenset()
        if self._wanted != self._subscribed:
            if self._pubsub is None:
                self._pubsub = self._new_client().pubsub()
            begun, ended = self._wanted - self._subscribed, self._subscribed - self._wanted
            self._subscribed = self._wanted
            if begun:
                self._pubsub.psubscribe(*begun)
            if ended:
                self._pubsub.punsubscribe(*ended)
        elif self._pubsub is not None:
            if self._pubsub.health_check_response_counter > 1:
                raise redis.ConnectionError(
                    "The PUB/SUB connection does not answer its health checks: it is dead"
                )
            self._pubsub.check_health()
        return self.connection is not before

    def read(self) -> None:
        """Read what has arrived.

        Raises:
            redis.RedisError: The connection is broken.
        """
        self._read_one()
        while self._pubsub.connection is not None and self._pubsub.connection.can_read(timeout=0):
            self._read_one()

    def _read_one(self) -> None:
        try:
            answer = self._pubsub.parse_response()
        except PASSING_ERRORS:
            raise
        except redis.ResponseError as exc:
            # It was a subscription or a health check, and an error is an answer as well.
            self._refusals.refused("subscription to broadcasts", exc)
            self._pubsub.health_check_response_counter = 0
            self._is_refused, self.turn_at = True, time.monotonic() + RETRY_AFTER_REFUSAL_S
            return
        self._refusals.accepted("subscription to broadcasts")
        if isinstance(answer, (list, tuple)):
            self._pubsub.handle_message(list(answer))
            self._receive(answer)

    def close(self) -> None:
        """Close the connection."""
        pubsub, self._pubsub = self._pubsub, None
        self._subscribed = frozenset()
        if pubsub is not None:
            pubsub.close()
