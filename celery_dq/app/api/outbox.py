"""``app.dq.outbox``: calls that are rows of a database until its transaction has committed.

A call in a transaction is packed as a buffered one, and inserted by the connection of the transaction. A
relay (:mod:`celery_dq.contrib.django.outbox`) publishes the rows. This module decides which calls are rows,
and knows no database: ``celery_dq.contrib.django`` provides the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError, described
from celery_dq.options.sections import OutboxOptions
from celery_dq.producer.sender import Addressed


@dataclass(frozen=True)
class OutboxSnapshot:
    """The outbox of one database.

    Attributes:
        database: Alias of the database.
        rows: Number of committed rows that the broker has not confirmed; None when they cannot be read.
        oldest_s: Age of the oldest one of them in seconds; 0 without one, None when they cannot be read.
        refused: Number of rows that the broker refuses. They are kept, and are not sent again. None when they
            cannot be read.
        error: Why the rows cannot be read; "" when they were read.
    """

    database: str
    rows: int | None = None
    oldest_s: float | None = None
    refused: int | None = None
    error: str = ""

    @property
    def is_up(self) -> bool:
        """Whether the rows were read."""
        return not self.error


class OutboxTables(Protocol):
    """The tables of the outbox in the databases of a project."""

    def in_transaction(self, database: str) -> bool:
        """Return whether this thread is in a transaction of a database. Opens no connection."""

    def insert(self, database: str, message: Addressed) -> None:
        """Insert a message in the transaction of this thread.

        Raises:
            QueueFull: The table has more rows than ``dq_outbox_max_rows``. Nothing was inserted.
        """

    def inspect(self, database: str) -> OutboxSnapshot:
        """Read the state of a table."""


class OutboxApi:
    """Decides which calls are rows, and shows the rows that wait.

    Args:
        app: A Celery app.
        context: The context of the app, with its options.
    """

    def __init__(self, app: Any, context: AppContext) -> None:
        self._app = app
        self._context = context
        #: The tables; None in a program without ``celery_dq.contrib.django``.
        self.tables: OutboxTables | None = None

    @property
    def options(self) -> OutboxOptions:
        """The checked ``dq_outbox…`` settings."""
        options: OutboxOptions = self._context.options.outbox
        return options

    def wanted_by(self, task: Any) -> Any:
        """Return the task's option ``outbox``, or else what the settings say."""
        asked = getattr(task, "outbox", None)
        return self._takes_all if asked is None else asked

    @cached_property
    def _takes_all(self) -> bool:
        return bool(self.options.aliases) and not self.options.opt_in

    def database_for(self, asked: Any) -> str | None:
        """Return the database whose transaction keeps a call of this thread; None when no transaction does.

        Args:
            asked: The option ``outbox``: True for the first database of ``dq_outbox`` with a transaction, or
                the alias of one of them.

        Raises:
            ConfigurationError: The option names a database without a relay.
        """
        if not asked:
            return None
        known = self.options.databases
        names = (asked,) if isinstance(asked, str) else known
        if not names or (isinstance(asked, str) and asked not in known):
            raise ConfigurationError(
                f"outbox = {asked!r}, but dq_outbox = {self.options.aliases!r}: add the alias of the "
                "database to dq_outbox, because workers relay the rows of these databases only"
            )
        tables = self._tables()
        return next((name for name in names if tables.in_transaction(name)), None)

    def insert(self, database: str, message: Addressed) -> None:
        """Insert a packed message in the transaction of this thread; see :class:`OutboxTables`."""
        self._tables().insert(database, message)

    def inspect(self) -> list[OutboxSnapshot]:
        """Read the state of each outbox; no database without ``dq_outbox``.

        A database that cannot be read hides no other one: its snapshot has the error.

        Raises:
            ConfigurationError: ``celery_dq.contrib.django`` is not installed.
        """
        databases = self.options.databases
        if databases and self.tables is None:
            # Celery sets Django up when it imports the tasks, which not every command does.
            self._app.loader.import_default_modules()
        return [self._inspected(name) for name in databases]

    def _inspected(self, database: str) -> OutboxSnapshot:
        tables = self._tables()
        try:
            return tables.inspect(database)
        except Exception as exc:  # the driver of a database has errors of its own
            return OutboxSnapshot(database, error=" ".join(described(exc).split()))

    def _tables(self) -> OutboxTables:
        if self.tables is None:
            raise ConfigurationError(
                f"dq_outbox = {self.options.aliases!r} needs Django: add 'celery_dq.contrib.django' to "
                "INSTALLED_APPS, and call django.setup() before the first call"
            )
        return self.tables


def relay_leadership(app: Any, database: str) -> str:
    """Return the name of the leadership of a database's relay; no queue can have this name."""
    return f"celery outbox of {app.main or 'celery'}: {database}"
