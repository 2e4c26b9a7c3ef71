"""The calls with which tenants move to other partitions of their queue, each one script of one partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from celery_dq.scripts.loader import Argument
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.replies import read_binary, read_flag, read_text
from celery_dq.transport.redis.store.script_calls import ScriptCall

#: Most messages or tenants in one call.
MOVE_CHUNK = 200


@dataclass(frozen=True)
class Outbox:
    """Messages of one tenant that leave a partition.

    Attributes:
        number: Its number, which grows; 0 when it is empty.
        tenant: The tenant.
        kept: How many of the waiting messages that were looked at stay.
        sealed_us: The time to which the partition's clock had run when the move began.
        messages: Entry of the outbox and record of each message.
    """

    number: str
    tenant: str
    kept: int
    sealed_us: str
    messages: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def read(cls, reply: Any) -> Outbox:
        """Return the reply of the script."""
        number, tenant, kept, sealed = (read_text(each) for each in reply[:4])
        packed = [read_binary(each) for each in reply[4:]]
        messages = tuple(zip(packed[::2], packed[1::2], strict=True))
        return cls(number, tenant, int(kept), sealed, messages)


def set_map(first: Partition, before: PartitionMap, now: PartitionMap) -> ScriptCall[PartitionMap]:
    """Change the map in partition 0, if it still is the one before. The reply is the stored map."""
    return ScriptCall(
        first.scripts["set_partitions"],
        (first.keys.state,),
        (str(before), str(now)),
        lambda reply: PartitionMap.parse(read_text(reply)),
    )


def export_messages(
    partition: Partition, tenant: str, *, skip: int = 0, limit: int = MOVE_CHUNK, ids: Sequence[str] = ()
) -> ScriptCall[Outbox]:
    """Put messages of a tenant into the outbox, unless something lies there; the reply is the outbox.

    Args:
        partition: The former home.
        tenant: The tenant.
        skip: How many of its waiting messages, the last ones in the order of service, to leave.
        limit: Most waiting messages.
        ids: Ids of its delayed messages and dead letters.
    """
    args: tuple[Argument, ...] = (tenant, skip, limit, len(ids), *ids)
    return ScriptCall(partition.scripts["export_messages"], (partition.keys.state,), args, Outbox.read)


def import_messages(
    partition: Partition, source: Partition, outbox: Outbox, now: PartitionMap, head_start_us: int
) -> ScriptCall[bool]:
    """Store the messages of an outbox; the reply is False when the partition has another map."""
    numbers = (source.keys.partition, outbox.number)
    fixed = (*numbers, outbox.tenant, str(now), outbox.sealed_us, head_start_us, len(outbox.messages))
    args: tuple[Argument, ...] = (*fixed, *chain.from_iterable(outbox.messages))
    return ScriptCall(partition.scripts["import_messages"], (partition.keys.state,), args, read_flag)


def drop_exported(partition: Partition, outbox: Outbox) -> ScriptCall[int]:
    """Delete the messages of this outbox; the reply counts them."""
    return ScriptCall(partition.scripts["drop_exported"], (partition.keys.state,), (outbox.number,), int)


def departed(partition: Partition, tenants: Sequence[str]) -> ScriptCall[list[str]]:
    """Ask which tenants have left. The reply is their arrival time in µs, or ``""`` while they have not."""
    return ScriptCall(
        partition.scripts["departed"],
        (partition.keys.state,),
        (len(tenants), *tenants),
        lambda reply: [read_text(each) for each in reply],
    )


def open_tenants(
    partition: Partition, now: PartitionMap, tenants: Sequence[tuple[str, str]], *, everyone: bool = False
) -> ScriptCall[int]:
    """Serve tenants that have moved here. The reply counts those still expected; -1 with another map.

    Args:
        partition: The new home.
        now: The map by which they move.
        tenants: Tenants and the arrival times of their rate limits, in µs.
        everyone: Serve all tenants, also those that come later.
    """
    args: tuple[Argument, ...] = (str(now), int(everyone), len(tenants), *chain.from_iterable(tenants))
    return ScriptCall(partition.scripts["open_tenants"], (partition.keys.state,), args, int)
