"""The boot step that makes a worker a candidate for the relays of ``dq_outbox``."""

from __future__ import annotations

from typing import Any

from celery_dq.app.api.api import dq_of
from celery_dq.app.api.outbox import relay_leadership
from celery_dq.context import AppContext
from celery_dq.contrib.django.outbox.relay import OutboxRelay
from celery_dq.leadership.redis_election import broker_client
from celery_dq.leadership.runner import Runner
from celery_dq.singleton.elections import Elections
from celery_dq.worker.bootsteps import ContextStep

#: Seconds that a stopping worker waits for the batches of its relays.
CLOSE_TIMEOUT_S = 10.0


class OutboxRelayStep(ContextStep):
    """Relays the outboxes that this worker is elected for; each database has one relay among all workers.

    The relays start with the first connection to the broker, and last until the pool is drained, also while
    the worker reconnects. A broker without elections needs ``dq_election``.
    """

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Make the candidates, with ``dq_outbox``."""
        self._runners: dict[str, Runner[None]] = {}
        options = context.options
        if options.outbox.databases:
            session_s = options.election_session_us / 1e6
            is_ours = dq_of(consumer.app).serves_queues()
            self._elections = Elections(
                options,
                consumer.hostname,
                (lambda: broker_client(consumer.app, session_s / 6)) if is_ours else None,
                f"dq_outbox = {options.outbox.aliases!r}",
            )
        return bool(options.outbox.databases)

    def start(self, consumer: Any) -> None:
        """Become a candidate; a reconnect changes nothing."""
        app = consumer.app
        for database in dq_of(app).options.outbox.databases:
            if database not in self._runners:
                election = self._elections.candidate(relay_leadership(app, database))
                self._runners[database] = Runner(OutboxRelay(app, database), election).open()

    def shutdown(self, consumer: Any) -> None:
        """Hand the relays over: the pool is drained or killed."""
        ended = [each.close(CLOSE_TIMEOUT_S) for each in self._runners.values()]
        if all(ended):
            self._elections.close()
