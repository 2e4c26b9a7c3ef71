"""Requests of a led queue that are ready for the pool, and wait for the one before them to be over.

To make a request of a message, and to ask the broker for the message, takes a while. Where the pool is
another process, its only child would wait for that between two messages. So the requests are made ahead and
stay here, in the worker's main process: the next one goes to the pool in the callback that says how the one
before it ended, if that one is over for good. No child ever has a message whose predecessor may still run,
may run again, or died in silence, and what is here can be given back as if it had not been delivered.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from celery_dq.transport.redis.ledger import Held
from celery_dq.transport.redis.message import Message

logger = logging.getLogger(__name__)


class Turns:
    """Stands between Celery's consumer and the pool. Used in the thread of the event loop only.

    Arguments:
        consumer: its ``on_task_request`` is replaced.
        closing: returns whether the worker shuts down.
    """

    def __init__(self, consumer: Any, closing: Callable[[], bool]) -> None:
        self._run = consumer.on_task_request
        self._closing = closing
        self._passing = (*consumer.connection_errors, *consumer.conninfo.channel_errors)
        # By the delivery tag of the message before it.
        self._waiting: dict[str, tuple[Held, Any]] = {}
        self._over: deque[str] = deque()
        self._lets = False
        consumer.on_task_request = self.take

    def take(self, request: Any) -> Any:
        """Run a request, at once or when the message before it is over."""
        message = request.message
        held = message.channel.ledger.get(message.delivery_tag) if isinstance(message, Message) else None
        before = None if held is None else held.waits_for()
        if before is None or before.gone:
            # The pool refuses it where the one before it comes back.
            return self._run(request)
        self._waiting[before.tag] = (before, request)
        return None

    def over(self, tag: str) -> None:
        """The message with this tag is over, or comes back."""
        self._over.append(tag)
        if self._lets:
            return  # the pool has refused one: what is behind that one follows here, not deeper and deeper
        self._lets = True
        try:
            while self._over and not self._closing():
                waiting = self._waiting.pop(self._over.popleft(), None)
                if waiting is not None:
                    self._let(waiting[1])
        finally:
            self._lets = False
            self._over.clear()

    def _let(self, request: Any) -> None:
        message = request.message
        tag: str = message.delivery_tag
        try:
            self.take(request)
        except self._passing:
            message.channel.ledger.release(tag, "unstarted")
            raise
        except Exception as exc:
            # It would be lost here, and all that is behind it would wait for ever.
            logger.exception("Message %s goes to the dead letters: it cannot run.", message.message_id)
            message.bury(f"invalid task: {type(exc).__name__}: {exc}"[:500])
        if message.channel.ledger.get(tag) is None:
            self._over.append(tag)  # revoked, say

    def awaits(self, tag: str) -> bool:
        """Whether one waits for the message with this delivery tag."""
        return tag in self._waiting

    @property
    def has_next(self) -> bool:
        """Whether one waits for a message that was over without the pool: revoked, expired or given back."""
        return any(before.gone for before, _ in self._waiting.values())

    def start_next(self) -> None:
        """Let those begin."""
        for tag in [tag for tag, (before, _) in self._waiting.items() if before.gone]:
            self.over(tag)

    def give_back(self) -> None:
        """The connection is lost, or the worker stops, and hands over when nothing is held any more."""
        waiting = [request.message for _, request in self._waiting.values()]
        self._waiting.clear()
        for message in reversed(waiting):
            message.channel.qos.forget(message.delivery_tag)
            message.channel.ledger.release(message.delivery_tag, "unstarted")
