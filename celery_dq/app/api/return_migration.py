"""Moves the messages of a tenant broker back to kombu's Redis transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from celery_dq.app.api.audit import OnProgress, ignore_progress
from celery_dq.app.api.broker import BrokerAccess, OpenQueue
from celery_dq.app.api.migration import (
    MOST_LEFT,
    MigrationOptions,
    MigrationReport,
    NotMigrated,
    QueueMigration,
    not_migrated,
)
from celery_dq.errors import InvalidMessage, InvalidRequest
from celery_dq.inspector.queues import QueueSnapshot, fencing_token, queue_snapshot
from celery_dq.inspector.redis_values import scan, text
from celery_dq.migration.stock_broker import StockBroker, as_stock_message
from celery_dq.migration.tenant_source import Batch, TenantSource
from celery_dq.shown import shell_word, shown_url
from celery_dq.transport.message_record import HEADER_SIZE
from celery_dq.transport.redis.store.partition import Partition

#: For how long the messages of an interrupted migration are kept for the next run, in milliseconds: 30 days.
LEASE_MS = 30 * 24 * 3_600_000


class ReturnMigration:
    """One migration from a tenant broker to kombu's Redis transport; ``app.dq.migration`` makes it.

    Args:
        broker: Access to the tenant broker.
        stock: The stock broker.
        connection: A connection to the tenant broker.
        options: The choices.
    """

    def __init__(
        self, broker: BrokerAccess, stock: StockBroker, connection: Any, options: MigrationOptions
    ) -> None:
        if options.take_unacked:
            raise InvalidRequest(
                "take_unacked is for messages of kombu's Redis transport: on this broker, a message that a "
                "worker holds waits again when the lease of that worker is over"
            )
        self._broker = broker
        self._stock = stock
        self._connection = connection
        self._options = options
        self._surveyed = MigrationReport()
        self._migrated: dict[str, int] = {}
        #: The messages of each queue that are not understood, by their ids.
        self._left: dict[str, dict[str, NotMigrated]] = {}

    def survey(self, *, read: bool) -> MigrationReport:
        """Count the messages of each queue.

        Args:
            read: Also read every message, to find those that are not understood. Without a choice of
                priorities every message is read, too.

        Raises:
            InvalidRequest: An option names a queue that does not exist, a choice is missing and `read` is
                not set, the number of partitions of a queue changes, or a migration in the other direction
                was interrupted.
        """
        for queue, staged in self._stock.staged_counts().items():
            if staged:
                stock = shown_url(self._stock.connection.as_uri())
                raise InvalidRequest(
                    f"A migration from {stock} has taken {staged:,} messages of queue "
                    f"{queue!r} and was interrupted, or is under way: complete it by the same command "
                    "before you migrate back"
                )
        self._surveyed = self._count_all(read=read)
        if not read:
            self._surveyed.require_priorities()
        return self._surveyed

    def _count_all(self, *, read: bool) -> MigrationReport:
        consumer = self._stock.known_consumer()
        report = MigrationReport()
        for queue in self._names():
            with self._broker.open(queue, self._connection) as opened:
                if opened.homes.before is not None:
                    raise InvalidRequest(
                        f"The number of partitions of queue {queue!r} changes: complete that first, by "
                        f"'celery dq partitions {shell_word(queue)} --set {opened.homes.count}'"
                    )
                if read or self._options.priorities is None:
                    for partition in opened.partitions:
                        self._read_all(report, partition, opened.client, queue)
                self._count(report, queue, opened, consumer)
        return report

    def run(self, on_progress: OnProgress = ignore_progress) -> MigrationReport:
        """Move all messages that wait, also those of lost workers, and count the ones that stay.

        Messages that are published meanwhile are taken, too, until none waits.

        Args:
            on_progress: Called after each batch with the number of messages that were moved.

        Raises:
            InvalidRequest: A choice is missing, also for a message that was published meanwhile.
        """
        self._surveyed.require_priorities()
        consumer = self._stock.begin_return(LEASE_MS)
        target = shown_url(self._stock.connection.as_uri())
        for queue in self._names():
            with (
                self._broker.open(queue, self._connection) as opened,
                self._broker.audit.change(opened.client, "migrated_back", queue, details=target) as change,
            ):

                def moved(count: int, queue: str = queue, change: Any = change) -> None:
                    self._migrated[queue] = self._migrated.get(queue, 0) + count
                    change.count += count
                    on_progress(sum(self._migrated.values()))

                for partition in opened.partitions:
                    if not _leads(partition, opened):
                        self._drain(partition, opened.client, consumer, moved)
        report = self._count_all(read=False)
        report.note_rest("wait for a message that a worker has, or have come since")
        return report

    # The queues.

    def _names(self) -> list[str]:
        known = self._broker.queue_names()
        for queue in self._options.queues:
            if queue not in known:
                raise InvalidRequest(
                    f"The tenant broker has no queue {queue!r}. Known queues: {', '.join(map(repr, known))}."
                )
        return [queue for queue in known if not self._options.queues or queue in self._options.queues]

    def _count(self, report: MigrationReport, queue: str, opened: OpenQueue, consumer: str) -> None:
        """Add the numbers of a queue to a report."""
        found = queue_snapshot(opened.partitions, opened.client, ages=False)
        counts = QueueMigration(queue, migrated=self._migrated.get(queue, 0))
        counts.waiting = found.waiting + found.delayed + found.discards
        for holder in found.consumers:
            if holder.name == consumer:
                counts.staged += holder.held
            elif not holder.is_alive:
                counts.waiting += holder.held
            elif holder.held:
                counts.unacked += holder.held
                if holder.name not in report.held_by:
                    report.held_by.append(holder.name)
        left = [*self._left.get(queue, {}).values(), *_staying(queue, opened, found)]
        counts.left = len(self._left.get(queue, {})) + found.discards
        report.left += left
        if counts.waiting or counts.unacked or counts.staged or counts.migrated:
            report.queues.append(counts)

    def _read_all(self, report: MigrationReport, partition: Partition, client: Any, queue: str) -> None:
        """Read all messages; note those that are not understood, and a priority without a choice."""
        for chunk in scan(client, "hash", partition.keys.messages, count=200):
            for message_id, record in chunk:
                if len(record) < HEADER_SIZE:
                    continue  # a mark of a task that has started
                if self._options.priorities is None:
                    report.note_priority(queue, record)
                self._converted(queue, text(message_id), record)

    # The messages.

    def _converted(self, queue: str, message_id: str, record: bytes) -> tuple[int, str] | None:
        """Return a message as the stock broker has it; None if it is not understood, which is noted."""
        try:
            return as_stock_message(record, queue, self._options.priorities or "same")
        except InvalidMessage as exc:
            left = self._left.setdefault(queue, {})
            left[message_id] = not_migrated(queue, message_id, exc, record)
            return None

    def _drain(self, partition: Partition, client: Any, consumer: str, moved: OnProgress) -> None:
        """Move the messages of a partition, until none waits."""
        queue = partition.keys.queue
        # The scripts read the fencing token of a singleton queue from the name.
        token = fencing_token(partition, client)
        source = TenantSource(partition, client, f"{consumer}@{token}" if token else consumer, LEASE_MS)
        source.reap(self._broker.options.queue(queue).max_deliveries)
        left = self._left.setdefault(queue, {})
        try:
            for batch in source.interrupted():
                self._move(source, queue, batch, moved)
            has_moved = True
            while has_moved:
                pages = takewhile(lambda _: len(left) < MOST_LEFT, source.pages(left.keys()))
                has_moved = sum(self._move(source, queue, source.take(ids), moved) for ids in pages) > 0
        finally:
            source.end()

    def _move(self, source: TenantSource, queue: str, batch: Batch, moved: OnProgress) -> bool:
        """Move a batch; return whether any of its messages was understood.

        Those that are not understood go back first. So each process that finds the batch names it alike.
        """
        if self._options.priorities is None:
            for entry in batch.entries:
                self._surveyed.note_priority(queue, entry.record)
            # The next run begins with this batch.
            self._surveyed.require_priorities()
        converted = [self._converted(queue, entry.id, entry.record) for entry in batch.entries]
        pairs = list(zip(batch.entries, converted, strict=True))
        unclear = [entry for entry, message in pairs if message is None]
        if unclear:
            source.release(unclear)
        understood = replace(batch, entries=tuple(entry for entry, message in pairs if message is not None))
        if not understood.entries:
            return False
        messages = [message for message in converted if message is not None]
        self._stock.receive(queue, source.name_of(understood), messages, LEASE_MS)
        moved(source.finish(understood))
        return True


def _leads(partition: Partition, opened: OpenQueue) -> bool:
    """Return whether a living worker leads this partition of a singleton queue.

    A new term would return a batch to its place, which the target may have by then.
    """
    if not fencing_token(partition, opened.client):
        return False
    return queue_snapshot([partition], opened.client, ages=False).living_consumers > 0


def _staying(queue: str, opened: OpenQueue, found: QueueSnapshot) -> Sequence[NotMigrated]:
    """Return which messages of a queue no migration takes, and why."""
    reasons = []
    if found.discards:
        reasons.append(
            f"{found.discards:,} will not run (cancelled, expired, or covered by another call): a worker of "
            "celery-dq records it"
        )
    if any(_leads(each, opened) for each in opened.partitions):
        reasons.append("a worker leads this singleton queue: stop the workers that consume it")
    return [NotMigrated(queue, queue, reason, "") for reason in reasons]
