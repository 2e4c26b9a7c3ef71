"""Takes over the messages that wait on kombu's Redis transport; choices and outcome, in either direction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from celery_dq.app.api.audit import OnProgress, ignore_progress
from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.tenant_rules import TenantRules
from celery_dq.clock import SystemClock
from celery_dq.errors import InvalidMessage, InvalidRequest, described
from celery_dq.inspector.queues import queue_snapshot
from celery_dq.inspector.redis_values import is_unicode
from celery_dq.migration.stock_broker import Priorities, StockBroker, StockReader, as_restored
from celery_dq.shown import shown_url
from celery_dq.transport.message_record import as_accepted
from celery_dq.transport.packer import Packer, StampedMessage


@dataclass(frozen=True)
class MigrationOptions:
    """The choices of one migration.

    Attributes:
        queues: Only these queues; empty for all.
        priorities: ``inverted`` keeps the order (stock Redis serves 0 first, celery-dq 9), ``same`` keeps the
            numbers. None is refused when messages have other priorities than 0.
        take_unacked: Also take the messages that living workers hold; from kombu's transport only.
        stock_options: ``broker_transport_options`` of the stock broker, such as ``global_keyprefix``, over
            those of the app.
    """

    queues: tuple[str, ...] = ()
    priorities: Priorities | None = None
    take_unacked: bool = False
    stock_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NotMigrated:
    """A message, or messages, that stay on the source.

    Attributes:
        queue: Its queue; ``""`` if it is not known.
        place: The key in Redis.
        reason: The reason.
        start: The first bytes of the message; "" for several.
    """

    queue: str
    place: str
    reason: str
    start: str


@dataclass
class QueueMigration:
    """The numbers of one queue.

    Attributes:
        queue: Its name.
        waiting: Messages that wait. On the tenant broker delayed messages wait, too.
        priorities: Those of them in lists of other priorities than 0; 0 on the tenant broker, which has none.
        unacked: Messages that workers have received and not acknowledged, or that died with a worker.
        staged: Messages that an interrupted migration has taken.
        left: Messages that stay, without those that living workers hold.
        migrated: Messages that the target has got.
    """

    queue: str
    waiting: int = 0
    priorities: int = 0
    unacked: int = 0
    staged: int = 0
    left: int = 0
    migrated: int = 0


@dataclass
class MigrationReport:
    """The outcome of a migration, or of a look without one.

    Attributes:
        queues: The queues that have messages, or had some.
        left: Messages that stay, with the reasons.
        held_by: Living workers, because of which the unacknowledged messages stay; empty if they do not.
        undecided: Queues with priorities other than 0 in messages, if the options do not say how to convert
            them.
    """

    queues: list[QueueMigration] = field(default_factory=list)
    left: list[NotMigrated] = field(default_factory=list)
    held_by: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)

    @property
    def migrated(self) -> int:
        """Number of messages that the target has got."""
        return sum(queue.migrated for queue in self.queues)

    @property
    def found(self) -> int:
        """Number of messages that a migration would take."""
        return sum(map(self._found, self.queues))

    def _found(self, queue: QueueMigration) -> int:
        return queue.waiting + queue.staged + (0 if self.held_by else queue.unacked) - queue.left

    def note_rest(self, reason: str) -> None:
        """Name the messages that another run would take, which stay after this one.

        Args:
            reason: The end of a sentence about them.
        """
        for queue in self.queues:
            rest = self._found(queue)
            if rest > 0:
                queue.left += rest
                self.left.append(
                    NotMigrated(queue.queue, queue.queue, f"{rest:,} {reason}: run it again", "")
                )

    def note_priority(self, queue: str, record: bytes) -> None:
        """Note the queue of a record whose priority cannot be converted without a choice."""
        if record[1:2] > b"\0" and queue not in self.undecided:
            self.undecided.append(queue)

    def require_priorities(self) -> None:
        """Refuse to go on while it is not said how to convert priorities.

        Raises:
            InvalidRequest: A queue is undecided.
        """
        if self.undecided:
            raise InvalidRequest(
                f"Queue {self.undecided[0]!r} has messages with priorities. Stock Redis serves priority 0 "
                "first, celery-dq serves 9 first: say --priorities inverted if your code inverts them from "
                "now on, too, or --priorities same to keep the numbers."
            )

    @property
    def is_complete(self) -> bool:
        """Whether nothing stays on the source."""
        held = bool(self.held_by) and any(queue.unacked for queue in self.queues)
        return not self.left and not held


#: Messages of one step.
CHUNK = 200
#: For how long the target knows the numbers of messages that it has got, in milliseconds: 30 days.
MARKER_TTL_MS = 30 * 24 * 3_600_000
#: Messages of one list or queue that are not understood, after which the rest of it is left alone.
MOST_LEFT = 10_000
#: Characters of a message that the report shows.
SHOWN = 80


class BrokerMigration:
    """One migration; ``app.dq.migration`` makes it.

    Args:
        app: The Celery app. Its settings and tasks give the environment, the partitions and the tenants.
        broker: Access to the tenant broker.
        stock: The stock broker.
        connection: A connection to the tenant broker.
        options: The choices.
    """

    def __init__(
        self, app: Any, broker: BrokerAccess, stock: StockBroker, connection: Any, options: MigrationOptions
    ) -> None:
        self._app = app
        self._broker = broker
        self._stock = stock
        self._connection = connection
        self._options = options
        self._reader = StockReader(
            TenantRules(app).named, broker.accept_content, options.priorities or "same"
        )
        self._packer = Packer(broker.options, SystemClock())
        self._report = MigrationReport()
        self._queues: dict[str, QueueMigration] = {}
        #: The delivery tags of unacknowledged messages, by queue.
        self._tags: dict[str, list[bytes]] = {}

    def survey(self, *, read: bool) -> MigrationReport:
        """Count the messages of each queue.

        Args:
            read: Also read every message of the lists, to find those that are not understood. Without a
                choice of priorities every message is read, too.

        Raises:
            InvalidRequest: An option names a queue that does not exist, a choice is missing and `read` is
                not set, or a migration in the other direction was interrupted.
        """
        self._refuse_interrupted_return()
        self._count_all(read=read or self._options.priorities is None)
        if not read:
            self._report.require_priorities()
        return self._report

    def _count_all(self, *, read: bool) -> None:
        """Make the report of what is on the source now."""
        report = self._report = MigrationReport()
        self._tags = {}
        for tag, value in self._stock.unacked_entries():
            self._classify_unacked(tag, value)
        staged, former = self._stock.staged_counts(), self._queues
        known = {*self._bound_queues(), *self._tags, *staged, *former}
        self._refuse_unknown(known)
        known -= self._note_unreadable(known)
        self._queues = {}
        for queue, lengths in self._stock.lengths(sorted(filter(self._is_wanted, known))).items():
            unacked = len(self._tags.get(queue, ()))
            counts = QueueMigration(queue, sum(lengths), sum(lengths[1:]), unacked, staged.get(queue, 0))
            if queue in former:
                counts.migrated = former[queue].migrated
            if queue in former or counts.waiting or counts.unacked or counts.staged:
                self._queues[queue] = counts
        report.queues = list(self._queues.values())
        if self._tags and not self._options.take_unacked:
            report.held_by = self._stock.live_workers(self._app)
        if read:
            for counts in report.queues:
                self._read_all(counts)

    def _read_all(self, counts: QueueMigration) -> None:
        """Read the messages of a queue, and note those in its lists that are not understood."""
        for raw in self._stock.all_staged(counts.queue, CHUNK):
            self._refusal(raw, counts.queue)  # it notes a priority without a choice
        for key in self._stock.lists(counts.queue):
            for raw in self._stock.messages(key, CHUNK):
                refusal = self._refusal(raw, counts.queue)
                if refusal is not None:
                    self._report.left.append(not_migrated(counts.queue, key, refusal, raw))
                    counts.left += 1

    def run(self, on_progress: OnProgress = ignore_progress) -> MigrationReport:
        """Take over the messages of the queues that :meth:`survey` has found, and count the ones that stay.

        Messages that stock producers publish meanwhile are taken, too, until a list is empty.

        Args:
            on_progress: Called after each step with the number of messages that were taken over.

        Raises:
            ConfigurationError: A migration to another target was interrupted.
            InvalidMessage: A message that an interrupted migration has taken is not understood with the
                present settings of the app.
            InvalidRequest: Another process has completed the migration meanwhile, or a choice is missing.
        """
        self._report.require_priorities()
        channel = self._connection.default_channel
        options = self._broker.options
        target = f"{channel.context.address} {options.environment} {options.key_prefix}".rstrip()
        producer = self._stock.begin(target)
        source = shown_url(self._stock.connection.as_uri())
        for queue in self._queues.values():
            with self._broker.audit.change(channel.client, "migrated", queue.queue, details=source) as change:

                def confirmed(count: int, queue: QueueMigration = queue, change: Any = change) -> None:
                    queue.migrated += count
                    change.count += count
                    on_progress(self._report.migrated)

                self._send_staged(queue.queue, producer, confirmed)
                for key in self._stock.lists(queue.queue):
                    self._take_list(queue.queue, key, producer, confirmed)
                if not self._report.held_by:
                    self._take_unacked(queue.queue, producer, confirmed)
        self._stock.complete()
        self._count_all(read=True)
        self._report.note_rest("have come since")
        return self._report

    # The queues.

    def _bound_queues(self) -> set[str]:
        conf = self._app.conf
        control = str(conf.control_exchange)
        internal = (f"{control}.pidbox", f"reply.{control}.pidbox", str(conf.event_exchange))
        return {*self._app.amqp.queues, *self._stock.queue_names(internal)}

    def _refuse_interrupted_return(self) -> None:
        consumer = self._stock.known_consumer()
        for queue in self._broker.queue_names() if consumer else ():
            with self._broker.open(queue, self._connection) as opened:
                found = queue_snapshot(opened.partitions, opened.client, ages=False)
            held = sum(each.held for each in found.consumers if each.name == consumer)
            if held:
                stock = shown_url(self._stock.connection.as_uri())
                raise InvalidRequest(
                    f"A migration back to {stock} has taken {held:,} messages of queue "
                    f"{queue!r} and was interrupted, or is under way: complete it by the same "
                    "command first"
                )

    def _is_wanted(self, queue: str) -> bool:
        return not self._options.queues or queue in self._options.queues

    def _refuse_unknown(self, known: set[str]) -> None:
        for queue, lengths in self._stock.lengths(self._options.queues).items():
            if any(lengths):
                known.add(queue)
            elif queue not in known:
                raise InvalidRequest(
                    f"The stock broker has no queue {queue!r}. Known queues: "
                    f"{', '.join(map(repr, sorted(known)))}."
                )

    def _note_unreadable(self, known: set[str]) -> set[str]:
        """Return the queues whose names Celery cannot use, and note that they stay."""
        found = {queue for queue in known if not is_unicode(queue)}
        for queue in sorted(found):
            shown = queue.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            self._report.left.append(NotMigrated(shown, shown, "the name of this queue is not UTF-8", ""))
        return found

    # The messages.

    def _stamped(self, raw: bytes, queue: str, producer: str, number: int) -> StampedMessage:
        """Return a message as the target gets it, and note its priority if a choice is missing."""
        message = self._reader.read(raw)
        try:
            stamped = self._packer.stamp(message, queue, producer, iter((number,)))
        except InvalidMessage:
            raise
        except Exception as exc:
            raise InvalidMessage(f"a header has an unknown form: {described(exc)}") from exc
        if self._options.priorities is None:
            self._report.note_priority(queue, stamped.outgoing.record)
        # The backlog of a tenant may be longer in the stock broker than it may become here.
        outgoing = stamped.outgoing._replace(record=as_accepted(stamped.outgoing.record))
        return stamped._replace(outgoing=outgoing, marker_ttl_ms=MARKER_TTL_MS)

    def _refusal(self, raw: bytes, queue: str) -> InvalidMessage | None:
        """Return why a message is not understood; None if it is."""
        try:
            self._stamped(raw, queue, "", 0)
        except InvalidMessage as exc:
            return exc
        return None

    def _take_list(self, queue: str, key: str, producer: str, confirmed: OnProgress) -> None:
        """Take all messages of a list that are understood; new ones may come meanwhile."""
        left: Counter[bytes] = Counter()
        while left.total() < MOST_LEFT:
            known, found = left.copy(), []
            for raw in self._stock.oldest(key, CHUNK + left.total()):
                known[raw] -= 1
                if known[raw] < 0:
                    found.append(raw)
            if not found:
                return
            understood = [raw for raw in found if self._refusal(raw, queue) is None]
            self._report.require_priorities()
            left.update(Counter(found) - Counter(understood))
            if understood:
                self._stock.stage(key, queue, understood)
                self._send_staged(queue, producer, confirmed)

    def _send_staged(self, queue: str, producer: str, confirmed: OnProgress) -> None:
        """Send the staged messages of a queue, and remove them when the target has them."""
        channel = self._connection.default_channel
        while True:
            sent, staged = self._stock.staged(queue, CHUNK)
            if not staged:
                return
            try:
                messages = [
                    self._stamped(raw, queue, producer, sent + place) for place, raw in enumerate(staged, 1)
                ]
            except InvalidMessage as exc:
                raise InvalidMessage(
                    f"A message of queue {queue!r} that an interrupted migration has taken is not understood "
                    f"({exc}): run the command with the settings and tasks of that time"
                ) from exc
            self._report.require_priorities()
            self._broker.declare(channel.client, queue)
            channel.publisher.push(messages)
            if self._stock.confirm(queue, sent, len(staged)):
                confirmed(len(staged))

    def _classify_unacked(self, tag: bytes, value: bytes) -> None:
        """Find the queue of an unacknowledged message, and note its tag, or why the message stays."""
        queue = ""
        try:
            raw, exchange, routing_key = as_restored(value)
            queues = self._stock.queues_of(exchange, routing_key)
            if len(queues) != 1:
                raise InvalidMessage(
                    f"exchange {exchange!r} with routing key {routing_key!r} leads to {len(queues)} queues"
                )
            if not is_unicode(queues[0]):
                raise InvalidMessage("the name of its queue is not UTF-8")
            queue = queues[0]
            if not self._is_wanted(queue):
                return
            self._stamped(raw, queue, "", 0)
        except InvalidMessage as exc:
            if self._is_wanted(queue):
                place = f"{self._stock.unacked} {tag.decode('utf-8', 'replace')}"
                self._report.left.append(not_migrated(queue, place, exc, value))
            return
        self._tags.setdefault(queue, []).append(tag)

    def _take_unacked(self, queue: str, producer: str, confirmed: OnProgress) -> None:
        tags = self._tags.get(queue, [])
        for start in range(0, len(tags), CHUNK):
            found = self._stock.unacked_messages(tags[start : start + CHUNK])
            self._stock.stage_unacked(queue, [(tag, as_restored(value)[0]) for tag, value in found])
            self._send_staged(queue, producer, confirmed)


def not_migrated(queue: str, place: str, reason: Exception, raw: bytes) -> NotMigrated:
    """Return the entry of a report for a message that is not understood."""
    return NotMigrated(queue, place, str(reason), raw[:SHOWN].decode("utf-8", "replace"))
