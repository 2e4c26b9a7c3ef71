"""The rows of one database as the flusher sees them: numbered, in lanes, deleted once the broker has them.

The number of a row says nothing about the order in which transactions commit: a row with a lower number may
appear later. A number that grows with the rows would therefore make the broker take a late row for a repeated
one. The relay gives the numbers instead, when it first sees a row, and writes them into the row before it
sends. A relay that goes on after a crash repeats the numbered rows under their numbers, and the broker stores
each once. No place in the table is remembered, so no row is skipped.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from typing import Any

from django.db.models import F
from django.db.models.functions import Length

from celery_dq.clock import Clock
from celery_dq.contrib.django.models import OutboxRow
from celery_dq.producer.buffer import BATCH_BYTES, BufferedMessage, Lane, Limits
from celery_dq.producer.message_store import MessageStore

#: Seconds between two searches for the rows that another relay has numbered. That relay may have lost its
#: leadership without notice, and number further rows; as a rule it also sends them.
ADOPT_S = 60.0
#: After a look that found no row, the table rests this many times as long as the look took. A look reads all
#: rows of lanes that wait, and on PostgreSQL all deleted rows that an old transaction may still see.
REST = 4


class RelayStore(MessageStore):
    """The message store of a relay, for one term.

    Any error of the database is raised. The state in memory may differ from the table then: make a new store,
    which adopts the numbered rows.

    Args:
        database: Alias of the database.
        batch_size: Rows in a batch.
        poll_s: Seconds between two looks at an empty table.
        clock: Its monotonic time orders retries.
    """

    def __init__(self, database: str, batch_size: int, poll_s: float, clock: Clock) -> None:
        super().__init__(Limits(batch_size=batch_size, linger_s=0.0), None, clock)
        # The thread of a term may be a greenlet, in which a native lock would stop all others.
        self.wakeup = threading.Semaphore(0)
        self._database = database
        self._batch_size = batch_size
        self._poll_s = poll_s
        #: Names the rows that this store has numbered.
        self._producer = uuid.uuid4().hex
        self._last = 0
        self._adopted_at = float("-inf")
        self._look_at = float("-inf")
        self._by_producer: dict[bytes, Lane] = {}
        #: Producer sequence of a lane and number of a message, to the number of the row.
        self._rows: dict[tuple[bytes, int], int] = {}

    @property
    def _objects(self) -> Any:
        return OutboxRow.objects.using(self._database)

    def adopt(self) -> int:
        """Load the rows that other relays have numbered; return how many."""
        now = self._now()
        if now - self._adopted_at < ADOPT_S:
            return 0
        self._adopted_at = now
        found = self._objects.filter(producer__gt="", error="").exclude(producer=self._producer)
        loaded = set(self._rows.values())
        rows = [row for row in found.order_by("producer", "sequence") if row.pk not in loaded]
        for row in rows:
            self._add(row, row.producer, row.sequence)
        return len(rows)

    def take(self) -> Lane | None:
        """Put the next batch in flight, after numbering rows if no lane has a batch that is due."""
        now = self._now()
        if self.buffer.next_due() > now >= self._look_at and not self._number_rows():
            ended = self._now()
            self._look_at = ended + REST * (ended - now)
        return super().take()

    def _number_rows(self) -> bool:
        # Rows of another relay go before others of their lane. A lane that waits must not fill the memory.
        busy = {
            lane.key
            for lane in self.buffer.active.values()
            if lane.adopted or lane.pending >= self._batch_size or _bytes_of(lane) >= BATCH_BYTES
        }
        waiting = self._objects.filter(producer="").exclude(lane__in=busy).order_by("pk")
        # The payloads are read for as many rows as may be in memory, as a batch can be gigabytes.
        sizes = waiting.annotate(size=Length("payload")).values_list("pk", "size")[: self._batch_size]
        chosen, left = [], BATCH_BYTES
        for number, size in sizes:
            chosen.append(number)
            left -= size
            if left <= 0:
                break
        rows = [*self._objects.filter(pk__in=chosen, producer="").order_by("pk")]
        if not rows:
            return False
        offset = self._last + 1 - rows[0].pk
        self._last = rows[-1].pk + offset
        numbers = [row.pk for row in rows]
        own = self._objects.filter(pk__in=numbers, producer="")
        if own.update(producer=self._producer, sequence=F("pk") + offset) < len(rows):
            # A relay that has lost its leadership has numbered some of them, and sends them.
            mine = self._objects.filter(pk__in=numbers, producer=self._producer)
            kept = set(mine.values_list("pk", flat=True))
            rows = [row for row in rows if row.pk in kept]
        for row in rows:
            self._add(row, self._producer, row.pk + offset)
        return True

    def _add(self, row: OutboxRow, producer: str, sequence: int) -> None:
        # Lanes are repeated one by one, so each has a sequence of its own.
        name = hashlib.blake2b(f"{producer}/{row.lane}".encode(), digest_size=16).digest()
        lane = self._by_producer.get(name)
        if lane is None:
            lane = self._by_producer[name] = Lane(row.lane, name, adopted=producer != self._producer)
        self._rows[name, sequence] = row.pk
        message = BufferedMessage(sequence, row.task_id.encode(), bytes(row.payload))
        self.buffer.add(lane, message, self._now())

    def done(self, lane: Lane, *, rejected: bool = False, count: int = 1_000_000) -> list[BufferedMessage]:
        """Settle the batch in flight, or its first `count` messages, and delete the rows that were sent."""
        batch = super().done(lane, rejected=rejected, count=count)
        rows = [self._rows.pop((lane.producer, each.sequence)) for each in batch]
        if rows and not rejected:
            self._objects.all().delete_silently(rows)
        # The rows behind this batch may be sent now.
        self._look_at = float("-inf")
        return batch

    def reject(self, lane: Lane, message: BufferedMessage, error: Exception) -> str:
        """Keep a row that the broker refuses, with the reason; return its description."""
        row = self._rows[lane.producer, message.sequence]
        self._objects.filter(pk=row).update(error=str(error) or repr(error))
        return f"row {row} of the outbox of database {self._database!r}"

    def sleep_until_due(self, *, recently: bool, limit: float) -> float:
        """Return for how many seconds to wait: until a lane is due, or for a look at the table."""
        return min(limit, self._poll_s, max(self.buffer.next_due() - self._now(), 0.0))

    def tidy(self) -> None:
        """Forget the lanes of other relays whose rows are sent."""
        for name, lane in [*self._by_producer.items()]:
            if lane.adopted and not lane.busy:
                del self._by_producer[name]


def _bytes_of(lane: Lane) -> int:
    return sum(len(message.payload) for message in (*lane.in_flight, *lane.waiting))
