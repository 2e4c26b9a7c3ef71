"""Explanations why a message or a tenant waits, and until when."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeAlias

from celery_dq.errors import CorruptRecord
from celery_dq.inspector.dedup_locks import dedup_lock_of
from celery_dq.inspector.messages import MessageSnapshot
from celery_dq.inspector.queues import fencing_token, is_worker, queue_pause
from celery_dq.inspector.redis_values import Client, server_time_us, text
from celery_dq.inspector.tenants import TenantSnapshot, stored_quota, tenant_snapshot, total_of
from celery_dq.options.quota import WhenFull, count_of_share
from celery_dq.protocols import INHERITED_HEADER
from celery_dq.shown import shell_word
from celery_dq.transport import envelope
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import PauseCause
from celery_dq.transport.redis.store.cluster_client import node_serving
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.resource_set import resources_of

_Why: TypeAlias = "tuple[str, str, datetime | None]"
#: Partitions of a spread tenant that an explanation names for each reason.
MOST_NAMED = 5


@dataclass(frozen=True)
class Explanation:
    """Why a message or a tenant waits.

    Attributes:
        queue: Name of the queue.
        state: State of the tenant or of the message, see their snapshots.
        reason: One word for programs: ``turn``, ``no-worker``, ``no-leader``, ``rate``, ``concurrency``,
            ``paused``, ``moving``, ``resources``, ``empty``, ``eta``, ``behind``, ``dedup``, ``running``,
            ``cancelled``, ``dead``, ``unknown``.
        sentence: The explanation as text.
        tenant: Name of the tenant.
        task_id: Id of the task; "" for a tenant.
        until: When the wait ends by itself; None when it depends on other events.
        partition: Number of the partition.
        slot: Hash slot of the partition on a Redis Cluster; None elsewhere.
        node: The master that serves the slot, as ``host:port``; "" without a slot.
    """

    queue: str
    state: str
    reason: str
    sentence: str
    tenant: str = ""
    task_id: str = ""
    until: datetime | None = None
    partition: int = 0
    slot: int | None = None
    node: str = ""

    def __str__(self) -> str:
        return self.sentence


def explain_tenant(partitions: Sequence[Partition], client: Client, tenant: str) -> Explanation:
    """Explain why a tenant's messages wait, and mention the discards that workers have still to record.

    Args:
        partitions: The partitions in which the tenant lives.
        client: A redis client.
        tenant: The tenant.
    """
    if len(partitions) == 1:
        found = _placed(_standing(partitions[0], client, tenant), partitions[0], client)
    else:
        found = _spread(partitions, client, tenant)
    discards = sum(int(client.zcard(each.keys.discards)) for each in partitions)
    if not discards:
        return found
    besides = (
        f" Workers have still to record {_count(discards, 'message')} of {found.queue!r} that will not run "
        "(cancelled, expired or dead), which delays no tenant."
    )
    return replace(found, sentence=found.sentence + besides)


def _standing(partition: Partition, client: Client, tenant: str) -> Explanation:
    found = tenant_snapshot(partition, client, tenant)
    reason, why, until = _reason(found, partition, client)
    waiting = _count(found.waiting, "message")
    if full := _full(found, partition):
        why = f"{why}; {full}"
    sentence = f"Tenant {tenant!r} has {waiting} waiting in {partition.name!r}: {why}."
    return Explanation(partition.keys.queue, found.state, reason, sentence, tenant=tenant, until=until)


def _full(tenant: TenantSnapshot, partition: Partition) -> str:
    """Say what happens to new calls when as many messages wait as may; "" when there is room."""
    bound = _share(tenant.quota.max_waiting, tenant, partition)
    if bound is None or tenant.waiting < bound:
        return ""
    most = "share of max_waiting" if tenant.quota.spread > 1 else f"max_waiting of {bound:,}"
    return f"at least as many wait as its {most} allows, so {_WHEN_FULL[tenant.quota.when_full]}"


def _share(count: int | None, tenant: TenantSnapshot, partition: Partition) -> int | None:
    homes = partition.homes
    share = homes.shares_by_partition(tenant.tenant).get(partition.keys.partition, 0)
    return count_of_share(count, share, homes.widest(tenant.tenant))


_WHEN_FULL: dict[WhenFull, str] = {
    "refuse": "new calls are refused",
    "wait": "new calls wait for room",
    "discard": "each new call discards the first message",
    "dead_letter": "each new call makes the first message a dead letter",
}


def _spread(partitions: Sequence[Partition], client: Client, tenant: str) -> Explanation:
    """Explain a spread tenant by its partitions, those with one reason together."""
    shares = [(each, tenant_snapshot(each, client, tenant)) for each in partitions]
    total = total_of([found for _, found in shares])
    busy = [(each, found) for each, found in shares if found.state != "idle"] or shares[:1]
    reasons = [(each, *_reason(found, each, client)) for each, found in busy]
    queue = partitions[0].keys.queue
    parts = _by_reason([(each.name, reason, why) for each, reason, why, _ in reasons])
    full = [(each.name, "full", _full(found, each)) for each, found in shares]
    parts += _by_reason([share for share in full if share[2]])
    partition, reason, _, until = min(
        reasons, key=lambda each: math.inf if each[3] is None else each[3].timestamp()
    )
    sentence = (
        f"Tenant {tenant!r} lives in {len(partitions)} partitions of {queue!r} and has "
        f"{_count(total.waiting, 'message')} waiting; {'; '.join(parts)}."
    )
    explained = Explanation(queue, total.state, reason, sentence, tenant=tenant, until=until)
    return replace(explained, partition=partition.keys.partition)


def _by_reason(shares: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a text for each reason, with some of its partitions and its first explanation.

    Args:
        shares: Per share the name of its partition, the reason, and the explanation.
    """
    parts = []
    for reason in dict.fromkeys(reason for _, reason, _ in shares):
        same = [(name, why) for name, other, why in shares if other == reason]
        names = ", ".join(name for name, _ in same[:MOST_NAMED])
        others = f" and {len(same) - MOST_NAMED} more" if len(same) > MOST_NAMED else ""
        parts.append(f"in {names}{others}: {same[0][1]}")
    return parts


def _reason(found: TenantSnapshot, partition: Partition, client: Client) -> _Why:
    pauses = [] if found.state == "idle" else _pauses(found, partition, client)
    if pauses:
        return max(pauses, key=_end_of_pause)
    return _TENANT[found.state](found, partition, client)


def explain_message(partition: Partition, client: Client, message: MessageSnapshot) -> Explanation:
    """Explain why a message has not run yet."""
    reason, why, until = _message(partition, client, message)
    what = f"Task {message.task_id}" + (f" ({message.task})" if message.task else "")
    inherited = (
        " Its tenant is that of the task that called it." if _inherits(partition, client, message) else ""
    )
    sentence = f"{what} in {partition.name!r} {why}.{inherited}"
    queue, state, tenant = message.queue, message.state, message.tenant
    found = Explanation(queue, state, reason, sentence, tenant, message.task_id, until)
    return _placed(found, partition, client)


def _inherits(partition: Partition, client: Client, message: MessageSnapshot) -> bool:
    """Whether the message has the tenant of its caller; False without a record that can be read."""
    raw = client.hget(partition.keys.messages, message.id) if message.tenant else None
    try:
        headers = envelope.unpack(MessageRecord.unpack(raw).envelope)[0] if raw else {}
    except CorruptRecord:
        return False
    return bool(headers.get(INHERITED_HEADER))


def _placed(found: Explanation, partition: Partition, client: Client) -> Explanation:
    """Add the place of the partition."""
    keys = partition.keys
    if not keys.on_cluster:
        return replace(found, partition=keys.partition)
    node = node_serving(client, keys.slot)
    where = f" Partition {keys.partition} is slot {keys.slot} on {node or 'no node'}."
    return replace(
        found, sentence=found.sentence + where, partition=keys.partition, slot=keys.slot, node=node
    )


def explain_state(message: MessageSnapshot) -> Explanation:
    """Explain a message by its state only, for a broker that knows no more of it."""
    sentence = f"Task {message.task_id} in {message.queue!r} is {message.state}."
    until = message.due if message.state == "delayed" else None
    return Explanation(message.queue, message.state, message.state, sentence, "", message.task_id, until)


def explain_unknown(task_id: str, queues: list[str]) -> Explanation:
    """Explain a task that is in no queue."""
    looked = ", ".join(map(repr, queues)) or "no queues"
    task = task_id_of(task_id)
    hint = "" if task == task_id else f" If this is the id of a message, its task is {task}."
    return Explanation(
        "",
        "unknown",
        "unknown",
        f"Task {task_id} is in none of {looked}: it has finished, was purged, or was never published.{hint}",
        task_id=task_id,
    )


def explain_cancelled(task_id: str) -> Explanation:
    """Explain a task of which there are tombstones only."""
    sentence = f"Task {task_id} was cancelled and is in no queue; if it is published, it will not run."
    return Explanation("", "cancelled", "cancelled", sentence, task_id=task_id)


def _eligible(tenant: TenantSnapshot, partition: Partition, client: Client) -> _Why:
    keys = partition.keys
    now = server_time_us(client)
    if not any(is_worker(text(name)) for name in client.zrangebyscore(keys.leases, now, "+inf")):
        which = f"-Q {keys.queue}" + (f" or -Q {partition.name}" if partition.homes.total > 1 else "")
        if fencing_token(partition, client):
            former = f"make it an ordinary queue with: celery dq leaders {shell_word(keys.queue)} --forget"
            return (
                "no-leader",
                f"no worker leads this singleton queue; start one with {which}, or {former}",
                None,
            )
        return "no-worker", f"no worker consumes {partition.name!r}; start one with {which}", None
    before = int(client.zrank(keys.turn, tenant.tenant) or 0)
    turn = f"after {_count(before, 'other tenant')}" if before else "next"
    return "turn", f"it may be served now, its turn is {turn}; the workers are busy or about to take it", None


def _throttled(tenant: TenantSnapshot, partition: Partition, client: Client) -> _Why:
    part = f"its share, 1 of {tenant.quota.spread}," if tenant.quota.spread > 1 else "its rate"
    spelled = part if tenant.quota.rate is None else f"{part} of {tenant.quota.rate_text}"
    return "rate", f"{spelled} is used up, the next may start at {_clock(tenant.until)}", tenant.until


def _limited(tenant: TenantSnapshot, partition: Partition, client: Client) -> _Why:
    limit = _share(tenant.quota.concurrency, tenant, partition)
    slots = f"{tenant.running} of {limit} run at once"
    return "concurrency", f"{slots}, the next starts when one of them ends", None


def _by_resources(tenant: TenantSnapshot, partition: Partition, client: Client) -> _Why:
    """Explain what each resource of a set waits for. Those without a limit that holds them come first."""
    names = resources_of(tenant.tenant) or ()
    found = [(each, _reason(tenant_snapshot(partition, client, each), partition, client)) for each in names]
    for reason in ("no-worker", "no-leader", "turn"):
        for name, why in found:
            if why[0] == reason:
                return reason, f"resource {name!r} has room, {why[1]}", None
    ends = [until for _, (_, _, until) in found if until is not None]
    each = "; ".join(f"{name!r}: {why}" for name, (_, why, _) in found)
    return "resources", f"none of its resources has room: {each}", min(ends, default=None)


def _pauses(tenant: TenantSnapshot, partition: Partition, client: Client) -> list[_Why]:
    """Return all pauses that hold the tenant: by its quota, by a call, and that of the whole queue."""
    queue = partition.keys.queue
    whose = f"{queue!r}, {tenant.tenant!r}"
    pauses: list[_Why] = []
    if tenant.quota.paused and stored_quota(partition, client, tenant.tenant).paused:
        call = f"app.dq.quotas.set({whose}, paused=False)"
        pauses.append(("paused", f"its quota has paused = True; {call} resumes it", None))
    if tenant.paused_since is not None:
        call = f"app.dq.quotas.resume({whose})"
        pauses.append(_paused_by_call(tenant.paused_until, call, "it", tenant.pause_cause))
    if client.zscore(partition.keys.arriving, tenant.tenant) is not None:
        pauses.append(
            ("moving", "it moves here, and its tasks still wait or run in its former partition", None)
        )
    whole = queue_pause(partition, client)
    if whole is not None:
        pauses.append(_paused_by_call(whole.until, f"app.dq.queues[{queue!r}].resume()", "the queue"))
    return pauses


def _end_of_pause(pause: _Why) -> float:
    until = pause[2]
    return math.inf if until is None else until.timestamp()


def _paused_by_call(until: datetime | None, call: str, subject: str, cause: PauseCause | None = None) -> _Why:
    end = f"a call of {call}" if until is None else f"{_clock(until)}, or {call}"
    why = "" if cause is None else f", because {cause}"
    return "paused", f"{subject} is paused until {end}{why}", until


def _idle(tenant: TenantSnapshot, partition: Partition, client: Client) -> _Why:
    running = f", and {_count(tenant.running, 'task')} of it running" if tenant.running else ""
    return "empty", f"there is nothing to wait for{running}", None


_TENANT: dict[str, Callable[[TenantSnapshot, Partition, Client], _Why]] = {
    "eligible": _eligible,
    "resource_set": _by_resources,
    "throttled": _throttled,
    "at_concurrency": _limited,
    # Its last pause has ended since its state was read.
    "paused": _eligible,
    "idle": _idle,
}


def _message(partition: Partition, client: Client, message: MessageSnapshot) -> _Why:
    keys = partition.keys
    if message.state == "waiting":
        before = int(client.zrank(keys.tenant(message.tenant), message.id) or 0)
        tenant = _standing(partition, client, message.tenant)
        if before:
            whose = f"of tenant {message.tenant!r}" if message.tenant else "without a tenant"
            ahead = f"{_count(before, 'message')} {whose}"
            return "behind", f"waits behind {ahead}. {tenant.sentence[:-1]}", tenant.until
        return tenant.reason, f"waits and is the next of its tenant. {tenant.sentence[:-1]}", tenant.until
    if message.state == "delayed":
        return "eta", f"waits for its ETA, {_clock(message.due)}", message.due
    if message.state == "blocked":
        claim = dedup_lock_of(partition, client, message.id)
        head = (
            f"{claim.head}, which holds its dedup lock {claim.key}"
            if claim is not None
            else "another message"
        )
        return "dedup", f"waits for the end of {head}", None
    if message.state == "following":
        covering = task_id_of(text(client.hget(keys.following, message.id) or b"another call"))
        return "dedup", f"will not run: it gets the result of {covering}, which covers it", None
    if message.state == "claimed":
        by = f" for resource {message.resource!r}" if message.resource else ""
        return "running", f"is with worker {message.consumer}{by}: it runs, or starts next", None
    if message.state == "settled":
        return "running", f"has started on worker {message.consumer} and is not delivered again", None
    if message.state == "discarded":
        why = text(client.hget(keys.reasons, message.id) or b"cancelled")
        others = int(client.zrank(keys.discards, message.id) or 0)
        after = f", after {_count(others, 'other')} that will not run either" if others else ""
        return "cancelled", f"will not run ({why}); a worker has still to record that{after}", None
    if message.state == "cancelled":
        return "cancelled", "was cancelled and does not wait; if it is published, it will not run", None
    if message.state == "dead":
        return "dead", f"is a dead letter; see app.dq.dead_letters[{keys.queue!r}]", None
    return "unknown", f"is in the state {message.state!r}", None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _clock(when: datetime | None) -> str:
    return "an unknown time" if when is None else when.isoformat(timespec="milliseconds")
