"""Snapshots of dead letters, with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import methodcaller
from typing import Any, NamedTuple

from celery_dq.errors import InvalidRequest
from celery_dq.inspector.messages import message_of, read_info
from celery_dq.inspector.redis_values import (
    CHUNK,
    MOST,
    Client,
    bounded_us,
    chunks,
    command,
    first_of,
    moment,
    text,
)
from celery_dq.transport.redis.store.partition import Partition, process_of
from celery_dq.transport.redis.store.rounds import Rounds, run_chosen, run_one, run_rounds, together


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter.

    Attributes:
        id: The message id, by which the dead letter is sent again, changed and deleted.
        task_id: The id of the task.
        queue: Name of the queue.
        reason: Why the message became a dead letter.
        worker: Worker that had it last; "" when none had.
        at: When it became a dead letter.
        deliveries: Number of deliveries that ended in a crash.
        task: Name of the task.
        tenant: Tenant of the message.
        args: Celery's short representation of the positional arguments.
        kwargs: Celery's short representation of the named arguments.
    """

    id: str
    task_id: str
    queue: str
    reason: str
    worker: str = ""
    at: datetime | None = None
    deliveries: int = 0
    task: str = ""
    tenant: str = ""
    args: str = ""
    kwargs: str = ""


@dataclass(frozen=True)
class DeadLetterContent:
    """A dead letter with its message.

    Attributes:
        letter: The dead letter.
        priority: Priority, 0 to 9.
        due: The ETA that the message has when it is sent again; None without one.
        expires: When it expires; None for never.
        args: Positional arguments; None if the body cannot be read here.
        kwargs: Named arguments; None if the body cannot be read here.
    """

    letter: DeadLetter
    priority: int
    due: datetime | None
    expires: datetime | None
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class DeadLetterFilter:
    """Which dead letters are meant; a part that is None matches all.

    Attributes:
        tenant: Their tenant.
        task: The name of their task.
        reason: A part of their reason.
        since: The time from which on they are dead letters; without a zone it is local time.
    """

    tenant: str | None = None
    task: str | None = None
    reason: str | None = None
    since: datetime | None = None

    def __str__(self) -> str:
        """Return the parts that are not None, without the tenant, for the audit stream."""
        since = None if self.since is None else self.since.isoformat(timespec="seconds")
        parts = (("task", self.task), ("reason", self.reason), ("since", since))
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None)

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter is meant."""
        if self.since is not None and (letter.at is None or bounded_us(letter.at) < bounded_us(self.since)):
            return False
        return (
            self.tenant in (None, letter.tenant)
            and self.task in (None, letter.task)
            and (self.reason is None or self.reason in letter.reason)
        )


def find_dead_letter(
    partitions: Sequence[Partition], client: Client, message_id: str
) -> tuple[Partition, DeadLetter, bytes] | None:
    """Return a dead letter with its partition and its record; None when there is none."""
    found = run_rounds(client, [_find_in(each, message_id) for each in partitions])
    return next((each for each in found if each is not None), None)


def _find_in(partition: Partition, message_id: str) -> Rounds[tuple[Partition, DeadLetter, bytes] | None]:
    keys = partition.keys

    def read(pipe: Any) -> None:
        pipe.hget(keys.dead, message_id)
        pipe.hget(keys.dead_info, message_id)
        pipe.zscore(keys.dead_index, message_id)

    raw, info, at_us = yield read
    if raw is None:
        return None
    return partition, _dead_letter(message_id, keys.queue, at_us or 0, raw, info), raw


def matching_ids(
    partitions: Sequence[Partition], client: Client, wanted: DeadLetterFilter
) -> list[tuple[Partition, str]]:
    """Return the ids of the dead letters that are meant, the oldest first, with their partitions.

    Reads all in chunks.
    """
    rows = _latest(partitions, client, MOST)[::-1]
    if wanted == DeadLetterFilter():
        return [(partition, message_id) for partition, (message_id, _) in rows]
    letters = run_chosen(client, rows, _described)
    return [
        (partition, letter.id)
        for (partition, _), letter in zip(rows, letters, strict=True)
        if wanted.matches(letter)
    ]


class LetterCursor(NamedTuple):
    """A place among the dead letters of a queue, the oldest of each partition first.

    Attributes:
        partition: Number of the partition.
        at_us: Time of the dead letters at this place, µs.
        skipped: Number of the dead letters of this time that are before the place.
    """

    partition: int = 0
    at_us: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        """Return the cursor as a text."""
        return ".".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> LetterCursor:
        """Read a cursor from a text; "" begins.

        Raises:
            InvalidRequest: The text is not a cursor.
        """
        if not text:
            return cls()
        parts = text.split(".")
        if len(parts) == 3 and all(each.isascii() and each.isdecimal() and len(each) < 18 for each in parts):
            return cls(*map(int, parts))
        raise InvalidRequest(f"after = {text!r} is not a cursor of dead letters: begin without it")

    def past(self, at_us: float) -> LetterCursor:
        """Return the place after a dead letter that stays."""
        at = int(at_us)
        return LetterCursor(self.partition, at, self.skipped + 1 if at == self.at_us else 1)


def dead_letters_from(
    partition: Partition, client: Client, place: LetterCursor
) -> list[tuple[float, DeadLetter]]:
    """Return up to :data:`CHUNK` dead letters of a partition with their times (µs), the oldest first."""
    key = partition.keys.dead_index
    rows = client.zrangebyscore(key, place.at_us, "+inf", start=place.skipped, num=CHUNK, withscores=True)
    chosen = [(text(message_id), at_us) for message_id, at_us in rows]
    letters = run_one(client, _described(partition, chosen))
    return [(at_us, letter) for (_, at_us), letter in zip(chosen, letters, strict=True)]


def list_dead_letters(
    partitions: Sequence[Partition], client: Client, limit: int = 100, offset: int = 0
) -> list[DeadLetter]:
    """Read dead letters, the latest first."""
    return run_chosen(client, _latest(partitions, client, offset + limit)[offset:], _described)


def _latest(
    partitions: Sequence[Partition], client: Client, limit: int
) -> list[tuple[Partition, tuple[str, float]]]:
    """Return ids and times (µs) of dead letters, the latest first."""
    found = run_rounds(client, [first_of(each.keys.dead_index, limit, highest=True) for each in partitions])
    rows = [
        (at_us, text(message_id), number) for number, own in enumerate(found) for message_id, at_us in own
    ]
    rows.sort(reverse=True)
    return [(partitions[number], (message_id, at_us)) for at_us, message_id, number in rows[:limit]]


def _described(partition: Partition, chosen: list[tuple[str, float]]) -> Rounds[list[DeadLetter]]:
    keys = partition.keys
    letters: list[DeadLetter] = []
    for chunk in chunks(chosen):
        ids = [each for each, _ in chunk]
        records, infos = yield together(
            methodcaller("hmget", keys.dead, ids), methodcaller("hmget", keys.dead_info, ids)
        )
        letters += [
            _dead_letter(message_id, keys.queue, at_us, raw or b"", info)
            for (message_id, at_us), raw, info in zip(chunk, records, infos, strict=True)
        ]
    return letters


def dead_letter_counts(partitions: Sequence[Partition], client: Client) -> list[int]:
    """Return the number of dead letters in each partition."""
    return run_rounds(client, [command("hlen", each.keys.dead) for each in partitions])


def _dead_letter(message_id: str, queue: str, at_us: float, raw: bytes, info: bytes | None) -> DeadLetter:
    known = read_info(info)
    message = message_of(raw, message_id, queue, "dead")
    return DeadLetter(
        id=message_id,
        task_id=message.task_id,
        queue=queue,
        reason=str(known.get("reason", "unknown")),
        worker=process_of(str(known.get("worker", ""))),
        at=moment(at_us),
        deliveries=known["deliveries"],
        task=message.task or str(known.get("task", "")),
        tenant=message.tenant or str(known.get("tenant", "")),
        args=message.args,
        kwargs=message.kwargs,
    )
