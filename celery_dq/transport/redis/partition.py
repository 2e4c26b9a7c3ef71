"""One partition of a queue, as a set of calls: every change of it is one Lua script.

A method does not talk to the server. It returns a :class:`Call`, which the caller runs at once
(:meth:`Call.run`) or sends on a connection of his own (:meth:`Call.command`, :meth:`Call.parse`). Times are
those of the server; durations go in as milliseconds or microseconds, as the names say.

A *tag* is what names one delivery of a message: its claim number and its message id. A tag of an older claim
is *stale*: the script leaves everything as it is and counts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from celery_dq.keys import PartitionKeys, quota_field
from celery_dq.scripts.loader import Argument, Redis, Script, ScriptSet
from celery_dq.transport.redis.fenced import Fenced, read_fenced
from celery_dq.transport.redis.replies import (
    Cancellation,
    Claimed,
    ClaimedEntry,
    Moved,
    Outgoing,
    Purged,
    Pushed,
    Renewed,
    read_cancellations,
    read_claimed,
    read_dead_lettered,
    read_entries,
    read_flag,
    read_moved,
    read_nothing,
    read_pairs,
    read_purged,
    read_pushed,
    read_renewed,
    read_replayed,
    read_text,
)

T = TypeVar("T")

#: Most messages, tags or tenants that one call takes; longer work is done in chunks.
MAX_CHUNK = 1000

#: A head start that no wait outlives and that a double still counts in whole microseconds.
STRICT_PRIORITY_US = 1_000_000_000_000_000

ReleaseMode: TypeAlias = Literal["unstarted", "requeue", "crashed"]


@dataclasses.dataclass(frozen=True)
class Call(Generic[T]):
    """A script with its arguments, ready to be sent."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Argument, ...]
    parse: Callable[[Any], T]

    def command(self, full: bool = False) -> tuple[Argument, ...]:
        """The words to send; ``full`` after the server answered NOSCRIPT."""
        return self.script.command(self.keys, self.args, full)

    def run(self, client: Redis) -> T:
        """Sends it on ``client``, waits, and returns the parsed reply."""
        return self.parse(self.script.run(client, self.keys, self.args))


def load_scripts() -> ScriptSet:
    """The scripts of the tenant broker. Keep the set: it remembers what it has read."""
    return ScriptSet(Path(__file__).parent)


class Partition:
    """The calls on one partition."""

    def __init__(self, keys: PartitionKeys, scripts: ScriptSet) -> None:
        self.keys = keys
        self.scripts = scripts

    def push(
        self,
        messages: Sequence[Outgoing],
        *,
        producer: str = "",
        marker_ttl_ms: int = 3_600_000,
        head_start_us: int = STRICT_PRIORITY_US,
    ) -> Call[list[Pushed]]:
        """Accepts messages; with a ``producer``, a sequence that was accepted before changes nothing.

        :param marker_ttl_ms: how long the producer's last sequence is remembered.
        :param head_start_us: by how much each step of priority goes before its time.
        """
        _check_chunk(messages)
        records: list[Argument] = list(chain.from_iterable(messages))
        args: tuple[Argument, ...] = (producer, marker_ttl_ms, head_start_us, len(messages), *records)
        return self._call("push", args, read_pushed)

    def claim(
        self,
        consumer: str,
        *,
        lease_ms: int,
        want: int,
        free: int | None = None,
        hold: bool | None = False,
        max_deliveries: int = 5,
        suspects: bool = True,
        settle: Sequence[tuple[str, str]] = (),
        finish: Sequence[tuple[str, str]] = (),
    ) -> Call[Claimed]:
        """Settles, finishes, renews the lease, and takes up to ``want`` messages.

        :param free: how many of them may belong to tenants with a concurrency limit; default: all.
        :param hold: keep an appointment even when messages were found; None: not even when there were none.
        :param max_deliveries: deliveries after which a crashing message is dead; 0 is never.
        :param suspects: take a message that has crashed a consumer before, alone; else pass its tenant over.
        """
        _check_chunk(settle)
        _check_chunk(finish)
        room = want if free is None else free
        keep = "-" if hold is None else int(hold)
        numbers = (lease_ms, min(want, MAX_CHUNK), room, keep, max_deliveries, int(suspects))
        tags = (len(settle), *_tags(settle), len(finish), *_tags(finish))
        return self._call("claim", (consumer, *numbers, *tags), read_claimed)

    def take(self, consumer: str, message_ids: Sequence[str], *, lease_ms: int) -> Call[list[ClaimedEntry]]:
        """Takes these, waiting or delayed, under a lease, to move them elsewhere; others are left out.

        Takes no token of a rate, so give back with ``release(mode="requeue")``.
        """
        _check_chunk(message_ids)
        return self._call("take", (consumer, lease_ms, len(message_ids), *message_ids), read_entries)

    def settle(self, consumer: str, tags: Sequence[tuple[str, str]]) -> Call[int]:
        """Never deliver these again; the slots stay taken. Returns the number of stale tags."""
        _check_chunk(tags)
        return self._call("settle", (consumer, len(tags), *_tags(tags)), int)

    def finish(self, consumer: str, tags: Sequence[tuple[str, str]]) -> Call[int]:
        """These are done with, settled or not: frees their slots. Returns the number of stale tags."""
        _check_chunk(tags)
        return self._call("finish", (consumer, len(tags), *_tags(tags)), int)

    def release(
        self,
        consumer: str,
        tags: Sequence[tuple[str, str]],
        *,
        mode: ReleaseMode,
        max_deliveries: int = 5,
        worker: str = "",
    ) -> Call[int]:
        """Gives messages back to their old place; settled ones are dropped. Returns the stale tags.

        :param mode: ``unstarted`` gives the rate token and the turn back, ``requeue`` neither, ``crashed``
            counts the delivery, gives the turn back when it is the first, and may make it a dead letter.
        :param worker: who gives up on it, for the dead letter.
        """
        _check_chunk(tags)
        args: tuple[Argument, ...] = (consumer, mode, max_deliveries, worker, len(tags), *_tags(tags))
        return self._call("release", args, int)

    def renew(
        self, consumer: str, *, lease_ms: int, limit: int = 100, max_deliveries: int = 5
    ) -> Call[Renewed]:
        """The heartbeat: renews the lease, takes back what lost consumers held, promotes, wakes, tidies."""
        return self._call("renew", (consumer, lease_ms, min(limit, MAX_CHUNK), max_deliveries), read_renewed)

    def resign(self, consumer: str, *, limit: int = MAX_CHUNK) -> Call[int]:
        """Releases what is held as unstarted and ends the lease. Returns how many are left: call again."""
        return self._call("resign", (consumer, min(limit, MAX_CHUNK)), int)

    def fence(self, token: int, *, limit: int = MAX_CHUNK, max_deliveries: int = 5) -> Call[Fenced]:
        """Nobody but ``<consumer>@<token>`` consumes from now on; takes back what others hold.

        To be called until ``remaining`` is 0; the same token may fence again.
        """
        return self._call("fence", (token, min(limit, MAX_CHUNK), max_deliveries), read_fenced)

    def nudge(self, consumer: str = "") -> Call[bool]:
        """Promotes what is due and wakes somebody if need be. Returns whether something may be served.

        :param consumer: who keeps no appointment from now on, so that somebody else does.
        """
        return self._call("nudge", (consumer,), read_flag)

    def set_quota(self, tenant: str, packed: bytes | None) -> Call[None]:
        """Gives a tenant its own quota, or with None takes it away; in force at once."""
        return self._call("quota", (quota_field(tenant), packed or b""), read_nothing)

    def set_shared_quota(self, field: Literal["default", "config"], packed: bytes | None) -> Call[None]:
        """Sets what holds for tenants without an own quota; :meth:`place` brings it to their backlog."""
        return self._call("quota", (field, packed or b""), read_nothing)

    def place(self, tenants: Sequence[str]) -> Call[None]:
        """Decides anew where each of these tenants belongs."""
        _check_chunk(tenants)
        return self._call("place", (len(tenants), *tenants), read_nothing)

    def cancel(
        self, task_ids: Sequence[str], *, reason: str = "cancelled", tombstone_ttl_ms: int = 10_800_000
    ) -> Call[list[Cancellation]]:
        """Turns waiting and delayed messages into discards; the others get a tombstone (0 ms: none)."""
        _check_chunk(task_ids, limit=MAX_CHUNK // 10)
        args: tuple[Argument, ...] = (reason, tombstone_ttl_ms, len(task_ids), *task_ids)
        return self._call("cancel", args, read_cancellations)

    def cancel_tenant(self, tenant: str, *, reason: str = "cancelled", limit: int = MAX_CHUNK) -> Call[Moved]:
        """Turns what waits for a tenant into discards; delayed messages are not looked at."""
        return self._call("cancel_tenant", (tenant, reason, min(limit, MAX_CHUNK)), read_moved)

    def purge(self, *, limit: int = MAX_CHUNK) -> Call[Purged]:
        """Removes what waits, is delayed or is to be discarded; what is held stays."""
        return self._call("purge", (min(limit, MAX_CHUNK),), read_purged)

    def dead_letter(
        self, consumer: str, tag: tuple[str, str], *, reason: str, worker: str, record: bytes = b""
    ) -> Call[Literal["dead", "stale", "no record"]]:
        """Finishes a message and keeps it as a dead letter.

        :param record: what to keep; default: the stored one. A settled message has none: ``no record`` is
            returned and nothing was changed.
        """
        return self._call("dead_letter", (consumer, *tag, reason, worker, record), read_dead_lettered)

    def replay(
        self, message_id: str, *, record: bytes = b"", head_start_us: int = STRICT_PRIORITY_US
    ) -> Call[str | None]:
        """Sends a dead letter again (``record``: edited). Returns its message id, or None: there is none."""
        return self._call("replay", (message_id, record, head_start_us), read_replayed)

    def forget_dead(self, message_ids: Sequence[str]) -> Call[int]:
        """Deletes dead letters. Returns how many there were."""
        _check_chunk(message_ids)
        return self._call("forget_dead", (len(message_ids), *message_ids), int)

    def evict(self, tenant: str, key: str) -> Call[str]:
        """Takes a dedup key from the message that has it. Returns its id, or ``""``."""
        return self._call("evict", (tenant, key), read_text)

    def explain_tenant(self, tenant: str) -> Call[dict[str, str]]:
        """Why a tenant is or is not served: see the contract of the script for the names."""
        return self._call("explain_tenant", (tenant,), read_pairs)

    def locate(self, task_id: str) -> Call[dict[str, str]]:
        """Where a task is: see the contract of the script for the names; empty when it is not here."""
        return self._call("locate", (task_id,), read_pairs)

    def _call(self, script: str, args: Iterable[Argument], parse: Callable[[Any], T]) -> Call[T]:
        return Call(self.scripts[script], (self.keys.state,), tuple(args), parse)


def _check_chunk(items: Sequence[object], limit: int = MAX_CHUNK) -> None:
    if len(items) > limit:
        raise ValueError(f"{len(items)} in one call are too many; send chunks of at most {limit}")


def _tags(tags: Sequence[tuple[str, str]]) -> list[Argument]:
    return list(chain.from_iterable(tags))
