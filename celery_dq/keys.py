"""The names of all keys of celery-dq in Redis. No other module spells a key.

All keys of one partition share the prefix ``<key_prefix>dq:{<environment>/<queue>/<partition>}:``. The text
between the braces is their Redis Cluster hash tag, so that one script may use all of them. A script gets one
key, ``state``, and derives the other keys from it.

On a Redis Cluster, a number behind that of the partition places the partitions of a queue evenly over the
slots: ``dq:{online/push/3.17}:state``.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from celery_dq.errors import ConfigurationError
from celery_dq.hash_slots import place_of, slot_of

ENVIRONMENTS = ("online", "sandbox")

#: Fields of the hash ``quotas`` that belong to no tenant.
DEFAULT_QUOTA = "default"
CONFIG_QUOTA = "config"

_PARTITION = re.compile(
    r"dq:\{(?P<environment>[a-z]+)/(?P<queue>[^/{}]+)/(?P<partition>[0-9]+)(?P<place>\.[0-9]+)?\}:"
)


def quota_field(tenant: str) -> str:
    """Return the field of the hash ``quotas`` that holds the quota of ``tenant``."""
    return f"t:{tenant}"


class _Key(property):
    """A key with a common prefix and the name of its attribute. The text says what the key holds."""

    def __init__(self, holds: str) -> None:
        self._holds = holds

    def __set_name__(self, owner: type, name: str) -> None:
        super().__init__(lambda keys: keys.prefix + name)
        self.__doc__ = self._holds

    if TYPE_CHECKING:

        def __get__(self, keys: Any, owner: Any = None) -> str: ...  # type: ignore[override]


@dataclasses.dataclass(frozen=True)
class PartitionKeys:
    """The keys of one partition of one queue.

    Attributes:
        environment: ``online`` or ``sandbox``.
        queue: Name of the Celery queue; percent-encoded in the keys outside ``[A-Za-z0-9_.-]``.
        partition: Number of the partition.
        key_prefix: Prefix of all keys, from ``dq_key_prefix``. It has no brace, which marks the hash tag.
        on_cluster: Whether they are keys on a Redis Cluster.
        prefix: Common prefix of all keys of the partition.
        slot: Hash slot of the keys on a Redis Cluster.

    Raises:
        ConfigurationError: The environment is unknown, or the prefix holds a brace.
    """

    environment: str
    queue: str
    partition: int = 0
    key_prefix: str = ""
    on_cluster: bool = False
    prefix: str = dataclasses.field(init=False, repr=False)
    slot: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.environment not in ENVIRONMENTS:
            raise ConfigurationError(
                f"dq_environment must be 'online' or 'sandbox', not {self.environment!r}"
            )
        if "{" in self.key_prefix or "}" in self.key_prefix:
            raise ConfigurationError(
                f"dq_key_prefix = {self.key_prefix!r} holds a brace, which marks the cluster hash tag: leave "
                f"it out"
            )
        queue = quote(self.queue, safe="").replace("~", "%7E")
        tag = f"{self.environment}/{queue}/{self.partition:d}"
        if self.on_cluster:
            tag += f".{place_of(self.environment, queue, self.partition)}"
        object.__setattr__(self, "prefix", f"{self.key_prefix}dq:{{{tag}}}:")
        object.__setattr__(self, "slot", slot_of(self.prefix))

    @classmethod
    def parse(cls, key: str) -> PartitionKeys | None:
        """Return the partition that ``key`` belongs to; None when it is not a key of a partition."""
        found = _PARTITION.search(key)
        if found is None or found["environment"] not in ENVIRONMENTS:
            return None
        queue, number = unquote(found["queue"]), int(found["partition"])
        return cls(found["environment"], queue, number, key[: found.start()], found["place"] is not None)

    @property
    def state(self) -> str:
        """HASH: the numbers of the partition; times are in µs.

        ``seq`` and ``claim`` number pushes and claims, ``accepted`` the calls of dedup. ``v`` is the virtual
        time, ``floor`` the least start tag of a tenant that comes back, ``head`` the head start of a
        priority. ``held`` counts the messages in flight, ``sets`` the resource_sets with a backlog.

        ``next_look`` is when ``next_look_owner`` looks again, ``evict`` the end of the next dedup timeout,
        ``discards_at`` when discards are claimed again, ``clock`` the last heartbeat, ``claim_window`` the
        claims of the last windows. A pause lasts from ``paused_since`` to ``paused_until``; ``resume_at`` is
        the end of the next pause of a tenant.

        ``bounds`` is 1 once a quota of the partition has had a ``max_waiting``.

        ``epoch`` is the fencing token of a singleton queue, whose ``leader`` holds it; ``last_epoch`` that of
        a fence that has ended. ``partitions`` is the map of the queue, ``spreads`` the tenants in several
        partitions, ``sealed`` the seq at which both came, ``opened`` the version after which no tenant
        arrives.

        The counters are in :data:`~celery_dq.inspector.queue_counters.COUNTERS`, beside ``waits_alone``,
        ``waits_in_line`` (claimed messages) and ``discards_claimed``.
        """
        return self.prefix + "state"

    messages = _Key("HASH: message id -> record; for a settled message only a zero byte and its consumer.")

    def tenant(self, tenant: str) -> str:
        """ZSET: message id -> score, of the waiting messages of ``tenant``, unless one is in ``single``."""
        return f"{self.prefix}tenant:{tenant}"

    single = _Key("HASH: tenant -> score (8 bytes, a double) and id of its only waiting message.")
    turn = _Key("ZSET: tenant -> start tag in virtual time; these may be served now.")
    throttled = _Key("ZSET: tenant -> µs of its next allowed time.")
    at_concurrency = _Key("ZSET: tenant -> 0; at its concurrency, with backlog.")
    paused = _Key("ZSET: tenant -> 0; paused, with backlog.")
    resource_sets = _Key("ZSET: set of resources with a backlog -> sequence time since when.")

    def rotation(self, resource: str) -> str:
        """ZSET: set with a backlog, or the resource itself -> sequence time of its last turn."""
        return f"{self.prefix}rotation:{resource}"

    finish_tags = _Key(
        "ZSET: tenant -> finish tag ahead of virtual time, of tenants not in ``turn`` (see ``floor``)."
    )
    limiter = _Key(
        "ZSET: tenant -> theoretical arrival time of its rate limit, µs; collected once it has passed."
    )
    running = _Key(
        "HASH: tenant -> slots taken, with counts of claims while it has a backlog; no field means none."
    )
    quotas = _Key("HASH: ``t:<tenant>``, ``default`` or ``config`` -> packed quota.")
    quota_info = _Key(
        "HASH: field of ``quotas`` -> ``<µs> <by>``, when and by which worker or user it was set."
    )
    config_before = _Key("ZSET: packed quota of settings -> µs when it was replaced; expires.")
    pauses = _Key("ZSET: tenant -> µs since when it is paused, with backlog or without.")
    pause_ends = _Key("ZSET: tenant -> µs when its pause ends by itself.")
    pause_causes = _Key("HASH: tenant -> JSON: reason, task, task_id; of a pause by a task.")
    arriving = _Key("ZSET: tenant that moves to this partition, and is not served yet -> µs since when.")
    arrived = _Key("SET: tenants that have moved to this partition, until the end of the change.")
    outbox = _Key(
        "LIST: number, tenant, then a packed entry for each of its messages that move elsewhere now."
    )
    imported = _Key("HASH: number of another partition -> number of the last outbox from there.")
    delayed = _Key("ZSET: message id -> due time, µs.")
    discards = _Key(
        "ZSET: message id -> start tag among the tenants' discards, of messages that will not run."
    )
    discard_tags = _Key(
        "ZSET: tenant -> start tag of its next discard; collected once the discards have passed it."
    )
    reasons = _Key("HASH: message id -> why it was discarded.")
    deliveries = _Key("HASH: message id -> deliveries that ended in a crash; no field means none.")
    unreadable = _Key(
        "HASH: ``state|<field>`` or ``waiting|<tenant>`` -> what a script found there and could not read."
    )
    leases = _Key("ZSET: consumer -> deadline, µs.")

    def reap_grace(self, consumer: str) -> str:
        """STRING: µs until when this consumer, which renewed its lease late, reaps no other consumer."""
        return f"{self.prefix}reap_grace:{consumer}"

    def held(self, consumer: str) -> str:
        """HASH: message id -> packed claim number, score, claimed at, flags, tenant."""
        return f"{self.prefix}held:{consumer}"

    wake = _Key("LIST: at most one wake-up, for the consumers that wait for work.")
    woken = _Key("CHANNEL: number of consumers, when ``wake`` has got a wake-up; on a Redis Cluster only.")
    leader = _Key(
        "HASH: token, who, since, until (µs), clean; the last term of an election without ZooKeeper."
    )
    candidates = _Key("ZSET: candidate for the leadership -> time of its last look, in seconds.")
    vacant = _Key("LIST: at most one wake-up, for the candidates that wait to be elected.")
    tombstones = _Key("ZSET: task id -> expiry, µs; cancelled before it was published.")

    def producer(self, producer: str) -> str:
        """STRING: the last sequence of ``producer``, and those of its last call that found no room."""
        return f"{self.prefix}producer:{producer}"

    dead = _Key("HASH: message id -> record, of the dead letters.")
    dead_info = _Key("HASH: message id -> JSON: reason, worker, at, deliveries, tenant, task.")
    dead_index = _Key("ZSET: message id -> µs when it became a dead letter.")
    dedup_locks = _Key("HASH: dedup scope -> packed since, claim number, timeout, marks, head, heir, tail.")
    dedup_members = _Key("HASH: message id -> dedup scope, of every head, heir and tail.")
    blocked = _Key(
        "ZSET: message id -> score with which it will wait after the head of its dedup key has ended."
    )
    following = _Key("HASH: message id of a follower -> id of the message whose result it gets.")

    def followers(self, message: str) -> str:
        """LIST: ids of the messages that get the result of this one."""
        return f"{self.prefix}followers:{message}"

    evictions = _Key("ZSET: dedup scope -> µs when its head exceeds the dedup timeout.")
    verdicts = _Key("HASH: verdict -> how often it was given; most of ``accept`` is counted in ``state``.")
    evicted = _Key(
        "CHANNEL: claim number, ``/``, message id, zero byte, dedup scope; of a run that lost its lock."
    )


def every_evicted(environment: str, key_prefix: str = "") -> str:
    """Return the pattern of the channels :attr:`PartitionKeys.evicted` of all partitions."""
    start = "".join(f"\\{each}" if each in "*?[]\\" else each for each in key_prefix)
    return f"{start}dq:{{{environment}/*}}:evicted"


def beat_state(environment: str, name: str, key_prefix: str = "") -> str:
    """HASH: state of the elected beats with one name: the token of the leader, the ticks of each entry."""
    return f"{key_prefix}dq:{environment}:beat:{name}"


def transient_prefix(environment: str, key_prefix: str = "") -> str:
    """The beginning of the keys of transient queues, such as reply queues."""
    return f"{key_prefix}dq:{environment}:"


def queue_registry(environment: str, key_prefix: str = "") -> str:
    """SET: the names of all queues that were ever declared in the environment; in no partition's slot."""
    return f"{key_prefix}dq:{environment}:queues"


def audit_stream(environment: str, key_prefix: str = "") -> str:
    """STREAM: changes that were made through ``app.dq``, some 10,000 of them; in no partition's slot."""
    return f"{key_prefix}dq:{environment}:audit"


def history_stream(environment: str, queue: str = "<queue>", key_prefix: str = "") -> str:
    """STREAM: samples of the counters of a queue, of the last hour in which a program looked at it."""
    return f"{key_prefix}dq:{environment}:history:{queue}"


@dataclasses.dataclass(frozen=True)
class MigrationKeys:
    """The keys of ``celery dq migrate`` on the stock broker; `prefix` is kombu's ``global_keyprefix``."""

    prefix: str = ""

    @property
    def state(self) -> str:
        """HASH: target, producer, and ``sent:<queue>`` -> messages of the queue that the target has."""
        return f"{self.prefix}dq:migration:state"

    @property
    def arrived(self) -> str:
        """HASH: ``consumer`` of migrations from tenant brokers to here, and their batches; expires."""
        return f"{self.prefix}dq:migration:arrived"

    def staged(self, queue: str) -> str:
        """LIST: messages that were taken from the lists of ``queue``, until the target has them."""
        return f"{self.prefix}dq:migration:staged:{queue}"


@dataclasses.dataclass(frozen=True)
class DedupKeys:
    """The keys of the dedup coordinator for other brokers. All are in one slot.

    Attributes:
        environment: ``online`` or ``sandbox``.
        key_prefix: As in :class:`PartitionKeys`.
    """

    environment: str
    key_prefix: str = ""

    @property
    def prefix(self) -> str:
        """Common prefix of all keys."""
        return f"{self.key_prefix}dq:{{{self.environment}/dedup}}:"

    def dedup_lock(self, key: str) -> str:
        """HASH: head, heir, tail -> packed call, followed -> JSON; expires with the last lease."""
        return f"{self.prefix}lock:{quote(key, safe='')}"

    def verdicts(self, queue: str) -> str:
        """HASH: verdict -> how often it was given to calls of the queue."""
        return f"{self.prefix}verdicts:{quote(queue, safe='')}"

    def declined(self, task: str) -> str:
        """STRING: id of the task whose result a declined task waits for; expires after a day."""
        return f"{self.prefix}declined:{task}"

    @property
    def tokens(self) -> str:
        """STRING: the last fencing token."""
        return self.prefix + "tokens"

    @property
    def channel(self) -> str:
        """PUB/SUB: prefix of an owner's channel; a message says that its call may start or was replaced."""
        return self.prefix + "turn:"
