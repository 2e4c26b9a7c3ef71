"""``app.dq.dead_letters`` of one queue in Redis: list dead letters, send them again, or delete them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import redis

from celery_dq.app.api.audit import AuditedChange, OnProgress, check_entry_id, ignore_progress
from celery_dq.app.api.broker import OfQueue, OpenQueue
from celery_dq.app.api.message_edits import check_changes, shown_arguments, with_arguments
from celery_dq.app.api.move import LEASE_MS, Mover
from celery_dq.duration import parse_rate
from celery_dq.errors import CorruptRecord, InvalidMessage, InvalidRequest
from celery_dq.inspector.dead_letters import (
    DeadLetter,
    DeadLetterContent,
    DeadLetterFilter,
    LetterCursor,
    dead_letter_counts,
    dead_letters_from,
    find_dead_letter,
    list_dead_letters,
    matching_ids,
)
from celery_dq.inspector.redis_values import (
    CHUNK,
    Client,
    check_count,
    check_moment,
    check_text,
    chunks,
    first_of,
    moment,
    scan,
    scan_all,
    text,
)
from celery_dq.shown import shell_word
from celery_dq.transport import envelope
from celery_dq.transport.message_record import MessageRecord, placing_of
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import MAX_CHUNK, Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds
from celery_dq.transport.redis.store.script_calls import run_all, share
from celery_dq.transport.tenant import check_priority, check_tenant

T = TypeVar("T")

#: A filter of all dead letters.
ALL = DeadLetterFilter()


@dataclass(frozen=True)
class ReplayedPart:
    """The result of a step of a replay.

    Attributes:
        sent: Number of messages that were sent again.
        looked_at: Number of dead letters that were compared with the filter.
        after: The cursor of the next step; "" after the last one.
        entry_id: The audit entry of this and the former steps; "" while they have sent nothing.
    """

    sent: int
    looked_at: int
    after: str
    entry_id: str = ""


class DeadLetters(OfQueue):
    """The dead letters of one queue."""

    def __len__(self) -> int:
        with self._broker.open(self.name) as opened:
            return sum(dead_letter_counts(*opened))

    def list(self, limit: int = 100, offset: int = 0) -> list[DeadLetter]:
        """List dead letters with reason, last worker and time, the latest first."""
        check_count("limit", limit)
        check_count("offset", offset, least=0)
        with self._broker.open(self.name) as (partitions, client):
            return list_dead_letters(partitions, client, limit, offset)

    def check_tenant_filter(self, tenant: str | None) -> None:
        """Refuse to look for the dead letters of a tenant if the broker has no tenants.

        Raises:
            InvalidRequest: A tenant is given, and the broker has none.
        """

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

        The count of crash deliveries of a replayed message begins again at 0. Its ETA and expiry stay. While
        the partitions of the queue change, a dead letter that moves in this moment stays, and is not counted:
        replay again after the change. Of all dead letters, those stay that cannot be sent: unreadable ones,
        and those of a set of resources in a queue that has several partitions now.

        Args:
            message_id: Which dead letter; all of them by default.
            wanted: Which of all dead letters; not together with `message_id`.
            rate: How many to send per second, such as ``"50/s"``; None: as fast as possible.
            dry_run: Whether to count the dead letters only.
            on_progress: Called after each message with the number of messages sent.

        Returns:
            How many messages were sent.

        Raises:
            InvalidMessage: The dead letter `message_id` cannot be sent.
            InvalidRequest: Both `message_id` and `wanted` are given.
        """
        per_second = check_replay(message_id, wanted, rate)
        send = self._replayed_if_possible if message_id is None else self._replayed
        with self._broker.open(self.name) as opened:
            # The ids are listed before, so that a message that dies again is not replayed twice.
            if message_id is None:
                found = matching_ids(*opened, wanted)
            else:
                letter = find_dead_letter(*opened, message_id)
                found = [] if letter is None else [(letter[0], message_id)]
            if dry_run:
                return len(found)
            details, tenant = message_id or str(wanted), wanted.tenant
            audited = self._change(
                opened, "dead_replayed", details=details, tenant=tenant, on_progress=on_progress
            )
            with audited as change:
                for partition, each in paced(found, per_second):
                    change.add(send(opened, partition, each) is not None)
            return change.count

    def replay_part(
        self,
        matches: Callable[[DeadLetter], bool],
        after: str = "",
        *,
        limit: int = 100,
        rate: float | None = None,
        described: str = "",
        tenant: str | None = None,
        continues: str = "",
    ) -> ReplayedPart:
        """Send some dead letters again, the oldest first, for a caller that goes on step by step.

        A step ends after `limit` messages, or after 500 dead letters. Moving ones, and those that cannot be
        sent, stay. A message that dies again comes again: let `matches` refuse those that are later than the
        first step.

        Args:
            matches: Returns whether a dead letter is meant.
            after: The cursor of the step before (``.after``); "" begins.
            limit: Number of messages, at most.
            rate: How many to send per second, at most; None: as fast as possible.
            described: The filter in words, for the audit stream.
            tenant: The tenant of all of them, for the audit stream.
            continues: The audit entry of the former steps (``.entry_id``); the one of this step replaces it.

        Raises:
            InvalidRequest: `after` is not a cursor, `continues` is not an audit entry, or `limit` is out of
                range.
        """
        check_count("limit", limit)
        check_entry_id(continues)
        place, looked_at = LetterCursor.read(after), 0

        def matching() -> Iterator[tuple[float, str]]:
            nonlocal place, looked_at
            for at_us, letter in letters:
                if change.count == limit:
                    return
                looked_at += 1
                if matches(letter):
                    yield at_us, letter.id
                else:
                    place = place.past(at_us)

        with self._broker.open(self.name) as opened:
            if place.partition >= len(opened.partitions):
                return ReplayedPart(0, 0, "")
            partition = opened.partitions[place.partition]
            letters = dead_letters_from(partition, opened.client, place)
            audited = self._change(
                opened, "dead_replayed", details=described, tenant=tenant, continues=continues
            )
            with audited as change:
                for at_us, message_id in paced(matching(), rate):
                    if self._replayed_if_possible(opened, partition, message_id) is None:
                        place = place.past(at_us)
                    else:
                        change.count += 1
                if looked_at == len(letters) < CHUNK:
                    place = LetterCursor(place.partition + 1)
                change.is_unfinished = place.partition < len(opened.partitions)
            after = str(place) if change.is_unfinished else ""
            return ReplayedPart(change.count, looked_at, after, change.entry_id)

    def show(self, message_id: str) -> DeadLetterContent | None:
        """Return a dead letter with its arguments, ETA, expiry and priority; None when there is none.

        The arguments are known if a JSON serializer wrote them: no other content is decoded.
        """
        check_text("message_id", message_id)
        with self._broker.open(self.name) as opened:
            found = find_dead_letter(*opened, message_id)
        if found is None:
            return None
        _, letter, raw = found
        try:
            record = MessageRecord.unpack(raw)
        except CorruptRecord:
            return DeadLetterContent(letter, 0, None, None, None, None)
        args, kwargs = shown_arguments(record.envelope, record.body)
        return DeadLetterContent(
            letter, record.priority, moment(record.due_us), moment(record.expires_us), args, kwargs
        )

    def edit(self, message_id: str, **changes: Any) -> str | None:
        """Change a dead letter and send it again.

        Args:
            message_id: Which dead letter.
            changes: ``args`` (a list), ``kwargs`` (a dict with texts as keys), ``tenant``, ``priority``,
                ``eta`` (a datetime, None for at once; without a zone it is local time). A part that is not
                named stays.

        Returns:
            The message id, which is a new one if another message already has the old one; None when there is
            no such dead letter, or when it moves to another partition in this moment.

        Raises:
            InvalidMessage: A change is unknown, or the message's body cannot be read, or has a content type
                that is not in the app's ``accept_content``.
            InvalidRequest: The ETA is out of range, or after the expiry of the message.
        """
        check_text("message_id", message_id)
        check_changes(changes, ("args", "kwargs", "tenant", "priority", "eta"))
        with self._broker.open(self.name) as opened:
            found = find_dead_letter(*opened, message_id)
            if found is None:
                return None
            partition, _, raw = found
            record = self._edited(MessageRecord.unpack(raw), **changes).pack()
            details = f"{message_id}: {', '.join(sorted(changes))}"
            with self._change(opened, "dead_edited", details=details) as change:
                new_id = self._replayed(opened, partition, message_id, record)
                change.count = int(new_id is not None)
            return new_id

    def purge(
        self,
        message_id: str | None = None,
        *,
        dry_run: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """Delete one dead letter, or all of them, for good, and return the count of deleted ones.

        While the partitions of the queue change, a dead letter that moves in this moment stays, and is not
        counted: purge again after the change.

        Args:
            message_id: Which dead letter; all of them by default.
            dry_run: Whether to count the dead letters only.
            on_progress: Called after each chunk with the number of deleted ones.
        """
        if message_id is not None:
            check_text("message_id", message_id)
        with self._broker.open(self.name) as opened:
            if dry_run:
                return self._count(opened, message_id)
            details = message_id or ""
            with self._change(opened, "dead_purged", details=details, on_progress=on_progress) as change:
                partitions, client = opened
                chunk = share(MAX_CHUNK, len(partitions))
                while True:
                    if message_id is None:
                        gone = sum(run_rounds(client, [_forget_oldest(each, chunk) for each in partitions]))
                    else:
                        gone = sum(run_all([each.forget_dead([message_id]) for each in partitions], client))
                    change.add(gone)
                    if not gone or message_id is not None:
                        return change.count

    def recover(self, *, dry_run: bool = False, on_progress: OnProgress = ignore_progress) -> int:
        """Make dead letters of messages that nothing names any more, and return their number.

        If another program has written into the keys of the queue, what named a message may have become
        unreadable. Such an entry was set aside, and its message does not run. It becomes a dead letter with
        reason ``recovered`` here, which can be replayed, and what was set aside is deleted. Each message of
        the queue is read.

        Args:
            dry_run: Whether to count the messages only.
            on_progress: Called after each chunk with the number of recovered ones.

        Raises:
            InvalidRequest: The broker is ZooKeeper.
        """
        with self._broker.open(self.name) as opened:
            if dry_run:
                return sum(self._recovered(each, opened.client, dry_run=True) for each in opened.partitions)
            with self._change(opened, "dead_recovered", on_progress=on_progress) as change:
                for partition in opened.partitions:
                    set_aside = run_rounds(opened.client, [scan_all("hash", partition.keys.unreadable)])[0]
                    change.add(self._recovered(partition, opened.client))
                    if set_aside:
                        opened.client.hdel(partition.keys.unreadable, *set_aside)
            return change.count

    @staticmethod
    def _recovered(partition: Partition, client: Client, dry_run: bool = False) -> int:
        return sum(
            partition.recover([text(message_id) for message_id, _ in part], dry_run).run(client)
            for found in scan(client, "hash", partition.keys.messages)
            for part in chunks(found)
        )

    def _change(self, opened: OpenQueue, action: str, **more: Any) -> AbstractContextManager[AuditedChange]:
        """Write a change to the audit stream at its end."""
        return self._broker.audit.change(opened.client, action, self.name, **more)

    @staticmethod
    def _count(opened: OpenQueue, message_id: str | None) -> int:
        """Return the number of dead letters, or whether this one exists."""
        if message_id is None:
            return sum(dead_letter_counts(*opened))
        return int(find_dead_letter(*opened, message_id) is not None)

    def _replayed_if_possible(self, opened: OpenQueue, partition: Partition, message_id: str) -> str | None:
        """Send a dead letter again and return its id; None for one that is gone, moves, or cannot be sent."""
        try:
            return self._replayed(opened, partition, message_id)
        except InvalidMessage:
            return None

    def _edited(self, record: MessageRecord, **changes: Any) -> MessageRecord:
        """Return a record with other arguments, tenant, priority or ETA."""
        if "tenant" in changes:
            record = record._replace(tenant=check_tenant(changes["tenant"]))
        if "priority" in changes:
            record = record._replace(priority=check_priority(changes["priority"]))
        if "eta" in changes:
            eta = changes["eta"]
            due_us = 0 if eta is None else check_moment("eta", eta)
            if 0 < record.expires_us <= due_us:
                raise InvalidRequest(
                    f"eta = {eta}: the message expires at {moment(record.expires_us)}, and would not run; "
                    "give an earlier time"
                )
            record = record._replace(due_us=due_us, counted=False, envelope=_with_eta(record.envelope, eta))
        accept, tasks = self._broker.accept_content, self._broker.app.tasks
        packed, body = with_arguments(record.envelope, record.body, changes, accept, tasks)
        return record._replace(envelope=packed, body=body)

    def _replayed(
        self, opened: OpenQueue, partition: Partition, message_id: str, edit: bytes = b""
    ) -> str | None:
        """Send a dead letter again, with an edited record if given; return its id, None without.

        Raises:
            InvalidMessage: It cannot be read, or its tenant is a set of resources in several partitions.
        """
        client, home = opened.client, partition
        if len(opened.partitions) > 1:
            record = edit or client.hget(partition.keys.dead, message_id)
            if record is None:
                return None
            home = _home_of(opened, record, message_id)
        head_start = self._broker.options.queue(self.name).head_start_us
        mover = Mover(partition, opened.partitions, client, head_start)
        call = partition.replay(
            message_id,
            record=edit,
            head_start_us=head_start,
            # Its tenant was changed, or the queue has got more partitions since it died.
            consumer="" if home is partition else mover.consumer,
            lease_ms=LEASE_MS,
        )
        try:
            new_id = call.run(client)
        except redis.ResponseError as error:
            # The script's word for a record that it cannot read.
            if not str(error).startswith("DQINVALID"):
                raise
            raise unreadable(self.name, message_id) from error
        if new_id is not None and home is not partition:
            mover.move()
        return new_id


def unreadable(queue: str, message_id: str) -> InvalidMessage:
    """Return the error of a dead letter whose record cannot be read."""
    purge = f"celery dq dead purge {shell_word(queue)} {shell_word(message_id)}"
    return InvalidMessage(
        f"Dead letter {message_id!r} of {queue!r} cannot be read, and is not sent again; '{purge}' deletes it"
    )


def _home_of(opened: OpenQueue, record: bytes, message_id: str) -> Partition:
    """Return the partition for a message; one of tenant "" for an unreadable one, which no worker can run."""
    task_id = task_id_of(message_id)
    try:
        tenant, key = placing_of(record, task_id)
    except CorruptRecord:
        tenant, key = "", task_id
    opened.homes.check_set(opened.name, tenant)
    return opened.partitions[opened.homes.place(tenant, key)]


def _forget_oldest(partition: Partition, chunk: int) -> Rounds[int]:
    """Delete the oldest dead letters of a partition, and return their number."""
    ids = yield from first_of(partition.keys.dead_index, chunk)
    if not ids:
        return 0
    gone = yield partition.forget_dead([text(each) for each, _ in ids])
    return int(gone)


def check_replay(message_id: str | None, wanted: DeadLetterFilter, rate: str | float | None) -> float | None:
    """Return the rate of a replay per second; None for as fast as possible.

    Raises:
        ConfigurationError: The rate cannot be used.
        InvalidRequest: The id is not text, or comes with a filter.
    """
    if message_id is not None:
        check_text("message_id", message_id)
        if wanted != ALL:
            raise InvalidRequest("replay: give either message_id or wanted=…, not both")
    instead = "leave it out for as fast as possible"
    return None if rate is None else parse_rate(rate, option="rate", instead=instead)


def paced(items: Iterable[T], per_second: float | None) -> Iterator[T]:
    """Yield items, at most `per_second` of them in a second; None is without a limit.

    After a stall, such as a slow request, the rate goes on: nothing is made up for.
    """
    due = time.monotonic()
    for item in items:
        if per_second is not None:
            time.sleep(max(due - time.monotonic(), 0))
            due = max(due + 1 / per_second, time.monotonic())
        yield item


def _with_eta(packed: bytes, eta: datetime | None) -> bytes:
    """Return an envelope with another ETA."""
    headers, properties, content_type, encoding = envelope.unpack(packed)
    text = None if eta is None else eta.astimezone().isoformat()
    return envelope.pack({**headers, "eta": text}, properties, content_type, encoding)
