"""Queues and their partitions: the calls that change or read one partition, each of them one Lua script.

A method of :class:`Partition` sends no command. It returns a :class:`~.script_calls.ScriptCall`, which the
caller runs or sends on a connection of its own. Times are those of the server. Durations are milliseconds or
microseconds, see the suffix of their names.

A *tag* names one delivery of a message: its claim number and its message id. A tag of an older claim is
*stale*: the script changes nothing for it, and counts it.

The functions that read replies take bytes or, from a client that decodes, str.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from celery_dq.errors import InvalidMessage
from celery_dq.keys import DEFAULT_QUOTA, PartitionKeys, quota_field
from celery_dq.scripts.loader import Argument, ScriptSet
from celery_dq.transport.partition_replies import (
    ClaimedEntry,
    ClaimReply,
    HeartbeatReply,
    OutgoingRecord,
    PurgeReply,
    PushReply,
    PushStatus,
    Reaped,
    ReleaseMode,
)
from celery_dq.transport.redis.store.full_server import read_together
from celery_dq.transport.redis.store.partition_map import MOVING, PartitionMap
from celery_dq.transport.redis.store.script_calls import ScriptCall

T = TypeVar("T")

#: Most messages, tags or tenants in one call; longer work is done in chunks.
MAX_CHUNK = 1000
#: Life of the keys of a partition that the map does not have any more, in milliseconds.
GONE_LIFE_MS = 24 * 3_600_000
#: Tenants of which one call finds the oldest waiting messages, so that Redis is busy for a few ms only.
TENANTS_PER_LOOK = 100
#: Tenants whose backlogs one call counts, about 1 ms of Redis.
TENANTS_PER_COUNT = 200

#: A head start that is longer than any wait and that a double still holds in whole microseconds.
STRICT_PRIORITY_US = 1_000_000_000_000_000


@dataclass(frozen=True)
class DepthCall:
    """Commands that count the waiting messages of one partition, all of the same moment.

    Messages in flight, delayed or cancelled do not count.
    """

    keys: PartitionKeys

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """The commands, whose answers :meth:`parse` takes."""
        keys = self.keys
        return (
            ("HLEN", keys.messages),
            ("ZCARD", keys.delayed),
            ("ZCARD", keys.discards),
            ("HGET", keys.state, "held"),
        )

    def parse(self, answers: Sequence[Any]) -> int:
        """Return the number from the answers to the commands."""
        stored, delayed, discards, held = (int(each or 0) for each in answers)
        return max(stored - delayed - discards - held, 0)

    def run(self, client: Any) -> int:
        """Send the commands on a client, and return the number."""
        return self.parse(read_together(client, self.commands))


class Partition:
    """The calls on one partition.

    Args:
        keys: the keys of the partition.
        scripts: the set of :func:`load_scripts`.
        homes: the map of the queue.
    """

    def __init__(self, keys: PartitionKeys, scripts: ScriptSet, homes: PartitionMap | None = None) -> None:
        self.keys = keys
        self.scripts = scripts
        self.homes = homes or PartitionMap()
        #: The key that each script gets, and from which it derives the others.
        self._state = (keys.state,)

    @property
    def name(self) -> str:
        """The name that ``-Q`` takes: ``push/3``, or that of the queue if it has one partition."""
        return f"{self.keys.queue}/{self.keys.partition}" if self.homes.total > 1 else self.keys.queue

    def declare_partitions(
        self, homes: PartitionMap, mode: Literal["declare", "restore", "follow"] = "declare"
    ) -> ScriptCall[Declared]:
        """Store the map of the queue where none is stored and the partition is bare.

        Args:
            homes: the wanted map.
            mode: ``declare`` stores nothing while a consumer lives. ``restore`` does, because this process
                has seen the map in the broker before. ``follow`` stores it unless a later one is stored: it
                is the map in partition 0, and this is another one. A partition that the map does not have
                any more refuses clients that know an earlier map for a day, and then has no keys.
        """
        life_ms = GONE_LIFE_MS if self.keys.partition >= homes.total else 0
        args = (str(homes), mode, homes.spreads_text, life_ms)
        return self._call("declare_partitions", args, partial(read_declared, self.keys.state))

    def push(
        self,
        messages: Sequence[OutgoingRecord],
        *,
        producer: str = "",
        marker_ttl_ms: int = 3_600_000,
        head_start_us: int = STRICT_PRIORITY_US,
        wall_us: int = 0,
        moving: bool = False,
    ) -> ScriptCall[list[PushReply]]:
        """Accept messages; with a ``producer``, a sequence that was accepted before changes nothing.

        Args:
            messages: at most :data:`MAX_CHUNK`.
            producer: the name of the producer that numbers them; ``""`` for none.
            marker_ttl_ms: how long the producer's last sequence is remembered.
            head_start_us: by how much each step of priority goes before its time.
            wall_us: the publisher's wall clock, for messages with a countdown.
            moving: whether the tenants of these messages move here; see :class:`PartitionMap`.
        """
        _check_chunk(messages)
        homes = self.homes.text + MOVING if moving else self.homes.text
        fixed = (producer, marker_ttl_ms, head_start_us, wall_us, homes, len(messages))
        return self._call("push", chain(fixed, *messages), partial(read_push_reply, messages=messages))

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
        discards: int | None = None,
        discard_rest_s: float = 0.0,
        settle: Sequence[tuple[str, str]] = (),
        finish: Sequence[tuple[str, str]] = (),
    ) -> ScriptCall[ClaimReply]:
        """Settle, finish, renew the lease, and claim messages.

        Args:
            consumer: the name of the consumer.
            lease_ms: how long the lease holds from now.
            want: most messages to claim.
            free: how many of them may belong to tenants with a concurrency limit; default: all.
            hold: plan the next look even when messages were found (True), only when none was (False), or
                never (None).
            max_deliveries: deliveries after which a crashing message is dead; 0 is never.
            suspects: claim a message that has crashed a consumer before, alone; else pass its tenant over.
            discards: how many discards to claim besides; default: as many as ``want``.
            discard_rest_s: when the claim takes discards, no other claim does so for that long.
            settle: tags to settle.
            finish: tags to finish.
        """
        room = want if free is None else free
        keep = "-" if hold is None else int(hold)
        besides = min(want if discards is None else discards, MAX_CHUNK)
        numbers = (lease_ms, min(want, MAX_CHUNK), room, keep, max_deliveries, int(suspects), besides)
        rest_us = int(discard_rest_s * 1e6)
        args = (consumer, *numbers, rest_us, *_acks(settle, finish))
        return self._call("claim", args, read_claim_reply)

    def take(
        self, consumer: str, message_ids: Sequence[str], *, lease_ms: int
    ) -> ScriptCall[list[ClaimedEntry]]:
        """Take these waiting or delayed messages under a lease, to move them; skip others.

        They take no permit of a rate limit, so release them with ``mode="requeue"``.
        """
        _check_chunk(message_ids)
        return self._call("take", (consumer, lease_ms, len(message_ids), *message_ids), read_entries)

    def ack(
        self,
        consumer: str,
        *,
        settle: Sequence[tuple[str, str]] = (),
        finish: Sequence[tuple[str, str]] = (),
    ) -> ScriptCall[int]:
        """Settle and finish deliveries. The reply counts stale tags.

        Args:
            consumer: the name of the consumer.
            settle: tags to settle: the deliveries are never repeated, and their slots stay taken.
            finish: tags to finish, settled or not: their slots become free.
        """
        return self._call("ack", (consumer, *_acks(settle, finish)), int)

    def release(
        self,
        consumer: str,
        tags: Sequence[tuple[str, str]],
        *,
        mode: ReleaseMode,
        max_deliveries: int = 5,
        worker: str = "",
    ) -> ScriptCall[int]:
        """Release messages to their old places; settled ones are dropped. The reply counts stale tags.

        Args:
            consumer: the name of the consumer.
            tags: the deliveries.
            mode: ``unstarted`` gives the permit and the turn back, ``requeue`` neither. ``crashed`` counts
                the delivery, gives the turn back when it is the first, and may make it a dead letter.
            max_deliveries: deliveries after which a crashing message is dead; 0 is never.
            worker: the worker that gives up on it, for the dead letter.
        """
        _check_chunk(tags)
        args: tuple[Argument, ...] = (
            consumer,
            mode,
            max_deliveries,
            worker,
            len(tags),
            *chain.from_iterable(tags),
        )
        return self._call("release", args, int)

    def requeue_and_pause(
        self,
        consumer: str,
        tag: tuple[str, str],
        *,
        record: bytes,
        for_us: int,
        cause: str = "",
        alone: bool = False,
    ) -> ScriptCall[int]:
        """Requeue the message of a throttled task to its old place, and pause its tenant in the same step.

        The reply counts stale tags. A pause that ends later, or never, stays.

        Args:
            consumer: the name of the consumer.
            tag: the delivery, which may be settled.
            record: the message as stored.
            for_us: after which time from now the pause ends; 0 is no pause.
            cause: why, as :class:`~celery_dq.transport.partition_replies.PauseCause` packs it.
            alone: the message itself waits until the end, and its tenant goes on. Otherwise the tenant, or
                the resource, that has taken the message is paused.
        """
        subject = "message" if alone else "tenant"
        args: tuple[Argument, ...] = (consumer, subject, record, for_us, cause, 1, *tag)
        return self._call("requeue_and_pause", args, int)

    def heartbeat(
        self,
        consumer: str,
        *,
        lease_ms: int,
        limit: int = 100,
        max_deliveries: int = 5,
        retention: tuple[int, int] = (0, 0),
    ) -> ScriptCall[HeartbeatReply]:
        """Send a heartbeat: renew the lease, reap messages of lost consumers, promote, wake, tidy.

        The `retention` is for how many ms a dead letter is kept, and how many of them are; 0 means no bound.
        """
        args = (consumer, lease_ms, min(limit, MAX_CHUNK), max_deliveries, *retention)
        return self._call("heartbeat", args, read_heartbeat_reply)

    def resign(self, consumer: str, *, limit: int = MAX_CHUNK) -> ScriptCall[int]:
        """Release all messages as unstarted and end the lease. The reply counts those left: call again."""
        return self._call("resign", (consumer, min(limit, MAX_CHUNK)), int)

    def fence(self, token: int, *, limit: int = MAX_CHUNK, max_deliveries: int = 5) -> ScriptCall[FenceReply]:
        """Let only ``<consumer>@<token>`` consume from now on; release the messages of others.

        Call it until ``remaining`` is 0; the same token may fence again. Token 0 ends the fence, so that
        ordinary consumers may consume; it is refused while a leader lives.
        """
        return self._call("fence", (token, min(limit, MAX_CHUNK), max_deliveries), read_fence_reply)

    def hand_over_wakeup(self, consumer: str = "") -> ScriptCall[bool]:
        """Promote messages that are due, and wake a consumer if there is work.

        Args:
            consumer: gives up the look that it has planned, so that another consumer plans it.

        Returns:
            A call whose reply says whether a message may be served now.
        """
        return self._call("hand_over_wakeup", (consumer,), read_flag)

    def set_quota(self, tenant: str, packed: bytes | None, *, by: str = "") -> ScriptCall[bool]:
        """Set the quota of a tenant in the name of a user, or with None delete it; in force at once.

        The reply is False when the partition has another map than :attr:`homes`, and nothing was changed.
        """
        return self._call("quota", (quota_field(tenant), packed or b"", by, str(self.homes), b""), read_flag)

    def divide_quota(self, tenant: str, before: bytes, packed: bytes) -> ScriptCall[bool]:
        """Store another part of the quota of a spread tenant, unless another quota than `before` is stored.

        The reply is False when nothing was changed, as also with another map than :attr:`homes`.
        """
        return self._call("quota", (quota_field(tenant), packed, "", str(self.homes), before), read_flag)

    def set_default_quota(self, packed: bytes | None, *, by: str = "") -> ScriptCall[bool]:
        """Set the quota of tenants without their own; :meth:`place_held_back` applies it to their backlog.

        The reply is that of :meth:`set_quota`.
        """
        return self._call("quota", (DEFAULT_QUOTA, packed or b"", by, str(self.homes), b""), read_flag)

    def bring_settings_quota(
        self, packed: bytes | None, *, by: str, memory_ms: int, force: bool = False
    ) -> ScriptCall[Brought]:
        """Apply the quota of a worker's settings; :meth:`place_held_back` applies it to the backlog.

        Args:
            packed: the quota; None when the settings have none.
            by: the name of the worker.
            memory_ms: for how long a replaced quota counts as one of older settings, which is refused.
            force: apply it even then.
        """
        args = (packed or b"", by, memory_ms, int(force), str(self.homes))
        return self._call("settings_quota", args, read_brought)

    def pause(
        self, tenant: str | None, *, until_us: int = 0, for_us: int = 0
    ) -> ScriptCall[PauseReply | NotPaused]:
        """Start no message of a tenant, or with None of the queue, until its end or :meth:`resume`.

        Args:
            tenant: the tenant; None pauses the whole queue.
            until_us: when the pause ends, by the clock of the server; 0 is never.
            for_us: after which time it ends, instead of ``until_us``; 0 is never.

        Returns:
            A call whose reply is ``over`` or ``moved`` when nothing was changed; see :data:`NotPaused`.
        """
        args = (*_paused(tenant), 1, until_us, for_us, str(self.homes), "")
        return self._call("pause", args, read_pause_reply)

    def extend_pause(self, tenant: str, *, for_us: int, cause: str) -> ScriptCall[PauseReply | NotPaused]:
        """Pause a tenant as :meth:`pause`, with a cause, unless a pause of it ends later or never."""
        args = (*_paused(tenant), "extend", 0, for_us, str(self.homes), cause)
        return self._call("pause", args, read_pause_reply)

    def resume(self, tenant: str | None) -> ScriptCall[PauseReply | NotPaused]:
        """Undo :meth:`pause`. The reply says whether the tenant, or with None the queue, was paused."""
        return self._call("pause", (*_paused(tenant), 0, 0, 0, str(self.homes), ""), read_pause_reply)

    def place_held_back(
        self, tenants: Sequence[str] = (), *, place: str = "", cursor: str = "0", most: int = MAX_CHUNK
    ) -> ScriptCall[str]:
        """Place these tenants again, or *most* that are ``throttled``, ``at_concurrency`` or ``paused``.

        The reply is the *cursor* of the next call; ``0`` after the last one.
        """
        _check_chunk(tenants)
        return self._call("place_held_back", (place, cursor, min(most, MAX_CHUNK), *tenants), read_text)

    def cancel(
        self, task_ids: Sequence[str], *, reason: str = "cancelled", tombstone_ttl_ms: int = 10_800_000
    ) -> ScriptCall[list[Cancellation]]:
        """Turn waiting and delayed messages into discards; other tasks get a tombstone (0 ms: none)."""
        _check_chunk(task_ids, limit=MAX_CHUNK // 10)
        args: tuple[Argument, ...] = (reason, tombstone_ttl_ms, len(task_ids), *task_ids)
        return self._call("cancel", args, read_cancellations)

    def cancel_tenant(
        self, tenant: str, *, reason: str = "cancelled", limit: int = MAX_CHUNK
    ) -> ScriptCall[MoveReply]:
        """Turn the next 200 waiting messages of a tenant, or fewer, into discards; delayed messages stay."""
        return self._call("cancel_tenant", (tenant, reason, min(limit, MAX_CHUNK)), read_move_reply)

    def edit(
        self,
        task_id: str,
        *,
        due_us: int | None = None,
        for_us: int | None = None,
        priority: int | None = None,
    ) -> ScriptCall[Edited]:
        """Change the due time (``due_us``, or ``for_us`` from now) or priority of a message that waits."""
        given = ("" if each is None else each for each in (due_us, for_us, priority))
        return self._call("edit", (task_id, *given, "", ""), read_edited)

    def edit_record(self, task_id: str, before: bytes, record: bytes) -> ScriptCall[Edited]:
        """Replace the record of a message that waits and still has the record `before`."""
        return self._call("edit", (task_id, "", "", "", record, before), read_edited)

    def purge(self, *, limit: int = MAX_CHUNK) -> ScriptCall[PurgeReply]:
        """Remove waiting and delayed messages and discards; in-flight messages stay."""
        return self._call("purge", (min(limit, MAX_CHUNK),), read_purge_reply)

    def depth(self) -> DepthCall:
        """Count the waiting messages, without those in flight, delayed or cancelled."""
        return DepthCall(self.keys)

    def dead_letter(
        self, consumer: str, tag: tuple[str, str], *, reason: str, worker: str, record: bytes = b""
    ) -> ScriptCall[Literal["dead", "stale", "no record"]]:
        """Finish a message and keep it as a dead letter.

        Args:
            consumer: the name of the consumer.
            tag: the delivery.
            reason: why, a word or a short sentence.
            worker: the worker that gives up on it.
            record: the record to keep; default: the stored one. A settled message has none: the reply is
                ``no record``, and nothing was changed.
        """
        return self._call("dead_letter", (consumer, *tag, reason, worker, record), read_dead_lettered)

    def replay(
        self,
        message_id: str,
        *,
        record: bytes = b"",
        head_start_us: int = STRICT_PRIORITY_US,
        consumer: str = "",
        lease_ms: int = 0,
    ) -> ScriptCall[str | None]:
        """Send a dead letter again, with an edited ``record`` if given. The reply is its id, None without.

        With a ``consumer``, that one takes the message under a lease, as by :meth:`take`.
        """
        args = (message_id, record, head_start_us, consumer, lease_ms)
        return self._call("replay", args, read_replayed)

    def forget_dead(self, message_ids: Sequence[str]) -> ScriptCall[int]:
        """Delete dead letters, except those that move. The reply counts them."""
        _check_chunk(message_ids)
        return self._call("forget_dead", (len(message_ids), *message_ids), int)

    def recover(self, message_ids: Sequence[str], dry_run: bool = False) -> ScriptCall[int]:
        """Make dead letters of those of these messages that nothing names any more. The reply counts them."""
        _check_chunk(message_ids)
        return self._call("recover", (int(dry_run), len(message_ids), *message_ids), int)

    def evict(self, tenant: str, key: str) -> ScriptCall[str]:
        """Take a dedup lock from the message that has it. The reply is its id, or ``""``."""
        return self._call("evict", (tenant, key), read_text)

    def explain_tenant(self, tenant: str) -> ScriptCall[dict[str, str]]:
        """Explain why a tenant is or is not served: see the contract of the script for the names."""
        return self._call("explain_tenant", (tenant,), read_pairs)

    def oldest_waiting(
        self, tenants: Sequence[str] = (), *, place: str = "", first: int = 0, most: int = TENANTS_PER_LOOK
    ) -> ScriptCall[list[float | None]]:
        """Find for how many seconds the oldest waiting message of each tenant has waited; None without one.

        Args:
            tenants: the tenants, unless a place is given.
            place: ``turn``, ``resource_sets``, ``throttled``, ``at_concurrency`` or ``paused``: the tenants
                there.
            first: their first rank there.
            most: their number, up to :data:`TENANTS_PER_LOOK`.
        """
        _check_chunk(tenants, limit=TENANTS_PER_LOOK)
        most = min(most, TENANTS_PER_LOOK)
        return self._call("oldest_waiting", (place, first, most, *tenants), read_waits)

    def backlogs(
        self, place: str, first: int, largest: int = 0, *, most: int = TENANTS_PER_COUNT
    ) -> ScriptCall[BacklogsReply]:
        """Count the backlogs of tenants of a place.

        Args:
            place: ``turn``, ``resource_sets``, ``throttled``, ``at_concurrency`` or ``paused``.
            first: rank of the first tenant there.
            largest: number of tenants with the largest backlogs to name.
            most: number of tenants, up to :data:`TENANTS_PER_COUNT`.
        """
        args = (place, first, min(most, TENANTS_PER_COUNT), largest)
        return self._call("backlogs", args, BacklogsReply.read)

    def locate(self, task_id: str) -> ScriptCall[dict[str, str]]:
        """Find the state of a task, by the names in the contract of the script; empty when it is not here."""
        return self._call("locate", (task_id,), read_pairs)

    def _call(self, script: str, args: Iterable[Argument], parse: Callable[[Any], T]) -> ScriptCall[T]:
        return ScriptCall(self.scripts[script], self._state, tuple(args), parse)


def _paused(tenant: str | None) -> tuple[str, str]:
    """Return the first arguments of the script ``pause``."""
    return ("queue", "") if tenant is None else ("tenant", tenant)


def _check_chunk(items: Sequence[object], limit: int = MAX_CHUNK) -> None:
    if len(items) > limit:
        raise ValueError(f"{len(items)} in one call are too many; send chunks of at most {limit}")


def _acks(settle: Sequence[tuple[str, str]], finish: Sequence[tuple[str, str]]) -> list[Argument]:
    words: list[Argument] = []
    for tags in (settle, finish):
        if tags:
            _check_chunk(tags)
        words += (len(tags), *chain.from_iterable(tags))
    return words


Edited: TypeAlias = Literal["waiting", "delayed", "blocked", "other", "expires", "none"]
Cancellation: TypeAlias = Literal["waiting", "delayed", "claimed", "discarded", "tombstone", "none"]


class Brought(NamedTuple):
    """The answer to the quota of a worker's settings, and the quota before.

    Attributes:
        status: ``set``, ``same`` (it was in force), ``older`` (it was replaced a short while ago, so
            nothing was changed) or ``moved`` (the partition has another map, so nothing was changed).
        before: the packed quota that was in force before; None without one.
        by: the worker that had applied that one.
        at_us: when, in µs.
    """

    status: Literal["set", "same", "older", "moved"]
    before: bytes | None
    by: str
    at_us: int


class Declared(NamedTuple):
    """The map of a queue, and whether the call has stored it."""

    homes: PartitionMap
    is_new: bool


class PauseReply(NamedTuple):
    """The pause of a tenant or a queue after a call.

    Attributes:
        changed: a pause has begun, changed its end, or ended.
        since_us: when it began, µs; 0 when there is none.
        until_us: when it ends by itself, µs; 0 for never.
    """

    changed: bool
    since_us: int
    until_us: int


#: Why nothing was changed: the end of the pause is over, or the partition has another map than the caller.
NotPaused: TypeAlias = Literal["over", "moved"]


class MoveReply(NamedTuple):
    """The number of messages that a chunk moved or removed, and of those left for the next chunk."""

    moved: int
    remaining: int


def read_text(reply: Any) -> str:
    """Return a string of a reply."""
    return reply.decode("utf-8", "surrogateescape") if isinstance(reply, bytes) else str(reply)


def read_binary(reply: Any) -> bytes:
    """Return the bytes of a reply."""
    return reply if isinstance(reply, bytes) else str(reply).encode("utf-8", "surrogateescape")


def read_flag(reply: Any) -> bool:
    """Return whether the reply is 1."""
    return int(reply) == 1


_PUSH_STATUS: tuple[PushStatus, ...] = get_args(PushStatus)


def read_push_reply(reply: Any, messages: Sequence[OutgoingRecord]) -> list[PushReply]:
    """Return the verdict on each of these messages, which were pushed."""
    if type(reply) is int:  # each was accepted under its task id
        return [PushReply("accepted", read_text(task_id)) for _, task_id, _ in messages]
    return [_read_verdict(read_text(each)) for each in reply]


def _read_verdict(text: str) -> PushReply:
    status = _PUSH_STATUS[int(text[0])]
    message_id, covering, replaced = (*text[1:].split("\0"), "", "")[:3]
    if status == "full":
        return PushReply(status, message_id, bound=int(covering), waits=replaced == "wait")
    return PushReply(status, message_id, covering, replaced)


def read_claim_reply(reply: Any) -> ClaimReply:
    """Return the answer to a claim."""
    more, appointment, stale, mark, lost = map(int, reply[:5])
    delay = None if appointment < 0 else appointment / 1e6
    entries, lost_up_to = read_entries(reply[5:]), None if lost < 0 else lost
    return ClaimReply(more == 1, delay, stale, mark == 1, entries, mark == 2, lost_up_to, mark > 0, mark == 4)


def read_entries(reply: Any) -> list[ClaimedEntry]:
    """Return the messages of a claim: three strings each."""
    entries = []
    for position in range(0, len(reply), 3):
        claim, deliveries, reason = read_text(reply[position + 1]).split("|", 2)
        record = read_binary(reply[position + 2])
        crashes, returned, resource = int(deliveries or 0), deliveries != "", ""
        if reason.startswith("|"):
            reason, resource = "", reason[1:]
        entries.append(
            ClaimedEntry(read_text(reply[position]), claim, crashes, reason, record, returned, resource)
        )
    return entries


def read_heartbeat_reply(reply: Any) -> HeartbeatReply:
    """Return the answer to a heartbeat."""
    alive = int(reply[0])
    next_end_s = math.inf if reply[3] in (b"-", "-") else int(reply[3]) / 1e6
    texts = [read_text(each) for each in reply[6:]]
    lost = tuple(map(Reaped, texts[::3], texts[1::3], [each == "1" for each in texts[2::3]]))
    homes = read_text(reply[4])
    return HeartbeatReply(
        alive == 1, int(reply[1]), alive < 0, int(reply[2]), next_end_s, homes, lost, int(reply[5])
    )


def read_cancellations(reply: Any) -> list[Cancellation]:
    """Return the answer for each task of a cancellation."""
    return [cast(Cancellation, read_text(each)) for each in reply]


def read_edited(reply: Any) -> Edited:
    """Return the state of an edited message."""
    return cast(Edited, read_text(reply))


def read_brought(reply: Any) -> Brought:
    """Return the answer to the quota of a worker's settings."""
    status = cast(Literal["set", "same", "older", "moved"], read_text(reply[0]))
    return Brought(status, read_binary(reply[1]) or None, read_text(reply[2]), int(reply[3]))


def read_pause_reply(reply: Any) -> PauseReply | NotPaused:
    """Return the pause, or why nothing was changed."""
    changed, since_us, until_us = map(int, reply)
    if changed < 0:
        return "over" if changed == -1 else "moved"
    return PauseReply(changed == 1, since_us, until_us)


def read_move_reply(reply: Any) -> MoveReply:
    """Return the answer of a script that moves a chunk."""
    return MoveReply(int(reply[0]), int(reply[1]))


def read_purge_reply(reply: Any) -> PurgeReply:
    """Return the answer of a script that removes a chunk."""
    return PurgeReply(int(reply[0]), int(reply[1]) == 1)


def read_declared(key: str, reply: Any) -> Declared:
    """Return the map that a partition has stored in this key."""
    stored, is_new, spreads = reply
    return Declared(PartitionMap.parse(read_text(stored), read_text(spreads), key), int(is_new) == 1)


def read_dead_lettered(reply: Any) -> Literal["dead", "stale", "no record"]:
    """Return whether a dead letter was made."""
    code = int(reply)
    return "dead" if code == 1 else "stale" if code == 0 else "no record"


def read_replayed(reply: Any) -> str | None:
    """Return the message id of a dead letter that was sent again, or None."""
    text = read_text(reply)
    return text[1:] if text[0] == "1" else None


def read_waits(reply: Any) -> list[float | None]:
    """Return waiting times in seconds; None where no message waits."""
    return [None if wait < 0 else wait / 1e6 for wait in map(int, reply)]


class BacklogsReply(NamedTuple):
    """The answer of the script ``backlogs``.

    Attributes:
        size: number of tenants of the place.
        tenants: how many of them this answer counts.
        runnable: number of their messages that may start now.
        largest: the tenants with the largest backlogs, each with its number of waiting messages.
    """

    size: int
    tenants: int
    runnable: int
    largest: tuple[tuple[str, int], ...]

    @classmethod
    def read(cls, reply: Any) -> BacklogsReply:
        """Return the answer in the form of this class."""
        size, tenants, runnable, *largest = reply
        # A name that is not UTF-8 is shown, and is not a name of a tenant that other calls find.
        names = [each.decode("utf-8", "backslashreplace") for each in largest[::2]]
        return cls(
            int(size), int(tenants), int(runnable), tuple(zip(names, map(int, largest[1::2]), strict=True))
        )


def read_pairs(reply: Any) -> dict[str, str]:
    """Return alternating names and values as a dict."""
    texts = [read_text(each) for each in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


class FenceReply(NamedTuple):
    """The answer of the script ``fence``.

    Attributes:
        accepted: the partition has not seen a higher fencing token before; with token 0, no leader lives.
        epoch: the fencing token that holds now.
        remaining: number of other consumers that still have messages in flight: call again.
    """

    accepted: bool
    epoch: int
    remaining: int


def read_fence_reply(reply: Any) -> FenceReply:
    """Parse the reply of ``fence``."""
    return FenceReply(int(reply[0]) == 1, int(reply[1]), int(reply[2]))


#: The end of a consumer's name after its process: a fencing token, and the mark of a lost one.
_PART = re.compile(r"(@\d+)?(~lost~\d+)?\Z")


def process_of(consumer: str) -> str:
    """Return the process of a consumer by the name that :meth:`Queue.consumer` has made."""
    return _PART.sub("", consumer, count=1)


@dataclass(frozen=True)
class Queue:
    """One partition of a consumed or published queue. Most queues have one partition.

    Attributes:
        name: the name that ``-Q`` and kombu use for the whole queue.
        partition: the partition with its messages.
        max_deliveries: deliveries with a crash after which a message is a dead letter; 0 = never.
        head_start_us: µs by which one step of priority goes before its time.
        retention: for how many ms a dead letter is kept, and how many dead letters are; 0 means no bound.
        token: fencing token of the term in which this process leads the queue; 0 without a leader.
    """

    name: str
    partition: Partition
    max_deliveries: int = 5
    head_start_us: int = STRICT_PRIORITY_US
    retention: tuple[int, int] = (0, 0)
    token: int = 0

    @cached_property
    def prefix(self) -> str:
        """Prefix of the keys, which stays when the number of partitions or the leader changes."""
        return self.partition.keys.prefix

    @cached_property
    def key(self) -> str:
        """Name of the partition in this process: the prefix of its keys, and the fencing token if any."""
        return f"{self.prefix}@{self.token}" if self.token else self.prefix

    @property
    def partition_name(self) -> str:
        """The name under which a worker consumes this partition alone: ``push/3``; ``push`` if it is all."""
        return self.partition.name

    def consumer(self, process: str) -> str:
        """Return the name under which *process* consumes; the scripts read the fencing token from it."""
        return f"{process}@{self.token}" if self.token else process


class PartitionedQueue:
    """A queue with all of its partitions, or one partition that a worker consumes alone.

    Args:
        name: The name that ``-Q`` and kombu use.
        partitions: The partitions, in the order of their numbers, during a change also those that go; of a
            pinned one, that one.

    Attributes:
        name: As above.
        partitions: As above.
        whole_name: The name of the whole queue.
        homes: The map of the whole queue.
        count: Number of partitions that the whole queue has or gets.
        is_pinned: Whether this is one partition of several, named as ``push/3``.
    """

    def __init__(self, name: str, partitions: Sequence[Queue]) -> None:
        self.name = name
        self.partitions = tuple(partitions)
        self.whole_name = self.partitions[0].name
        self.homes = self.partitions[0].partition.homes
        self.count = self.homes.count
        self.is_pinned = len(self.partitions) < self.homes.total

    def part_of(self, whole: PartitionedQueue) -> PartitionedQueue | None:
        """Return the same part of the queue as it is now; None for one partition that has gone.

        Args:
            whole: The whole queue with its present partitions.
        """
        if not self.is_pinned:
            return whole
        number = self.partitions[0].partition.keys.partition
        # Where a queue has one partition, push/0 is the name of another queue.
        if not number < whole.homes.total > 1:
            return None
        return PartitionedQueue(self.name, [whole.partitions[number]])

    def home(self, tenant: str) -> Queue:
        """Return the partition in which *tenant* lives; of a spread tenant, that of its first share.

        Raises:
            InvalidMessage: As for :meth:`route`.
        """
        self._require_all()
        return self.partitions[self.homes.home(tenant)]

    def route(self, record: bytes, task_id: str | bytes) -> tuple[Queue, bool]:
        """Return the partition for a message, and whether its tenant waits there: `PartitionMap.route`.

        The task ids of buffered messages are encoded.

        Raises:
            InvalidMessage: This is one partition of a queue; a message has its place by its tenant.
            InvalidTenant: The tenant is a set of resources, and the queue has several partitions.
        """
        self._require_all()
        number, moving = self.homes.route(self.name, record, read_text(task_id))
        return self.partitions[number], moving

    def _require_all(self) -> None:
        if self.is_pinned:
            raise InvalidMessage(
                f"queue = {self.name!r} is one partition of queue {self.whole_name!r}, and the tenant of a "
                f"message decides its partition: send it to {self.whole_name!r}"
            )
