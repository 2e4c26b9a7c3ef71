"""The boot step that makes a worker of a tenant broker a candidate for its singleton queues.

:mod:`celery_dq.other_brokers.singleton_sequencer` is that of the other brokers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import redis
from billiard import get_start_method
from celery import signals
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.utils.imports import instantiate
from kombu.exceptions import OperationalError

from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError
from celery_dq.leadership.redis_election import broker_client
from celery_dq.options.sections import Options, SingletonOptions
from celery_dq.protocols import QUEUE_HEADER, TOKEN_HEADER
from celery_dq.shown import shown_logger
from celery_dq.singleton.elections import Elections
from celery_dq.singleton.guard import Guard
from celery_dq.singleton.leaderships import WorkerLeaderships
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.worker import commands
from celery_dq.worker.bootsteps import ContextStep
from celery_dq.worker.lifecycle import PoolCapacity
from celery_dq.worker.ready_requests import ReadyRequests
from celery_dq.worker.task_events import task_events

logger = shown_logger(__name__)

#: Importing the module registers these commands.
COMMANDS = (commands.leaders, commands.resign)

#: The argument that makes a queue a singleton queue; RabbitMQ has it too.
ARGUMENT = "x-single-active-consumer"
#: Seconds that a stopping worker waits for its hand-overs.
CLOSE_TIMEOUT_S = 10.0


class SingletonStep(ContextStep):
    """Makes the worker a candidate for every singleton queue that it is to consume.

    ``start`` runs at every reconnect, which does not end a leadership. ``close`` runs when the worker begins
    to stop, and ``shutdown`` when the pool is drained; they hand the queues over.
    """

    requires = ("celery_dq.worker.bootsteps:ConsumerStep",)

    #: Whether the step is for brokers that refuse a stale token.
    fenced = True

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Make the leaderships of a worker with singleton queues."""
        if (consumer.conninfo.transport_cls in TENANT_SCHEMES) is not self.fenced:
            return False
        sections = self._sections(consumer, context.options)
        if sections:
            self._leaderships = self._lead(consumer, context, sections)
        return bool(sections)

    def _sections(self, consumer: Any, options: Options) -> dict[str, SingletonOptions]:
        """Return the singleton queues that this worker may consume."""
        return singleton_queues(consumer.app, options)

    def _lead(
        self, consumer: Any, context: AppContext, sections: dict[str, SingletonOptions]
    ) -> WorkerLeaderships:
        fenced = self.fenced
        purpose = f"the queue {min(sections)!r} (dq_singleton_queues, or declared with {ARGUMENT})"
        kills = isinstance(consumer.pool, PreforkPool)
        if kills and not (consumer.pool.forking_enable and get_start_method() == "fork"):
            raise ConfigurationError(
                f"{purpose} needs a pool whose processes are forked, because a spawned one does not know "
                "when a term ends: set worker_pool_start_method = 'fork', on macOS also "
                "billiard.set_start_method('fork'), or use the threads or solo pool"
            )
        for section in sections.values():
            if section.hand_over == "abort" and not kills:
                raise ConfigurationError(
                    f"dq_singleton_queues[{section.name!r}]['hand_over'] = 'abort' needs a pool that can "
                    "kill what it runs: use the prefork pool, or 'finish'"
                )
        guard = Guard(list(sections))
        TermReporter(consumer, guard)
        session_s = context.options.election_session_us / 1e6
        self._elections = Elections(
            context.options,
            consumer.hostname,
            (lambda: broker_client(consumer.app, session_s / 6)) if fenced else None,
            purpose,
        )
        leaderships = WorkerLeaderships(
            sections,
            self._elections.candidate,
            BrokerFence(consumer.app, context.options) if fenced else None,
            guard,
            careers={
                name: instantiate(section.career) for name, section in sections.items() if section.career
            },
            kills=kills,
            lines=self._elections,
        )
        context.leaderships = leaderships
        if isinstance(context.capacity, PoolCapacity) and consumer.pool.uses_semaphore:
            # A thread or greenlet calls back before it starts, and can be refused then.
            context.capacity.ready_requests = ReadyRequests(consumer, task_events(consumer))
        selected = list(consumer.app.amqp.queues.consume_from)
        self._volunteers_for = {name for name in selected if leaderships.is_singleton(name)}
        self._heed_control(consumer, leaderships)
        return leaderships

    def start(self, consumer: Any) -> None:
        """Become a candidate for the singleton queues that the worker consumes."""
        for name in self._volunteers_for:
            self._leaderships.volunteer(name)

    def _heed_control(self, consumer: Any, leaderships: WorkerLeaderships) -> None:
        """Follow ``celery control add_consumer`` and ``cancel_consumer``."""
        add, cancel = consumer.add_task_queue, consumer.cancel_task_queue

        def add_task_queue(queue: str, *args: Any, **options: Any) -> Any:
            is_singleton = leaderships.is_singleton(queue)
            added = None if is_singleton and not self.fenced else add(queue, *args, **options)
            if is_singleton:
                self._volunteers_for.add(queue)
                leaderships.volunteer(queue)
            return added

        def cancel_task_queue(queue: str) -> Any:
            self._volunteers_for.discard(queue)
            leaderships.withdraw(queue)
            return cancel(queue)

        consumer.add_task_queue, consumer.cancel_task_queue = add_task_queue, cancel_task_queue

    def close(self, consumer: Any) -> None:
        """Begin to hand over each queue as soon as its running message has ended: the worker stops."""
        self._leaderships.close(0)

    def shutdown(self, consumer: Any) -> None:
        """Hand over: the pool is drained or killed."""
        # The end of the session admits a successor, so it must not end while a task may still run.
        if self._leaderships.close(CLOSE_TIMEOUT_S):
            self._elections.close()


class BrokerFence:
    """The fence of the tenant broker."""

    def __init__(self, app: Any, options: Options) -> None:
        self._app = app
        self._options = options

    def epoch(self, queue: str) -> int:
        """Return the highest fencing token that the queue has had."""
        with self._channel() as channel:
            state = channel.partition(queue).keys.state
            return max(int(token or 0) for token in channel.client.hmget(state, "epoch", "last_epoch"))

    def raise_to(self, queue: str, token: int) -> int:
        """Raise the fencing token in force, and requeue the messages of older terms.

        Args:
            queue: the name of the queue.
            token: the fencing token of the new term.

        Returns:
            The token in force now; larger than `token` when there is a newer term.

        Raises:
            ConnectionError: The broker does not answer.
        """
        most = self._options.queue(queue).max_deliveries
        with self._channel() as channel:
            # A retry at the front of the queue waits until it is due by the clock of the server.
            channel.identity.server_clock.ask(channel.client)
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
    """Return every singleton queue: named in ``dq_singleton_queues``, or declared with the argument.

    Raises:
        ConfigurationError: One of them has several partitions in the settings.
    """
    sections = {section.name: section for section in options.singletons}
    for name, queue in app.amqp.queues.items():
        if (queue.queue_arguments or {}).get(ARGUMENT) and name not in sections:
            count = options.queue(name).partitions
            if count > 1:
                raise ConfigurationError(
                    f"dq_queues[{name!r}]['partitions'] = {count}, but the queue is declared with "
                    f"{ARGUMENT}: one leader consumes all of it in order; leave one of the two out"
                )
            sections[name] = SingletonOptions(name)
    return sections


class TermReporter:
    """Reports to the guard when a message of a singleton queue begins and ends, in the process that runs it.

    Celery has signals for that, but two signals cost a fifth of the time of a short task. So this class wraps
    the function that Celery makes of each task. Celery makes these functions again in every child of a pool,
    and when the worker looks up its tasks again.

    Args:
        consumer: Celery's consumer; its ``update_strategies`` is replaced.
        guard: gets the reports; it must be made before the pool forks.
    """

    def __init__(self, consumer: Any, guard: Guard) -> None:
        self._app = consumer.app
        self._guard = guard
        Guard.current = guard
        update_strategies = consumer.update_strategies

        def update_then_attend() -> None:
            update_strategies()
            self.attend()

        consumer.update_strategies = update_then_attend
        signals.worker_process_init.connect(self.attend, weak=False)

    def attend(self, **_: Any) -> None:
        """Wrap the functions of all tasks, which Celery has just made."""
        for task in self._app.tasks.values():
            if task.__trace__ is not None:
                task.__trace__ = self._around(task.__trace__)

    def _around(self, trace: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = self._guard.begin, self._guard.end

        @wraps(trace)
        def attended(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
            queue = request.get(QUEUE_HEADER) if request else None
            # A dedup lock has a token too, but no queue.
            if not queue or not request.get(TOKEN_HEADER):
                return trace(uuid, args, kwargs, request)
            begin(queue, request[TOKEN_HEADER])
            try:
                return trace(uuid, args, kwargs, request)
            finally:
                end(queue)

        return attended
