"""The boot step that makes a worker volunteer for the queues that one worker consumes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import bootsteps
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.utils.imports import instantiate
from kombu.exceptions import OperationalError

from celery_dq.clock import SystemClock
from celery_dq.errors import ConfigurationError
from celery_dq.hooks import WIRES, Wires
from celery_dq.options.sections import Options
from celery_dq.options.singleton import SingletonOptions
from celery_dq.singleton.elections import Elections
from celery_dq.singleton.guard import Guard
from celery_dq.singleton.leaderships import Leaderships
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.worker import commands
from celery_dq.worker.attendant import Attendant
from celery_dq.worker.broker import broker_client
from celery_dq.worker.pool_deaths import notice_deaths
from celery_dq.worker.pool_flush import guard_flush
from celery_dq.worker.pool_results import hear_results
from celery_dq.worker.sequencer import Sequencer
from celery_dq.worker.stopping import stops

logger = logging.getLogger(__name__)

#: Importing it has registered the command.
COMMANDS = (commands.leaders, commands.resign)

#: The queue argument that RabbitMQ knows, too.
ARGUMENT = "x-single-active-consumer"
#: Seconds that a stopping worker waits for its hand-overs.
CLOSE_TIMEOUT_S = 10.0


class SingletonStep(bootsteps.StartStopStep):
    """Volunteers for every queue with a leader that the worker is told to consume.

    ``start`` and ``stop`` run at every reconnect and do not touch what is led; ``shutdown`` runs when
    the pool is drained, and hands over.
    """

    requires = ("celery_dq.worker.bootsteps:ConsumerStep",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._leaderships: Leaderships | None = None
        self._elections: Elections | None = None
        self._sequencer: Sequencer | None = None
        self._volunteers_for: set[str] = set()
        wires = consumer.conninfo.transport_options.get(WIRES)
        if not isinstance(wires, Wires):
            return
        sections = singleton_queues(consumer.app, wires.options)
        fenced = consumer.conninfo.transport_cls in TENANT_SCHEMES
        if not (fenced or wires.options.election) and consumer.conninfo.transport.driver_type == "amqp":
            # RabbitMQ keeps its own argument: one consumer at a time, without elections and tokens.
            sections = {section.name: section for section in wires.options.singletons}
        if not sections:
            return
        kills = isinstance(consumer.pool, PreforkPool)
        for section in sections.values():
            if section.hand_over == "abort" and not kills:
                raise ConfigurationError(
                    f"dq_singleton_queues[{section.name!r}]['hand_over'] = 'abort' needs a pool that can "
                    "kill what it runs: use the prefork pool, or 'finish'"
                )
        guard = Guard(list(sections))
        Attendant(consumer, guard)
        session_s = wires.options.election_session_us / 1e6
        self._elections = Elections(
            wires.options,
            consumer.hostname,
            (lambda: broker_client(consumer.app, session_s / 6)) if fenced else None,
            f"the queue {min(sections)!r} (dq_singleton_queues, or declared with {ARGUMENT})",
        )
        self._leaderships = Leaderships(
            sections,
            self._elections.candidate,
            BrokerFence(consumer.app, wires.options) if fenced else None,
            guard,
            careers={
                name: instantiate(section.career) for name, section in sections.items() if section.career
            },
            kills=kills,
        )
        wires.terms = self._leaderships
        selected = list(consumer.app.amqp.queues.consume_from)
        self._volunteers_for = {name for name in selected if self._leaderships.governs(name)}
        if not fenced:
            # Celery's own consumer must not have them: it does not know who leads.
            for name in sections:
                consumer.app.amqp.queues.deselect(name)
            lease_s = wires.options.lease_us / 1e6
            self._sequencer = Sequencer(consumer, self._leaderships, sections, lease_s, SystemClock())
        self._heed_control(consumer, self._leaderships)

    def start(self, consumer: Any) -> None:
        """Volunteer for the queues that the worker consumes."""
        if self._sequencer is not None:
            # Who is killed for a hand-over is waited for. The pool runs by now, and the loop does not yet.
            notice_deaths(consumer.pool)
            hear_results(consumer.pool)
            guard_flush(consumer.pool, self._sequencer.flushed)
            self._sequencer.start()
        if self._leaderships is not None:
            for name in self._volunteers_for:
                self._leaderships.volunteer(name)

    def _heed_control(self, consumer: Any, leaderships: Leaderships) -> None:
        """Follow ``celery control add_consumer`` and ``cancel_consumer``."""
        add, cancel = consumer.add_task_queue, consumer.cancel_task_queue

        def add_task_queue(queue: str, *args: Any, **options: Any) -> Any:
            governed = leaderships.governs(queue)
            added = None if governed and self._sequencer is not None else add(queue, *args, **options)
            if governed:
                self._volunteers_for.add(queue)
                leaderships.volunteer(queue)
            return added

        def cancel_task_queue(queue: str) -> Any:
            self._volunteers_for.discard(queue)
            leaderships.withdraw(queue)
            return cancel(queue)

        consumer.add_task_queue, consumer.cancel_task_queue = add_task_queue, cancel_task_queue

    def stop(self, consumer: Any) -> None:
        """Begin to hand over, if the worker stops: each queue as soon as its running message has ended."""
        if self._sequencer is not None:
            self._sequencer.stop()
        if self._leaderships is not None and stops():
            self._leaderships.close(0)

    def shutdown(self, consumer: Any) -> None:
        """Hand over: the pool is drained or killed."""
        if self._leaderships is None or self._elections is None:
            return
        if self._sequencer is not None:
            self._sequencer.close()
        # To end the session lets a successor in: not while something may still run.
        if self._leaderships.close(CLOSE_TIMEOUT_S):
            self._elections.close()


class BrokerFence:
    """The fence of the tenant broker."""

    def __init__(self, app: Any, options: Options) -> None:
        self._app = app
        self._options = options

    def epoch(self, queue: str) -> int:
        """The token that holds now."""
        with self._channel() as channel:
            return int(channel.client.hget(channel.partition(queue).keys.state, "epoch") or 0)

    def raise_to(self, queue: str, token: int) -> int:
        """Let `token` hold, and take back what older ones hold."""
        most = self._options.queue(queue).max_deliveries
        with self._channel() as channel:
            while True:
                fenced = channel.partition(queue).fence(token, max_deliveries=most).run(channel.client)
                if not fenced.accepted or not fenced.remaining:
                    return int(fenced.epoch)

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        try:
            with self._app.connection_or_acquire() as connection:
                connection.ensure_connection(max_retries=1)
                yield connection.default_channel
        except (OperationalError, redis.RedisError) as error:
            raise ConnectionError(str(error)) from error


def singleton_queues(app: Any, options: Options) -> dict[str, SingletonOptions]:
    """Every queue with a leader: named in ``dq_singleton_queues``, or declared with the argument."""
    sections = {section.name: section for section in options.singletons}
    for name, queue in app.amqp.queues.items():
        if (queue.queue_arguments or {}).get(ARGUMENT) and name not in sections:
            sections[name] = SingletonOptions(name)
    return sections
