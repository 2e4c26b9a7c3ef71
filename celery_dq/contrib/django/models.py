"""The permissions of the dashboard, which have no table, and the table of the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db import connections, models, transaction
from django.utils import timezone

from celery_dq.contrib.django.dashboard.access import PERMISSIONS


class NoRows(models.Manager):  # type: ignore[type-arg]  # generic for type checkers only
    """Finds nothing, and asks no database: ``dumpdata`` and the admin read every model."""

    def get_queryset(self) -> Any:
        """Return a query that is not sent."""
        return super().get_queryset().none()


class Dashboard(models.Model):
    """A model without a table: Django keeps permissions by model."""

    objects = NoRows()

    class Meta:
        """Nothing is stored; ``manage.py migrate`` makes the permissions."""

        managed = False
        base_manager_name = "objects"
        default_permissions = ()
        permissions = PERMISSIONS
        verbose_name = "dashboard"
        verbose_name_plural = "dashboard"


class OutboxRows(models.QuerySet["OutboxRow"]):
    """Rows of the outbox."""

    def delete_all_silently(self) -> None:
        """Delete these rows in one statement without signals."""
        self._raw_delete(self.db)

    def delete_silently(self, numbers: Sequence[int]) -> None:
        """Delete rows without signals; see :meth:`OutboxRow.insert_silently`.

        Args:
            numbers: Their primary keys.
        """
        connection = connections[self.db]
        if connection.vendor != "mysql":
            self.filter(pk__in=numbers).delete_all_silently()
            return
        # With many keys the server prefers a scan, which waits for the locks of rows that are not committed.
        table = connection.ops.quote_name(self.query.get_meta().db_table)
        with transaction.atomic(self.db), connection.cursor() as cursor:
            delete = f"DELETE FROM {table} WHERE id = %s"  # noqa: S608 - the name of our own table
            cursor.executemany(delete, [(number,) for number in numbers])


class OutboxRow(models.Model):
    """A call that was made in a transaction, and is published after its commit.

    Attributes:
        lane: Destination, in the form that the sender uses.
        task_id: The task id.
        payload: The packed message, in the form that the sender uses.
        created_at: When the call was made.
        producer: Producer sequence of the relay that has numbered the row; "" for a row without a number.
        sequence: Number of the row in that sequence.
        error: Why the broker refuses the message; "" for a row that is sent.
    """

    lane: models.TextField[str, str] = models.TextField()
    task_id: models.CharField[str, str] = models.CharField(max_length=200)
    payload: models.BinaryField[Any, Any] = models.BinaryField()
    created_at: models.DateTimeField[datetime, datetime] = models.DateTimeField(default=timezone.now)
    producer: models.CharField[str, str] = models.CharField(max_length=32, default="")
    sequence: models.BigIntegerField[int, int] = models.BigIntegerField(default=0)
    error: models.TextField[str, str] = models.TextField(default="")

    objects = OutboxRows.as_manager()

    class Meta:
        """Its permissions are those of the dashboard."""

        default_permissions = ()
        verbose_name = "outbox row"
        verbose_name_plural = "outbox rows"

    def __str__(self) -> str:
        return f"{self.task_id} for {self.lane}"

    def insert_silently(self, using: str) -> None:
        """Insert the row without signals.

        A receiver of the signals of all models, such as one for a search index, may call a task. The row of
        that call would be saved with the same signals, without an end.

        Args:
            using: Alias of the database.
        """
        with transaction.mark_for_rollback_on_error(using):
            self._save_table(cls=type(self), force_insert=True, using=using)  # type: ignore[attr-defined]
