"""The relay of one database: while it leads, it publishes the rows of the outbox."""

from __future__ import annotations

from typing import Any

from django.db import Error, connections

from celery_dq.app.api.api import dq_of
from celery_dq.clock import SystemClock
from celery_dq.contrib.django.outbox.relay_store import RelayStore
from celery_dq.errors import described
from celery_dq.leadership.career import Career
from celery_dq.outage import Outage
from celery_dq.producer.flusher import DeliveryCallbacks, Flusher
from celery_dq.producer.sender import Sender
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

#: Seconds until the database is asked again after an error.
PAUSE_S = 1.0


class OutboxRelay(Career[None]):
    """Publishes the rows of one database.

    Args:
        app: A Celery app.
        database: Alias of the database.
    """

    _flusher: Flusher | None = None

    def __init__(self, app: Any, database: str) -> None:
        self._app = app
        self._database = database
        self._sender: Sender | None = None
        self._outage = Outage(logger, "outbox_outage")

    def execute(self, message: None) -> bool:
        """Send one batch, or wait for rows; always continue."""
        try:
            flusher = self._flusher
            if flusher is None:
                flusher = self._flusher = self._make_flusher()
            is_busy = flusher.step()
            if self._outage.lasts:
                self._outage.over("The outbox of database %r can be relayed again.", self._database)
            if not is_busy:
                flusher.wait()
        except Error as error:
            self._outage.began(
                "The outbox of database %r cannot be relayed: %s. Its rows stay, and are sent when the "
                "database answers; if it lacks the table, run manage.py migrate.",
                self._database,
                described(error),
            )
            # The state of numbers and deletions in the table is unknown. A new store reads it.
            self._flusher = None
            connections[self._database].close()
            if self.term is not None:
                self.term.wait(PAUSE_S)
        return True

    def _make_flusher(self) -> Flusher:
        dq = dq_of(self._app)
        options = dq.options
        if self._sender is None:
            self._sender = dq.make_sender(self._app)
        # The settings of the database may turn it off. No number and no deletion would be committed then.
        connections[self._database].set_autocommit(True)
        poll_s = options.outbox.poll_us / 1e6
        store = RelayStore(self._database, options.buffer.batch_size, poll_s, SystemClock())
        return Flusher(store, self._sender, DeliveryCallbacks())

    def hand_over(self) -> None:
        """Close the connections of the term's thread; the successor adopts the rows that are numbered."""
        self._flusher = None
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        connections[self._database].close()
