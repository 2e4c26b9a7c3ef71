"""The choices and the outcome of a migration, in either direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_dq.errors import InvalidRequest
from celery_dq.migration.stock_message import Priorities

__all__ = ["MigrationOptions", "MigrationReport", "NotMigrated", "QueueMigration"]


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
        left: Waiting messages that stay.
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
        undecided: Queues with priorities other than 0, if the options do not say how to convert them.
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
        held = bool(self.held_by)
        return sum(
            queue.waiting + queue.staged + (0 if held else queue.unacked) - queue.left
            for queue in self.queues
        )

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
