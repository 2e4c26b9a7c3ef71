"""``app.dq.dead_letters`` where the broker is ZooKeeper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_dq.app.dead_letters import DeadLetters, check_changes, readdressed
from celery_dq.errors import CorruptRecord
from celery_dq.inspector.dead_letters import DeadLetter
from celery_dq.inspector.reading import moment
from celery_dq.transport import envelope
from celery_dq.transport.tenant import check_priority
from celery_dq.transport.zookeeper.graveyard import Buried
from celery_dq.transport.zookeeper.record import Record


class DeadNodes(DeadLetters):
    """The dead letters of one queue in ZooKeeper."""

    def __len__(self) -> int:
        with self._broker.zookeeper_channel() as channel:
            return len(channel.graveyard(self.name))

    def list(self, limit: int = 100, offset: int = 0) -> list[DeadLetter]:
        """Dead letters with reason, last worker and times; the latest first."""
        with self._broker.zookeeper_channel() as channel:
            found = channel.graveyard(self.name).list()
        return [self._letter(each) for each in found[offset : offset + limit]]

    def replay(self, message_id: str | None = None) -> int:
        """Send one dead letter, or all of them, to the end of the queue; returns how many.

        A replayed message starts anew: its deliveries are forgotten, its ETA and expiry are not. What nobody
        can read stays.
        """
        with self._broker.zookeeper_channel() as channel:
            graveyard = channel.graveyard(self.name)
            if message_id is not None:
                return int(graveyard.replay(message_id))
            # The oldest first; as many as there are now.
            letters = [letter for letter in reversed(graveyard.list()) if letter.record is not None]
            return sum(graveyard.replay(letter.id) for letter in letters)

    def edit(self, message_id: str, **changes: Any) -> str | None:
        """Send a dead letter again, changed; returns its message id, None when there is none.

        Arguments:
            message_id: Which dead letter.
            changes: ``args``, ``kwargs`` (of the task), ``priority``. What is not named stays.

        Raises:
            InvalidMessage: A change is unknown, or the message's body cannot be read.
        """
        check_changes(changes, ("args", "kwargs", "priority"))

        def changed(record: Record) -> Record:
            if "priority" in changes:
                record = replace(record, priority=check_priority(changes["priority"]))
            packed, body = readdressed(record.envelope, record.body, changes)
            return replace(record, envelope=packed, body=body)

        with self._broker.zookeeper_channel() as channel:
            return message_id if channel.graveyard(self.name).replay(message_id, changed) else None

    def purge(self, message_id: str | None = None) -> int:
        """Delete one dead letter, or all of them, for good; returns how many."""
        with self._broker.zookeeper_channel() as channel:
            return int(channel.graveyard(self.name).purge(None if message_id is None else [message_id]))

    def _letter(self, buried: Buried) -> DeadLetter:
        headers: dict[str, Any] = {}
        args = ""
        try:
            if buried.record is not None:
                headers = envelope.unpack(buried.record.envelope)[0]
        except CorruptRecord as error:
            args = f"unreadable: {error}"
        return DeadLetter(
            id=buried.id,
            queue=self.name,
            reason=str(buried.about.get("reason", "unknown")),
            worker=str(buried.about.get("worker", "")),
            at=moment(buried.at_us),
            deliveries=int(buried.about.get("deliveries", 0)),
            task=str(headers.get("task") or buried.about.get("task", "")),
            args=args or str(headers.get("argsrepr") or ""),
            kwargs=str(headers.get("kwargsrepr") or ""),
        )
