"""The context that all channels of one connection share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import redis

from celery_dq.context import ProcessState
from celery_dq.errors import ConfigurationError
from celery_dq.keys import PartitionKeys, queue_registry, transient_prefix
from celery_dq.options.sections import Options
from celery_dq.protocols import Leaderships, PartitionAllocation, WorkerCapacity
from celery_dq.shown import shell_word, shown_logger
from celery_dq.transport.broker_url import refuse_key_prefix
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads
from celery_dq.transport.redis.store.address import addresses_of, identity, on_cluster
from celery_dq.transport.redis.store.cluster_client import master_clients
from celery_dq.transport.redis.store.partition import (
    STRICT_PRIORITY_US,
    Declared,
    Partition,
    PartitionedQueue,
    Queue,
)
from celery_dq.transport.redis.store.partition_map import ROUTINGS, PartitionMap
from celery_dq.transport.redis.store.quotas import write_settings_quota
from celery_dq.transport.redis.store.rounds import (
    AT_ONCE,
    Beside,
    Commands,
    Rounds,
    run_one,
    run_rounds,
)
from celery_dq.transport.redis.store.script_calls import run_all
from celery_dq.transport.redis.store.server_checks import check_server
from celery_dq.transport.redis.store.server_errors import PartitionsChanging
from celery_dq.transport.redis.store.slot_map import SlotMap
from celery_dq.transport.redis.store.whole_queue import namesake_of
from celery_dq.transport.threaded_transport import app_context_of

logger = shown_logger(__name__)

#: The name of one partition of a queue.
_ONE_PARTITION = re.compile(r"(?P<queue>.+)/(?P<number>0|[1-9][0-9]*)", re.DOTALL)


class ConnectionContext:
    """App and process of one transport.

    Args:
        connection: The kombu connection. Its transport options hold the :class:`AppContext` of the app, if
            there
            is an app.

    Raises:
        ConfigurationError: A transport option or a setting cannot be used.
    """

    def __init__(self, connection: Any) -> None:
        refuse_key_prefix(connection.transport_options)
        app_context = app_context_of(connection)
        #: The worker's side, in this process; a child does not use a connection that it has inherited.
        self.app_context = app_context
        self.state: ProcessState = app_context.in_this_process()
        self.options: Options = app_context.options
        self.address = identity(connection)
        identities = app_context.in_process(dict[str, ConsumerIdentity])
        if self.address not in identities:
            slots = SlotMap(addresses_of(connection)) if on_cluster(connection) else None
            made = identities[self.address] = ConsumerIdentity(self.options.lease_us / 1e6, slots=slots)
            made.threads = ConsumerThreads(made)
        self.identity: ConsumerIdentity = identities[self.address]
        self.identity.name_after(self.state.worker)
        self.identity.running_tags = self._running_tags

    @property
    def capacity(self) -> WorkerCapacity | None:
        """Capacity of the worker in this process; None without a worker."""
        return self.state.capacity

    @property
    def leaderships(self) -> Leaderships | None:
        """Leaderships of the worker in this process; None without any."""
        return self.state.leaderships

    @property
    def allocation(self) -> PartitionAllocation | None:
        """The partitions that the worker in this process serves; None where they are not allocated."""
        return self.state.allocation

    def _running_tags(self) -> frozenset[str]:
        capacity = self.capacity
        return frozenset() if capacity is None else capacity.started_tags()

    def check_server(self, client: redis.Redis) -> None:
        """Check, once per process, that the server may hold messages.

        Raises:
            ServerError: The server may not hold messages.
        """
        if self.address not in self.identity.checked_servers:
            if self.identity.slots is None:
                check_server(client, self.options.allow_eviction)
            else:
                for _, master in master_clients(client):
                    # A node that does not answer may be about to lose its slots to its replica.
                    with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                        check_server(master, self.options.allow_eviction, on_cluster=True)
            self.identity.checked_servers.add(self.address)

    def refuse_inherited(self) -> None:
        """Refuse a connection that this process has inherited over a fork, with the identity of its parent.

        Raises:
            redis.ConnectionError: The connection was opened before a fork.
        """
        if not self.identity.owner.is_current:
            raise redis.ConnectionError(
                "This connection was opened before a fork: open a new one in the child process"
            )

    @property
    def broadcast_prefix(self) -> str:
        """Prefix that separates broadcasts and bindings from those of other apps on the same database.

        Empty with default settings, so that monitors made for kombu find the worker.
        """
        options = self.options
        if options.environment == "online" and not options.key_prefix:
            return ""
        return f"{options.key_prefix}{options.environment}/"

    @property
    def registry_key(self) -> str:
        """Key of the SET with the names of all ordinary queues that were declared."""
        return queue_registry(self.options.environment, self.options.key_prefix)

    @property
    def list_prefix(self) -> str:
        """Prefix of the keys of transient queues."""
        return transient_prefix(self.options.environment, self.options.key_prefix)

    def queues(self, name: str, client: redis.Redis, *, refresh: bool = False) -> PartitionedQueue:
        """Return the queue called *name* with as many partitions as the broker has stored.

        A process asks the broker once for each queue, and again when it begins to consume. It declares the
        queue at the same time: a queue that stores nothing and has no consumer takes the number of partitions
        from the settings.

        Args:
            name: Name of the queue, or of one partition of a queue with several, such as ``push/3``.
            client: A redis client.
            refresh: Ask the broker again: it has refused a message of this process, or a consumer begins.

        Raises:
            ConfigurationError: The queue has fewer partitions than the name says, the name is that of a part
                of a partition, or the queue is a singleton queue and has several.
            redis.RedisError: Redis did not answer.
        """
        one = _ONE_PARTITION.fullmatch(name)
        if one is not None:
            whole = self.queues(one["queue"], client, refresh=refresh)
            if whole.is_pinned:
                raise ConfigurationError(
                    f"queue = {_shown(name)}, but {whole.name!r} is one partition of queue "
                    f"{whole.whole_name!r} and has no partitions: consume {whole.name!r}"
                )
            # Nine digits are more than any queue has, and Python refuses to read thousands of them.
            number = int(one["number"][:9])
            if number < whole.homes.total > 1:
                return PartitionedQueue(name, [whole.partitions[number]])
            if whole.count > 1:
                raise ConfigurationError(
                    f"queue = {_shown(name)}, but queue {whole.name!r} has {whole.count} partitions: name "
                    f"one from {whole.name}/0 to {whole.name}/{whole.count - 1}"
                )
        homes = None if refresh else self.identity.partition_maps.get(name)
        if homes is None:
            homes, _ = run_one(client, self._declare(name, client, repair=refresh))
        return self.queue_of(name, homes)

    def queues_to_consume(self, names: Sequence[str], client: redis.Redis) -> list[PartitionedQueue]:
        """Return the queues with these names, in few round trips, for consumers that begin.

        The broker is asked for their partitions again, and each queue gets the quota of the settings.

        Raises:
            ConfigurationError: As for :meth:`queues`.
            PartitionsChanging: The number of partitions of a queue changed at each attempt.
            redis.RedisError: Redis did not answer.
        """
        queues: dict[str, PartitionedQueue] = {}
        left = list(dict.fromkeys(names))
        for _ in range(ROUTINGS):
            whole = [name for name in left if self.is_whole(name)]
            run_rounds(client, [self._declare(name, client, repair=True) for name in whole])
            queues.update({name: self.queues(name, client, refresh=name not in whole) for name in left})
            most = max(len(queue.partitions) for queue in queues.values())
            applied = run_rounds(
                client,
                [self._write_settings_quota(queues[name], client) for name in left],
                at_once=max(AT_ONCE // most, 1),
            )
            left = [name for name, done in zip(left, applied, strict=True) if not done]
            if not left:
                return [queues[name] for name in names]
        raise PartitionsChanging(
            f"queue {left[0]!r} had another number of partitions at each of {ROUTINGS} attempts to consume "
            "it: consume it again when the change is over"
        )

    def _write_settings_quota(self, queue: PartitionedQueue, client: redis.Redis) -> Rounds[bool]:
        partitions = [each.partition for each in queue.partitions]
        options = self.options.queue(queue.whole_name)
        return write_settings_quota(partitions, client, options, self.identity.consumer)

    def declared(
        self, name: str, client: redis.Redis, beside: Commands
    ) -> Rounds[tuple[PartitionedQueue, list[Any]]]:
        """Return a whole queue as :meth:`queues` does, beside other ones, and the answers to more commands.

        Args:
            name: Name of the queue.
            client: A redis client.
            beside: Puts the commands into the pipeline of the declaration.
        """
        homes = self.identity.partition_maps.get(name)
        if homes is None:
            homes, answers = yield from self._declare(name, client, repair=False, beside=beside)
        else:
            answers = yield beside
        return self.queue_of(name, homes), answers

    @staticmethod
    def is_whole(name: str) -> bool:
        """Return whether this cannot be the name of one partition of a queue."""
        return _ONE_PARTITION.fullmatch(name) is None

    def queue_of(self, name: str, homes: PartitionMap) -> PartitionedQueue:
        """Return the queue called *name* with the partitions of a map.

        Raises:
            ConfigurationError: The queue is a singleton queue, and the map has several.
        """
        count, leaderships = homes.total, self.leaderships
        if count > 1 and leaderships is not None and leaderships.is_singleton(name):
            raise ConfigurationError(
                f"queue {name!r} is a singleton queue and has {count} partitions, but one leader consumes "
                f"all of it in order: run celery dq partitions {shell_word(name)} --set 1"
            )
        return PartitionedQueue(name, [self._partition(name, number, homes) for number in range(count)])

    def partition(self, name: str, number: int, homes: PartitionMap) -> Partition:
        """Return one partition of the queue called *name* with this map."""
        return self._partition(name, number, homes).partition

    def _declare(
        self, name: str, client: redis.Redis, *, repair: bool, beside: Commands | None = None
    ) -> Rounds[tuple[PartitionMap, list[Any]]]:
        """Declare a queue's partitions; note and return their map as the broker has stored it.

        No message is sent by a map before all partitions have it: a tenant's former home must have stopped to
        accept its messages when the new one accepts the first.

        Args:
            name: Name of the queue.
            client: A redis client.
            repair: Write the map into every partition, because one of them had another one.
            beside: Puts further commands into the same pipeline, whose answers are returned, too.
        """
        wanted, known = self.options.queue(name).partitions, self.identity.partition_maps.get(name)
        if wanted > 1 and (namesake := namesake_of(name, wanted, self.registry_key, client)) is not None:
            logger.warning(
                "dq_queues[%r]['partitions'] is %d, but %s is the name of another queue, so that the "
                "broker's number is used. Empty and delete that queue (celery amqp queue.delete %s), or give "
                "the partitioned one another name.",
                name,
                wanted,
                namesake,
                namesake,
                extra={"event": "partitions_differ", "queue": name},
            )
            wanted = 1
        arbiter = self._partition(name, 0, PartitionMap()).partition
        # A map that this process has seen is missing only where Redis has lost data.
        call = (
            arbiter.declare_partitions(PartitionMap(wanted))
            if known is None or known.total == 1
            else arbiter.declare_partitions(known, "restore")
        )
        declared: Declared
        declared, *answers = yield Beside(call, beside)
        homes, count = declared.homes, declared.homes.count
        if homes.total > 1 and (declared.is_new or repair or homes.before is not None):
            calls = [
                self._partition(name, number, homes).partition.declare_partitions(homes, "follow")
                for number in range(1, homes.total)
            ]
            run_all(calls, client)
        if wanted not in (1, count) and (known is None or known.count != count):
            logger.warning(
                "dq_queues[%r]['partitions'] is %d, but the broker has %d partitions of queue %s, which are "
                "used. Set the number of the broker in the settings. If the queue is to have another number, "
                "run celery dq partitions %s --set %d.",
                name,
                wanted,
                count,
                name,
                shell_word(name),
                wanted,
                extra={"event": "partitions_differ", "queue": name},
            )
        self.identity.partition_maps.learn(name, homes)
        return self.identity.partition_maps.get(name) or homes, answers

    def _partition(self, name: str, number: int, homes: PartitionMap) -> Queue:
        options = self.options.queue(name)
        prefix, on_cluster = self.options.key_prefix, self.identity.slots is not None
        keys = PartitionKeys(self.options.environment, name, number, prefix, on_cluster)
        aging = options.priority_aging_us
        return Queue(
            name,
            Partition(keys, self.identity.scripts, homes),
            max_deliveries=options.max_deliveries,
            head_start_us=STRICT_PRIORITY_US if aging is None else aging,
            retention=(
                (self.options.dead_letter_retention_us or 0) // 1000,
                # Rounded up, so that no partition has the limit 0, which is none.
                -(-(self.options.dead_letter_limit or 0) // homes.count),
            ),
        )


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 60 else f"{name[:60]!r}…"
