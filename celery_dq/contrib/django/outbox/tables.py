"""The tables of the outbox, as a call sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connections
from django.db.models import Count, Min, Q
from django.utils import timezone

from celery_dq.app.api.outbox import OutboxSnapshot
from celery_dq.contrib.django.models import OutboxRow
from celery_dq.errors import QueueFull
from celery_dq.producer.sender import Addressed


class DjangoOutbox:
    """See :class:`celery_dq.app.api.outbox.OutboxTables`.

    Args:
        max_rows: Returns the largest number of rows of a table.
    """

    def __init__(self, max_rows: Callable[[], int]) -> None:
        self._max_rows = max_rows
        #: Per database a number below which all rows are gone, or were counted. Each process has its own.
        self._lowest: dict[str, int] = {}

    def in_transaction(self, database: str) -> bool:
        """See the protocol. A connection without autocommit is always in a transaction."""
        connection = connections[database]
        is_open = connection.connection is not None
        # A connection opens with its first query, which the row of this call may be.
        autocommit = connection.autocommit if is_open else connection.settings_dict["AUTOCOMMIT"]
        return connection.in_atomic_block or not autocommit

    def insert(self, database: str, message: Addressed) -> None:
        """See the protocol."""
        lane, task_id, payload = message
        row = OutboxRow(lane=lane, task_id=task_id.decode("utf-8", "replace"), payload=payload)
        row.insert_silently(database)
        most = self._max_rows()
        # The numbers of the rows bound their count, and cost no query.
        lowest = self._lowest.get(database)
        if lowest is None or not lowest <= row.pk < lowest + most:
            self._require_room(database, row, most)

    def _require_room(self, database: str, row: OutboxRow, most: int) -> None:
        """Look for the lowest number, and count only if numbers alone leave it open whether there is room."""
        rows: Any = OutboxRow.objects.using(database)
        lowest = rows.order_by("pk").values_list("pk", flat=True)[0]
        if row.pk - lowest >= most:
            count = rows.all()[: most + 1].count()
            if count > most:
                rows.delete_silently([row.pk])
                raise QueueFull(
                    f"the outbox of database {database!r} has {most} rows (dq_outbox_max_rows), so a call "
                    f"for {row.lane} was not accepted: start a worker, which relays the rows to the "
                    "broker, and see its log for 'outbox'; or raise the setting"
                )
            lowest = row.pk - count + 1
        self._lowest[database] = lowest

    def inspect(self, database: str) -> OutboxSnapshot:
        """See the protocol."""
        connection = connections[database]
        was_open = connection.connection is not None
        waits = Q(error="")
        try:
            found = OutboxRow.objects.using(database).aggregate(
                rows=Count("pk", filter=waits),
                oldest=Min("created_at", filter=waits),
                refused=Count("pk", filter=~waits),
            )
        finally:
            if not was_open:
                # The thread may end, and Django closes the connections of requests only.
                connection.close()
        oldest = found["oldest"]
        age_s = 0.0 if oldest is None else max((timezone.now() - oldest).total_seconds(), 0.0)
        return OutboxSnapshot(database, found["rows"], age_s, found["refused"])
