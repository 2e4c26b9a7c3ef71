"""The calls with which tenants move to other partitions of their queue, each one script of one partition."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from celery_dq.errors import TooFewReplicas
from celery_dq.scripts.loader import Argument
from celery_dq.shown import shell_word
from celery_dq.transport.redis.store.partition import Partition, read_binary, read_flag, read_text
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.script_calls import PipelinedConnection, ScriptCall, ask_script

T = TypeVar("T")

#: Most messages or tenants in one call.
MOVE_CHUNK = 200
#: Longest wait for replicas, in milliseconds.
CONFIRM_TIMEOUT_MS = 2_000


@dataclass(frozen=True)
class Outbox:
    """Messages of one tenant that leave a partition.

    Attributes:
        number: Its number, which grows; 0 when it is empty.
        tenant: The tenant.
        to: Number of the partition that gets the messages.
        kept: How many of the waiting messages that were named stay.
        sealed_us: The time to which the partition's clock had run when the change began.
        messages: Entry of the outbox and record of each message.
    """

    number: str
    tenant: str
    to: int
    kept: int
    sealed_us: str
    messages: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def read(cls, reply: Any) -> Outbox | None:
        """Return the reply of the script; None when it has changed nothing because of another map."""
        if reply is None:
            return None
        number, tenant, to, kept, sealed = (read_text(each) for each in reply[:5])
        packed = [read_binary(each) for each in reply[5:]]
        messages = tuple(zip(packed[::2], packed[1::2], strict=True))
        return cls(number, tenant, int(to), int(kept), sealed, messages)


def set_map(first: Partition, before: PartitionMap, now: PartitionMap) -> ScriptCall[PartitionMap]:
    """Change the map in partition 0, if it still is the one before. The reply is the stored map."""
    return ScriptCall(
        first.scripts["set_partitions"],
        (first.keys.state,),
        (str(before), str(now), now.spreads_text),
        lambda reply: PartitionMap.parse(read_text(reply[0]), read_text(reply[1]), first.keys.state),
    )


def store_tenant_settings(
    partition: Partition, queue_pause: Sequence[Argument], entries: Sequence[Sequence[Argument]]
) -> ScriptCall[bool]:
    """Store or remove quotas and pauses that follow their tenants; False when another map is stored.

    Args:
        partition: The partition, with the map by which the tenants move.
        queue_pause: Begin and end of the pause of the queue, as in the state; `""` each keeps what is stored.
        entries: Field, packed quota, its time and author, begin, end and cause of the pause of its
            tenant; `""` removes what is stored. At most :data:`MOVE_CHUNK`.
    """
    args = (str(partition.homes), *queue_pause, *chain.from_iterable(entries))
    return ScriptCall(partition.scripts["tenant_settings"], (partition.keys.state,), args, read_flag)


def export_messages(
    partition: Partition, tenant: str, to: int, ids: Sequence[str] = ()
) -> ScriptCall[Outbox | None]:
    """Put messages of a tenant into the outbox, unless something lies there; the reply is the outbox.

    The reply is None when the partition has another map.

    Args:
        partition: The partition that has them, with the map by which they move.
        tenant: The tenant.
        to: Number of the partition that gets them.
        ids: Ids of its messages and dead letters, at most :data:`MOVE_CHUNK`.
    """
    args: tuple[Argument, ...] = (str(partition.homes), tenant, to, len(ids), *ids)
    return ScriptCall(partition.scripts["export_messages"], (partition.keys.state,), args, Outbox.read)


def import_messages(
    partition: Partition,
    source: Partition,
    outbox: Outbox,
    now: PartitionMap,
    head_start_us: int,
    *,
    waits: bool = True,
) -> ScriptCall[bool]:
    """Store the messages of an outbox; the reply is False when the partition has another map.

    Args:
        partition: The partition that gets them.
        source: The partition that has the outbox.
        outbox: The messages.
        now: The map by which they move.
        head_start_us: By how much each step of priority goes before its time.
        waits: Serve none of the tenant before :func:`open_tenants`.
    """
    numbers = (source.keys.partition, outbox.number)
    fixed = (
        *numbers,
        outbox.tenant,
        str(now),
        outbox.sealed_us,
        head_start_us,
        int(waits),
        len(outbox.messages),
    )
    args: tuple[Argument, ...] = (*fixed, *chain.from_iterable(outbox.messages))
    return ScriptCall(partition.scripts["import_messages"], (partition.keys.state,), args, read_flag)


def drop_exported(partition: Partition, outbox: Outbox) -> ScriptCall[int]:
    """Delete the messages of this outbox; the reply counts them."""
    return ScriptCall(partition.scripts["drop_exported"], (partition.keys.state,), (outbox.number,), int)


def departed(partition: Partition, tenants: Sequence[tuple[str, bool]]) -> ScriptCall[list[str]]:
    """Ask which tenants have left. The reply is their arrival time in µs, or ``""`` while they have not.

    Args:
        partition: The partition.
        tenants: The tenants, and whether each keeps a share here.
    """
    pairs: list[tuple[Argument, Argument]] = [(tenant, int(stays)) for tenant, stays in tenants]
    args: tuple[Argument, ...] = (len(tenants), *chain.from_iterable(pairs))
    return ScriptCall(
        partition.scripts["departed"],
        (partition.keys.state,),
        args,
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


def run_confirmed(call: ScriptCall[T], partition: Partition, client: Any, replicas: int) -> T:
    """Run a step, and wait until replicas have it, and all that its server has stored before.

    The step and ``WAIT`` share a connection. Another one may reach the master that a failover has promoted,
    whose replicas would confirm a ``WAIT`` although it lacks the step.

    Args:
        call: The step. It may have found that an earlier attempt has made it.
        partition: Its partition.
        client: A redis client.
        replicas: The setting ``dq_confirm_replicas``; 0 waits for none.

    Raises:
        redis.RedisError: The connection was lost. The step may have been made.
        TooFewReplicas: The step was made, and not as many replicas have confirmed it.
    """
    if not replicas:
        return call.run(client)
    connection, is_reusable = PipelinedConnection(client.connection_pool), False
    try:
        connection.open()
        answer = call.parse(ask_script(connection, call))
        marker = partition.keys.producer(uuid.uuid4().hex)
        # WAIT waits for the last write of its own connection, and a step that was made before is not a write.
        # On a cluster, it goes to the nodes whose answers were read. A check of health could connect again.
        connection.send(("SET", marker, 0, "PX", CONFIRM_TIMEOUT_MS))
        connection.read()
        connection.send(("WAIT", replicas, CONFIRM_TIMEOUT_MS))
        confirmed = connection.read()
        is_reusable = True
    finally:
        connection.close(is_reusable)
    if confirmed < replicas:
        queue, count = partition.keys.queue, partition.homes.count
        raise TooFewReplicas(
            f"dq_confirm_replicas = {replicas}, but only {confirmed} replicas had a step of the change of "
            f"queue {queue!r} within {CONFIRM_TIMEOUT_MS} ms. Nothing is lost: connect the replicas, and "
            f"complete the change with: celery dq partitions {shell_word(queue)} --set {count}"
        )
    return answer
