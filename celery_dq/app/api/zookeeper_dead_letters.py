"""``app.dq.dead_letters`` on the ZooKeeper broker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_dq.app.api.progress import OnProgress, ignore_progress, paced
from celery_dq.app.api.redis_dead_letters import ALL, DeadLetters, check_choice
from celery_dq.app.api.task_body import check_changes, shown_arguments, with_arguments
from celery_dq.duration import parse_rate
from celery_dq.errors import CorruptRecord, InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetter, DeadLetterContent, DeadLetterFilter
from celery_dq.inspector.redis_values import check_count, check_text, moment
from celery_dq.transport import envelope
from celery_dq.transport.tenant import check_priority
from celery_dq.transport.zookeeper.dead_letters import DeadLetterNode
from celery_dq.transport.zookeeper.record import ZooKeeperRecord


class ZooKeeperDeadLettersApi(DeadLetters):
    """The dead letters of one queue in ZooKeeper."""

    def __len__(self) -> int:
        with self._broker.zookeeper_channel() as channel:
            return len(channel.dead_letters(self.name))

    def list(self, limit: int = 100, offset: int = 0) -> list[DeadLetter]:
        """List dead letters with reason, last worker and time, the latest first."""
        check_count("limit", limit)
        check_count("offset", offset, least=0)
        with self._broker.zookeeper_channel() as channel:
            found = channel.dead_letters(self.name).list()
        return [self._letter(each) for each in found[offset : offset + limit]]

    def check_tenant_filter(self, tenant: str | None) -> None:
        """Refuse to look for the dead letters of a tenant."""
        if tenant is not None:
            raise InvalidRequest(
                f"tenant = {tenant!r}: a dead letter in ZooKeeper has no tenant; leave out tenant"
            )

    def replay(
        self,
        message_id: str | None = None,
        *,
        wanted: DeadLetterFilter = ALL,
        rate: str | float | None = None,
        dry_run: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """Send one dead letter, or all of them, to the end of the queue.

        The count of deliveries of a replayed message begins again at 0. Its ETA and expiry stay. Unreadable
        dead letters are not replayed.

        Args:
            message_id: Which dead letter; all of them by default.
            wanted: Which of all dead letters; not together with `message_id`.
            rate: How many to send per second, such as ``"50/s"``; None: as fast as possible.
            dry_run: Whether to count the dead letters only.
            on_progress: Called after each message with the number of messages sent.

        Returns:
            How many messages were sent.

        Raises:
            InvalidRequest: Both `message_id` and `wanted` are given, or `wanted` names a tenant.
        """
        check_choice(message_id, wanted)
        self.check_tenant_filter(wanted.tenant)
        per_second = (
            None
            if rate is None
            else parse_rate(rate, option="rate", instead="leave it out for as fast as possible")
        )
        with self._broker.zookeeper_channel() as channel:
            stored = channel.dead_letters(self.name)
            if message_id is not None:
                if dry_run:
                    return int(any(letter.id == message_id for letter in stored.list()))
                return int(stored.replay(message_id))
            # Oldest first. The list is made before, so that a message that dies again is not replayed twice.
            letters = [
                letter
                for letter in reversed(stored.list())
                if letter.record is not None and wanted.matches(self._letter(letter))
            ]
            if dry_run:
                return len(letters)
            count = 0
            for letter in paced(letters, per_second):
                count += stored.replay(letter.id)
                on_progress(count)
            return count

    def show(self, message_id: str) -> DeadLetterContent | None:
        """Return a dead letter with its arguments, ETA and priority; None when there is none.

        The arguments are known if a JSON serializer wrote them: no other content is decoded.
        """
        check_text("message_id", message_id)
        with self._broker.zookeeper_channel() as channel:
            stored = channel.dead_letters(self.name).list()
        node = next((each for each in stored if each.id == message_id), None)
        if node is None:
            return None
        letter, record = self._letter(node), node.record
        if record is None:
            return DeadLetterContent(letter, 0, None, None, None, None)
        args, kwargs = shown_arguments(record.envelope, record.body)
        return DeadLetterContent(letter, record.priority, moment(record.due_ms * 1000), None, args, kwargs)

    def edit(self, message_id: str, **changes: Any) -> str | None:
        """Change a dead letter and send it again.

        Args:
            message_id: Which dead letter.
            changes: ``args``, ``kwargs`` (of the task), ``priority``. A part that is not named stays.

        Returns:
            The message id, None when there is no such dead letter.

        Raises:
            InvalidMessage: A change is unknown, or the message's body cannot be read, or has a content type
                that is not in the app's ``accept_content``.
        """
        check_text("message_id", message_id)
        check_changes(changes, ("args", "kwargs", "priority"))

        def changed(record: ZooKeeperRecord) -> ZooKeeperRecord:
            if "priority" in changes:
                record = replace(record, priority=check_priority(changes["priority"]))
            accept, tasks = self._broker.accept_content, self._broker.tasks
            packed, body = with_arguments(record.envelope, record.body, changes, accept, tasks)
            return replace(record, envelope=packed, body=body)

        with self._broker.zookeeper_channel() as channel:
            return message_id if channel.dead_letters(self.name).replay(message_id, changed) else None

    def purge(
        self,
        message_id: str | None = None,
        *,
        dry_run: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """Delete one dead letter, or all of them, for good, and return the count of deleted ones.

        Args:
            message_id: Which dead letter; all of them by default.
            dry_run: Whether to count the dead letters only.
            on_progress: Called at the end with the number of deleted ones.
        """
        if message_id is not None:
            check_text("message_id", message_id)
        with self._broker.zookeeper_channel() as channel:
            stored = channel.dead_letters(self.name)
            if dry_run:
                return sum(message_id in (None, letter.id) for letter in stored.list())
            count = int(stored.purge(None if message_id is None else [message_id]))
            on_progress(count)
            return count

    def recover(self, *, dry_run: bool = False, on_progress: OnProgress = ignore_progress) -> int:
        """Refuse: in ZooKeeper, a message is one node, which needs nothing else to be named.

        Raises:
            InvalidRequest: Always.
        """
        raise InvalidRequest(
            f"The queue {self.name!r} is in ZooKeeper, where each message is a node of its own: there is "
            "nothing to recover. A node that cannot be read is kept in the folder 'unreadable' of the queue."
        )

    def _letter(self, node: DeadLetterNode) -> DeadLetter:
        headers: dict[str, Any] = {}
        args = ""
        try:
            if node.record is not None:
                headers = envelope.unpack(node.record.envelope)[0]
        except CorruptRecord as error:
            args = f"unreadable: {error}"
        return DeadLetter(
            id=node.id,
            queue=self.name,
            reason=str(node.about.get("reason", "unknown")),
            worker=str(node.about.get("worker", "")),
            at=moment(node.at_us),
            deliveries=int(node.about.get("deliveries", 0)),
            task=str(headers.get("task") or node.about.get("task", "")),
            args=args or str(headers.get("argsrepr") or ""),
            kwargs=str(headers.get("kwargsrepr") or ""),
        )
