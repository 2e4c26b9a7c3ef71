"""The calls that change or read one partition of a queue, each of them one Lua script.

A method sends no command. It returns a :class:`~.script_calls.ScriptCall`, which the caller runs or sends on
a connection of its own. Times are those of the server. Durations are milliseconds or microseconds, see the
suffix of their names.

A *tag* names one delivery of a message: its claim number and its message id. A tag of an older claim is
*stale*: the script changes nothing for it, and counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

from celery_dq.keys import DEFAULT_QUOTA, PartitionKeys, quota_field
from celery_dq.scripts.loader import Argument, ScriptSet
from celery_dq.transport.partition_replies import (
    ClaimedEntry,
    ClaimReply,
    HeartbeatReply,
    OutgoingRecord,
    PurgeReply,
    PushReply,
    ReleaseMode,
)
from celery_dq.transport.redis.store.full_server import read_together
from celery_dq.transport.redis.store.partition_map import MOVING, PartitionMap
from celery_dq.transport.redis.store.replies import (
    BacklogsReply,
    Brought,
    Cancellation,
    Declared,
    Edited,
    FenceReply,
    MoveReply,
    NotPaused,
    PauseReply,
    read_brought,
    read_cancellations,
    read_claim_reply,
    read_dead_lettered,
    read_declared,
    read_edited,
    read_entries,
    read_fence_reply,
    read_flag,
    read_heartbeat_reply,
    read_move_reply,
    read_pairs,
    read_pause_reply,
    read_purge_reply,
    read_push_reply,
    read_replayed,
    read_text,
    read_waits,
)
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
        return self._call("declare_partitions", args, read_declared)

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
        return self._call("quota", (quota_field(tenant), packed or b"", by, str(self.homes)), read_flag)

    def set_default_quota(self, packed: bytes | None, *, by: str = "") -> ScriptCall[bool]:
        """Set the quota of tenants without their own; :meth:`place_held_back` applies it to their backlog.

        The reply is that of :meth:`set_quota`.
        """
        return self._call("quota", (DEFAULT_QUOTA, packed or b"", by, str(self.homes)), read_flag)

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
        return self._call("pause", (*_paused(tenant), 1, until_us, for_us, str(self.homes)), read_pause_reply)

    def resume(self, tenant: str | None) -> ScriptCall[PauseReply | NotPaused]:
        """Undo :meth:`pause`. The reply says whether the tenant, or with None the queue, was paused."""
        return self._call("pause", (*_paused(tenant), 0, 0, 0, str(self.homes)), read_pause_reply)

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
        self, message_id: str, *, record: bytes = b"", head_start_us: int = STRICT_PRIORITY_US
    ) -> ScriptCall[str | None]:
        """Send a dead letter again, with an edited ``record`` if given. The reply is its id, None without."""
        return self._call("replay", (message_id, record, head_start_us), read_replayed)

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
