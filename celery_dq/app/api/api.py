"""``app.dq``: the API of a program to its queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

from celery_dq.app.api.broker import BrokerAccess, ByQueueName
from celery_dq.app.api.buffer import BufferApi
from celery_dq.app.api.cancel import cancel_everywhere
from celery_dq.app.api.dedup import DedupApi
from celery_dq.app.api.history import HistoryApi
from celery_dq.app.api.leaders import Leaders
from celery_dq.app.api.migration import BrokerMigration, MigrationOptions
from celery_dq.app.api.outbox import OutboxApi
from celery_dq.app.api.queues import QueueApi
from celery_dq.app.api.quotas import QuotasApi
from celery_dq.app.api.redis_dead_letters import DeadLetters
from celery_dq.app.api.return_migration import ReturnMigration
from celery_dq.app.senders import AppSender, headers_of
from celery_dq.app.timeouts import Deadline
from celery_dq.compat.kombu_messages import library_errors
from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError, InvalidRequest, MissingLibrary
from celery_dq.inspector.dead_letters import dead_letter_counts
from celery_dq.inspector.explain import Explanation, explain_cancelled, explain_message, explain_unknown
from celery_dq.inspector.messages import MessageSnapshot, find
from celery_dq.inspector.queues import QueueSnapshot, ZooKeeperQueueSnapshot, queue_snapshots
from celery_dq.inspector.redis_values import check_text
from celery_dq.inspector.workers import WorkerSnapshot, sharing_workers, worker_of, workers_of
from celery_dq.migration.stock_broker import STOCK_SCHEMES, StockBroker
from celery_dq.options import Options, resolve
from celery_dq.producer.sender import Sender
from celery_dq.shown import shown_url
from celery_dq.singleton.elections import require_kazoo, zookeeper_session
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import AT_ONCE


def dq_of(app: Any) -> DQ:
    """Return ``app.dq``, made at first use (an unpickled app has none yet)."""
    dq: DQ | None = app.__dict__.get("dq")
    if dq is None:
        dq = app.__dict__.setdefault("dq", DQ(app))
    return dq


class DQ:
    """The API of celery-dq on a Celery app.

    The constructor reads no settings and opens no connection.

    Attributes:
        queues: ``app.dq.queues["push"]``: depth, peek, find, cancel, move, purge, explain.
        quotas: ``app.dq.quotas.set("push", "42", rate="50/s")``.
        dead_letters: ``app.dq.dead_letters["push"].replay()``.
        dedup: ``app.dq.dedup["cache"].list()``.
        leaders: ``app.dq.leaders()``: the leaders of singleton queues and of other elections.
        workers: ``app.dq.workers()``: the workers, with their queues, leases and partitions.
        history: ``app.dq.history("push")``: rates and waiting times of the last hour.
        audit: ``app.dq.audit(queue="push")``: who changed queues and quotas.
        buffer: ``app.dq.buffer.flush(timeout=5)``: messages that are not sent yet.
        outbox: ``app.dq.outbox.inspect()``: rows of committed transactions that are not sent yet.
    """

    def __init__(self, app: Any) -> None:
        # Not an address, which an object of another time may have: kombu would share its pools with it.
        self.context = AppContext(f"{app.main or '__main__'} {uuid4().hex}", lambda: resolve(app.conf))
        self.context.queue_named = lambda name: app.amqp.queues.get(name)
        self._app = app
        self._broker = BrokerAccess(app, self.context)
        self.queues = QueuesApi(self._broker)
        self.quotas = QuotasApi(self._broker)
        self.dead_letters = DeadLettersApi(self._broker)
        self.dedup = DedupApi(self._broker)
        self.leaders = Leaders(self._broker)
        self.workers = Workers(self._broker, self.queues)
        self.history = HistoryApi(self._broker)
        self.audit = self._broker.audit
        #: Whether ``setup`` has wrapped the app's ``send_task`` for dedup and the buffer.
        self.calls_are_wrapped = False
        #: The ``send_task`` that a program had put on the app before ``setup``, if any.
        self.own_send_task: Callable[..., Any] | None = None
        #: Returns the state of the circuit breaker of calls that are not buffered.
        self.circuit: Callable[[], str] = lambda: "closed"
        #: The deadline of calls that are not buffered.
        self.deadline = Deadline()
        self.buffer = BufferApi(app, self.context, self.make_sender)
        self.outbox = OutboxApi(app, self.context)

    def __repr__(self) -> str:
        return f"<dq of {self.context}>"

    def serves_queues(self) -> bool:
        """Whether the app's broker is one of celery-dq. Opens nothing."""
        return self._broker.serves_queues()

    def make_sender(self, app: Any) -> Sender:
        """Make the sender of the app's buffered messages; each process needs its own."""
        sender = AppSender(app, partitioned=self._broker.serves_queues(), options=self.options)
        if not self.options.otel:
            return sender
        try:
            from celery_dq.tracing.spans import TracedSender
        except ImportError as exc:
            raise MissingLibrary.needed_by("dq_otel = True", "opentelemetry-api", "otel") from exc
        return TracedSender(sender, headers_of)

    @property
    def options(self) -> Options:
        """The checked ``dq_*`` settings.

        Raises:
            ConfigurationError: A setting is unknown, of the wrong type, or contradicts another.
        """
        options: Options = self.context.options
        return options

    def find(self, task_id: str) -> list[MessageSnapshot]:
        """Find a task: one snapshot per queue that has it, none when it has finished or never existed.

        A revoke leaves a tombstone in every queue, so no tombstone tells where the task is, or was.
        """
        return [message for message in self._find(task_id) if message.state != "cancelled"]

    def _find(self, task_id: str) -> list[MessageSnapshot]:
        """Return the snapshots and the tombstones of a task."""
        check_text("task_id", task_id)
        names = self._broker.queue_names()
        if self._broker.is_zookeeper():
            everywhere = [self.queues[name].find(task_id) for name in names]
            return [message for message in everywhere if message is not None]
        with self._broker.open_all(names) as opened:
            partitions = [each for queue in opened for each in queue.partitions]
            return find(partitions, opened[0].client, task_id) if opened else []

    def explain(
        self, *, tenant: str | int | None = None, queue: str | None = None, task_id: str | None = None
    ) -> Explanation:
        """Explain why a task, or the work of a tenant, waits, and until when.

        Args:
            tenant: The tenant, together with `queue`.
            queue: The name of the queue.
            task_id: The task; without `queue` it is looked for in all queues.

        Raises:
            InvalidRequest: Neither a task nor a tenant with its queue is named.
        """
        if task_id is not None and tenant is None:
            found = self._find(task_id) if queue is None else [self.queues[queue].find(task_id)]
            for message in found:
                if message is None or (queue is None and message.state == "cancelled"):
                    continue
                with self._broker.open(message.queue) as (partitions, client):
                    home = partitions[message.partition]
                    return self.workers.named_in(explain_message(home, client, message), home)
            if any(found):
                return explain_cancelled(task_id)
            return explain_unknown(task_id, [queue] if queue else self._broker.queue_names())
        if tenant is None or queue is None or task_id is not None:
            raise InvalidRequest("explain: give either task_id=…, or tenant=… together with queue=…")
        explained = self.queues[queue].explain(tenant)
        if not self.workers.is_shared:
            return explained
        with self._broker.open(queue) as (partitions, _):
            return self.workers.named_in(explained, partitions[explained.partition])

    @contextmanager
    def migration(
        self, source: str, target: str | None = None, options: MigrationOptions | None = None
    ) -> Iterator[BrokerMigration | ReturnMigration]:
        """Move the messages that wait from kombu's Redis transport to the tenant broker, or back.

        ``with app.dq.migration("redis://old") as migration: migration.survey(read=True); migration.run()``

        Args:
            source: The URL of the one broker.
            target: The URL of the other one; default: the broker of the app.
            options: The choices.

        Raises:
            ConfigurationError: One of the brokers is of another kind.
            kombu.exceptions.OperationalError: One of the brokers cannot be reached.
        """
        app, options = self._app, options or MigrationOptions()
        with app.connection_for_write(source) as given, app.connection_for_write(target) as other:
            schemes = (given.transport_cls, other.transport_cls)
            is_return = schemes[0] in TENANT_SCHEMES and schemes[1] in STOCK_SCHEMES
            if not is_return and not (schemes[0] in STOCK_SCHEMES and schemes[1] in TENANT_SCHEMES):
                raise ConfigurationError(
                    "A migration leads from redis://…, rediss://… or sentinel://… to dq-redis://…, "
                    f"dq-rediss://… or dq-sentinel://…, or back, not from {shown_url(given.as_uri())} to "
                    f"{shown_url(other.as_uri())}"
                )
        stock_url, tenant_url = (target, source) if is_return else (source, target)
        with (
            app.connection_for_write(stock_url, transport_options=options.stock_options) as stock,
            app.connection_for_write(tenant_url) as tenant,
            self._broker.channel(tenant),
            library_errors(stock),
        ):
            stock.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            if is_return:
                yield ReturnMigration(self._broker, StockBroker(stock), tenant, options)
            else:
                yield BrokerMigration(app, self._broker, StockBroker(stock), tenant, options)

    def revoke(self, task_ids: Sequence[str], connection: Any = None) -> None:
        """Cancel tasks in all queues, now or when they are published.

        Does nothing on a broker that is not of celery-dq. It does not reach a message that a worker has
        claimed: ``app.control.revoke`` calls this method first, and then notifies the workers.

        Args:
            task_ids: The ids of the tasks.
            connection: A kombu connection to the broker; default: one of the app's pool.
        """
        if not self._broker.serves_queues():
            return
        for task_id in task_ids:
            check_text("task_id", task_id)
        # Queues without the task get tombstones, because the queue of a task that comes later is not known.
        with self._broker.open_all(self._broker.queue_names(), connection, declare=True) as queues:
            cancel_everywhere(queues, task_ids, self.options.tombstone_ttl_us // 1000)


class QueuesApi(ByQueueName[QueueApi]):
    """The queues by name."""

    def _of(self, name: str) -> QueueApi:
        if self._broker.is_zookeeper():
            # The import needs kazoo, an extra that a user of Redis may not have installed.
            from celery_dq.app.api.zookeeper_queues import ZooKeeperQueueApi

            return ZooKeeperQueueApi(self._broker, name)
        return QueueApi(self._broker, name)

    def snapshots(self, *names: str, ages: bool = True) -> Iterator[QueueSnapshot | ZooKeeperQueueSnapshot]:
        """Yield the states of queues, which share round trips.

        Args:
            names: The names of the queues; default: all of them.
            ages: Whether to look for the oldest waiting message of each queue.
        """
        chosen = names or tuple(self)
        if self._broker.is_zookeeper():
            yield from (self[name].snapshot() for name in chosen)
            return
        for start in range(0, len(chosen), AT_ONCE):
            with self._broker.open_all(chosen[start : start + AT_ONCE]) as opened:
                partitions = [each.partitions for each in opened]
                found = queue_snapshots(partitions, opened[0].client, ages=ages)
            yield from found


class DeadLettersApi(ByQueueName[DeadLetters]):
    """The dead letters by queue."""

    def counts(self) -> dict[str, int]:
        """Return the number of dead letters of each queue; queues in Redis share round trips."""
        names = list(self)
        if self._broker.is_zookeeper():
            return {name: len(self[name]) for name in names}
        counts: Counter[str] = Counter()
        for start in range(0, len(names), AT_ONCE):
            with self._broker.open_all(names[start : start + AT_ONCE]) as opened:
                partitions = [each for queue in opened for each in queue.partitions]
                found = dead_letter_counts(partitions, opened[0].client)
            for partition, count in zip(partitions, found, strict=True):
                counts[partition.keys.queue] += count
        return counts

    def _of(self, name: str) -> DeadLetters:
        if self._broker.is_zookeeper():
            # The import needs kazoo, an extra that a user of Redis may not have installed.
            from celery_dq.app.api.zookeeper_queues import ZooKeeperDeadLettersApi

            return ZooKeeperDeadLettersApi(self._broker, name)
        return DeadLetters(self._broker, name)


class Workers:
    """Reads the workers from the leases, with ``dq_allocation`` also from ZooKeeper. Asks no worker."""

    def __init__(self, broker: BrokerAccess, queues: QueuesApi) -> None:
        self._broker = broker
        self._queues = queues

    @property
    def is_shared(self) -> bool:
        """Whether workers share partitions (``dq_allocation``)."""
        return self._broker.options.allocation.enabled

    def named_in(self, explanation: Explanation, partition: Partition) -> Explanation:
        """Return an explanation that also names the worker of the partition, if a message waits for one."""
        if explanation.reason not in ("turn", "no-worker", "behind"):
            return explanation
        name = f"{partition.keys.queue}/{partition.keys.partition}"
        worker = worker_of(name, self.sharing())
        if not worker:
            return explanation  # the queue is not allocated
        return replace(explanation, sentence=f"{explanation.sentence} Worker {worker} serves {name}.")

    def __call__(self) -> list[WorkerSnapshot]:
        """Read the workers that consume queues.

        Raises:
            InvalidRequest: The broker does not know its consumers.
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        if not self._broker.serves_queues():
            raise InvalidRequest(
                "This broker does not know its consumers: ask the workers with 'celery status'"
            )
        return self.among(self._queues.snapshots(ages=False))

    def among(self, queues: Iterable[Any]) -> list[WorkerSnapshot]:
        """Return the consumers of queues by their snapshots, and the workers that share partitions."""
        return workers_of((each for each in queues if isinstance(each, QueueSnapshot)), self.sharing())

    def sharing(self) -> list[WorkerSnapshot]:
        """Read the workers that share partitions; none without ``dq_allocation``.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        if not self.is_shared:
            return []
        require_kazoo(self._broker.options)
        session: Any = zookeeper_session(self._broker.options)
        with closing(session):
            return sharing_workers(session, self._broker.options.environment)
