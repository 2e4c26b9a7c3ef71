"""The app's broker connection, for ``app.dq``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from kombu.serialization import prepare_accept_content

from celery_dq.app.api.audit import AuditDoor, AuditTrail
from celery_dq.compat.kombu_messages import library_errors
from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.errors import ConfigurationError, InvalidRequest
from celery_dq.inspector.redis_values import Client, check_text, is_unicode, text
from celery_dq.keys import ENVIRONMENTS, queue_registry
from celery_dq.options import Quota
from celery_dq.options.sections import Options
from celery_dq.shown import shown_logger, shown_url
from celery_dq.transport.aliases import TENANT_SCHEMES, ZOOKEEPER_SCHEME
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.script_calls import run_all
from celery_dq.transport.redis.store.server_errors import refusals_named

logger = shown_logger(__name__)

T = TypeVar("T")

#: Attempts of a call whose map changes under way.
MOST_ATTEMPTS = 10


class MapChanged(InvalidRequest):
    """Another process has changed the partitions of a queue since this one has read their map."""

    @classmethod
    def of(cls, queue: str) -> MapChanged:
        """Return the error with the name of the queue."""
        return cls(f"Another change of the partitions of queue {queue!r} is under way: run it again")


class OpenPartition(NamedTuple):
    """A partition, and a client for its calls. Both are valid only inside the ``with`` block."""

    partition: Partition
    client: Client


class OpenQueue(NamedTuple):
    """All partitions of a queue, and a client for their calls, valid only inside the ``with`` block.

    ``found = run_rounds(opened.client, [procedure(each) for each in opened.partitions])`` runs a procedure on
    all partitions in as few round trips as on one.
    """

    partitions: tuple[Partition, ...]
    client: Client

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self.partitions[0].keys.queue

    @property
    def homes(self) -> PartitionMap:
        """The map of the queue."""
        return self.partitions[0].homes

    def of(self, tenant: str | None) -> tuple[Partition, ...]:
        """Return the partitions that concern a tenant: where it lives, and from where it moves.

        With None, which means all tenants, return all.
        """
        if tenant is None:
            return self.partitions
        return tuple(self.partitions[number] for number in self.homes.shares_by_partition(tenant))

    def of_key(self, tenant: str, key: str) -> tuple[Partition, ...]:
        """Return the partitions that concern a dedup key of a tenant: its former one first, if it moves."""
        numbers = dict.fromkeys((self.homes.old_place(tenant, key), self.homes.place(tenant, key)))
        return tuple(self.partitions[number] for number in numbers)

    def at(self, homes: PartitionMap) -> OpenQueue:
        """Return the same partitions with another map of as many."""
        return OpenQueue(
            tuple(Partition(each.keys, each.scripts, homes) for each in self.partitions), self.client
        )

    def set_quota(self, tenant: str, quota: Quota | None, *, by: str = "") -> None:
        """Set the quota of a tenant, or with None delete it, in all partitions that concern it.

        The first former home gets it first: the mover takes it from there.

        Raises:
            MapChanged: A partition has another map. Others may have the quota.
        """
        shares, widest = self.homes.shares_by_partition(tenant), self.homes.widest(tenant)
        first = self.homes.old_partitions(tenant)[0]
        for numbers in ([first], [each for each in shares if each != first]):
            calls = [
                self.partitions[number].set_quota(
                    tenant, None if quota is None else quota.pack(shares[number], widest), by=by
                )
                for number in numbers
            ]
            is_set = run_all(calls, self.client)
            if not all(is_set):
                raise MapChanged.of(self.name)


class BrokerAccess:
    """Borrows connections from the app's pool. Thread-safe; a forked process gets new connections.

    Attributes:
        app: The Celery app.
        context: Its context.
    """

    def __init__(
        self, app: Any, context: AppContext, connection: Any = None, audit_door: AuditDoor | None = None
    ) -> None:
        self.app = app
        self.context = context
        self.audit = AuditTrail(lambda: self.options, self.channel, audit_door)
        self._unreadable: set[str] = set()
        self._connection = connection

    @property
    def options(self) -> Options:
        """The app's checked settings."""
        options: Options = self.context.options
        return options

    @contextmanager
    def in_environment(self, environment: str) -> Iterator[BrokerAccess]:
        """Open a connection to the same broker in another environment.

        Raises:
            InvalidRequest: It is neither ``online`` nor ``sandbox``, or is the environment of the app.
        """
        if environment not in ENVIRONMENTS or environment == self.options.environment:
            raise InvalidRequest(
                f"environment = {environment!r}: give {' or '.join(ENVIRONMENTS)}, and not the app's own, "
                f"dq_environment = {self.options.environment!r}"
            )
        context = AppContext(
            f"{self.context} in {environment}", lambda: replace(self.options, environment=environment)
        )
        with self.app.connection_for_write() as connection:
            connection.transport_options[APP_CONTEXT] = context
            yield BrokerAccess(self.app, context, connection, self.audit.door)

    @property
    def accept_content(self) -> frozenset[str]:
        """The content types that the app's workers decode."""
        return frozenset(prepare_accept_content(self.app.conf.accept_content) or ())

    @contextmanager
    def channel(self, connection: Any = None) -> Iterator[Any]:
        """Borrow a channel of the tenant broker.

        Raises:
            ConfigurationError: The app's broker is of another kind.
            kombu.exceptions.OperationalError: The broker cannot be reached, after the retries of
                ``task_publish_retry_policy``.
        """
        with self._channel(TENANT_SCHEMES, "dq-redis://…", connection) as channel:
            yield channel

    @contextmanager
    def zookeeper_channel(self) -> Iterator[Any]:
        """Borrow a channel of the ZooKeeper broker; raises the errors of :meth:`channel`."""
        with self._channel((ZOOKEEPER_SCHEME,), "dq-zookeeper://…") as channel:
            yield channel

    @contextmanager
    def _channel(self, schemes: tuple[str, ...], wanted: str, connection: Any = None) -> Iterator[Any]:
        with self.app.connection_or_acquire(connection or self._connection) as borrowed:
            if borrowed.transport_cls not in schemes:
                raise ConfigurationError(_wrong_broker(borrowed, wanted))
            policy = self.app.conf.task_publish_retry_policy or {}
            known = ("max_retries", "interval_start", "interval_step", "interval_max")
            borrowed.ensure_connection(**{name: policy[name] for name in known if name in policy})
            with library_errors(borrowed), refusals_named():  # as Celery does when it publishes
                yield borrowed.default_channel

    @contextmanager
    def open(self, queue: str, connection: Any = None, *, declare: bool = False) -> Iterator[OpenQueue]:
        """Borrow a connection to all partitions of a queue. Their number is read from the broker.

        Args:
            queue: The name of the queue.
            connection: A kombu connection to the broker; default: one of the app's pool.
            declare: Let a queue that the broker does not know yet have the partitions of the settings. A call
                that stores something needs it.

        Raises:
            InvalidRequest: `queue` is not the name of a queue, or that of one partition.
        """
        with self.open_all([queue], connection, declare=declare) as opened:
            yield opened[0]

    @contextmanager
    def open_all(
        self, queues: Sequence[str], connection: Any = None, *, declare: bool = False
    ) -> Iterator[list[OpenQueue]]:
        """Borrow a connection to several queues, whose numbers of partitions are read in one round trip.

        The arguments and errors are those of :meth:`open`.
        """
        for queue in queues:
            check_text("queue", queue)
        with self.channel(connection) as channel:
            maps = stored_maps(channel, queues, declare=declare)
            yield [
                OpenQueue(partitions_of(channel, queue, homes), channel.client)
                for queue, homes in zip(queues, maps, strict=True)
            ]

    def repeated(self, opened: OpenQueue, action: Callable[[OpenQueue], T]) -> T:
        """Run an action on an open queue, again with the present map if that has changed.

        Raises:
            MapChanged: The map has changed in each of many attempts.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                return action(opened)
            except MapChanged:
                if attempts == MOST_ATTEMPTS:
                    raise
                opened = self._with_present_map(opened)

    def _with_present_map(self, opened: OpenQueue) -> OpenQueue:
        with self.open(opened.name) as (partitions, client):
            follow(partitions, client)
            return OpenQueue(partitions, opened.client)

    @contextmanager
    def open_home(self, queue: str, tenant: str = "") -> Iterator[OpenPartition]:
        """Borrow a connection to the partition of a queue in which a tenant lives; see :meth:`open`."""
        check_text("queue", queue)
        with self.channel() as channel:
            (homes,) = stored_maps(channel, [queue], declare=False)
            home = channel.context.partition(queue, homes.home(tenant), homes)
            yield OpenPartition(home, channel.client)

    def serves_queues(self) -> bool:
        """Whether the app's broker is a tenant broker. Opens nothing."""
        url = self.app.connection_for_write()
        return url.transport_cls in TENANT_SCHEMES

    def is_zookeeper(self) -> bool:
        """Whether the app's broker is the one on ZooKeeper. Opens nothing."""
        url = self.app.connection_for_write()
        return bool(url.transport_cls == ZOOKEEPER_SCHEME)

    def declare(self, client: Client, queue: str) -> None:
        """Register a queue that messages reach by another way than kombu."""
        client.sadd(self._registry, queue)

    def withdraw(self, client: Client, queue: str) -> int:
        """Remove the name of a queue, and return the number of names that were removed."""
        return int(client.srem(self._registry, queue))

    def _is_usable(self, name: str) -> bool:
        if not is_unicode(name) and name not in self._unreadable:
            self._unreadable.add(name)
            logger.warning(
                "%s in Redis has the name %r, which is not UTF-8. Celery cannot use such a queue, and it "
                "is left out everywhere. Another program has written it; SREM removes it from the set.",
                self._registry,
                name.encode("utf-8", "surrogateescape"),
                extra={"event": "queue_name_unreadable"},
            )
        return name not in self._unreadable

    @property
    def _registry(self) -> str:
        options = self.context.options
        return queue_registry(options.environment, options.key_prefix)

    def queue_names(self) -> list[str]:
        """Return every queue that is declared in the app, named in ``dq_queues``, or known to the server.

        A name in Redis that is not UTF-8 is left out, with a warning for the first time.
        """
        options = self.context.options
        names = {*self.app.amqp.queues, *(section.name for section in options.queues)}
        if self.is_zookeeper():
            with self.zookeeper_channel() as channel:
                return sorted({*names, *channel.stored_queues.names()})
        with self.channel() as channel:
            found = map(text, channel.client.smembers(self._registry))
            names.update(name for name in found if self._is_usable(name))
            # A worker of some partitions only has declared them as its queues.
            return sorted(names - _single_partitions(channel, [*names]).keys())


class OfQueue:
    """The API of one queue, which its name alone makes.

    Args:
        broker: Access to the broker.
        name: The name of the queue.
    """

    def __init__(self, broker: BrokerAccess, name: str) -> None:
        self.name = name
        self._broker = broker


class ByQueueName(Mapping[str, T]):
    """Something of each queue. Every name is valid: a queue comes into existence with its first message."""

    def __init__(self, broker: BrokerAccess) -> None:
        self._broker = broker

    def __getitem__(self, name: str) -> T:
        check_text("queue", name)
        return self._of(name)

    @abstractmethod
    def _of(self, name: str) -> T:
        """Return the object of a queue."""

    def _names(self) -> list[str]:
        return self._broker.queue_names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, name: Any) -> bool:
        return name in self._names()


def follow(partitions: Sequence[Partition], client: Client) -> None:
    """Let all partitions of a queue have the map with which they are given, that of partition 0."""
    run_all([each.declare_partitions(each.homes, "follow") for each in partitions[1:]], client)


def partitions_of(channel: Any, queue: str, homes: PartitionMap) -> tuple[Partition, ...]:
    """Return the partitions of a queue with this map, during a change also those that go."""
    return tuple(channel.context.partition(queue, number, homes) for number in range(homes.total))


def stored_map(first: Partition, client: Client) -> PartitionMap:
    """Return the map of a queue, as its partition 0 has stored it, without the spreads."""
    return PartitionMap.parse(text(client.hget(first.keys.state, "partitions") or "1"), key=first.keys.state)


def stored_maps(channel: Any, queues: Sequence[str], *, declare: bool) -> list[PartitionMap]:
    """Return the map of each queue, as the broker has stored it.

    Args:
        channel: A channel of the tenant broker.
        queues: The names of the queues.
        declare: As for :meth:`BrokerAccess.open`.
    """
    for queue, whole in _single_partitions(channel, queues).items():
        raise InvalidRequest(f"{queue!r} is one partition of queue {whole!r}: name {whole!r}")
    maps: list[PartitionMap] = []
    for queue, stored in zip(queues, _read_maps(channel, queues), strict=True):
        if stored is None and declare and channel.context.options.queue(queue).partitions > 1:
            maps.append(channel.queues(queue, refresh=True).homes)
        else:
            maps.append(stored or PartitionMap())
    return maps


def _read_maps(channel: Any, queues: Sequence[str]) -> list[PartitionMap | None]:
    if not queues:
        return []
    pipeline = channel.client.pipeline(transaction=False)
    keys = [partitions_of(channel, queue, PartitionMap())[0].keys.state for queue in queues]
    for key in keys:
        pipeline.hmget(key, "partitions", "spreads")
    return [
        None if stored is None else PartitionMap.parse(text(stored), text(spreads or ""), key)
        for key, (stored, spreads) in zip(keys, pipeline.execute(), strict=True)
    ]


def _single_partitions(channel: Any, queues: Sequence[str]) -> dict[str, str]:
    """Return those of these names that are one partition of a queue, such as ``push/3``, with the queue."""
    named = [(queue, *queue.rpartition("/")[::2]) for queue in queues]
    found = [(queue, whole, number) for queue, whole, number in named if whole and number.isdecimal()]
    maps = _read_maps(channel, [whole for _, whole, _ in found])
    return {
        queue: whole
        for (queue, whole, number), homes in zip(found, maps, strict=True)
        if homes is not None and int(number) < homes.total > 1
    }


def _wrong_broker(connection: Any, wanted: str) -> str:
    """The error text for a broker that cannot serve the request."""
    if connection.transport_cls == ZOOKEEPER_SCHEME:
        remedy = (
            "on ZooKeeper there are no tenants, quotas, pauses, moves, tombstones and edits of messages that "
            "wait (reschedule, reprioritise); 'celery dq queues', peek, "
            f"find, cancel, purge, dead, leaders and status work, and the rest needs broker_url = {wanted}"
        )
    else:
        remedy = f"set broker_url to {wanted}, or name the app that has it: celery -A shop dq …"
    given = shown_url(connection.as_uri())
    return f"app.dq needs the tenant broker for this, and this app's broker is {given}: {remedy}"
