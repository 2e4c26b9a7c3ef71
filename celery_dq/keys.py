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

        ``epoch`` is the fencing token of a singleton queue, whose ``leader`` holds it; ``last_epoch`` that of
        a fence that has ended. ``partitions`` is the map of the queue, ``spreads`` the tenants in several
        partitions, ``sealed`` the seq at which both came, ``opened`` the version after which no tenant
        arrives.

        The counters are in :data:`~celery_dq.inspector.queue_counters.COUNTERS`, beside ``waits_alone``,
        ``waits_in_line`` (claimed messages) and ``discards_claimed``.
        """
        return self.prefix + "state"

    @property
    def messages(self) -> str:
        """HASH: message id -> record; for a settled message only a zero byte and its consumer."""
        return self.prefix + "messages"

    def tenant(self, tenant: str) -> str:
        """ZSET: message id -> score, of the waiting messages of ``tenant``, unless one is in ``single``."""
        return f"{self.prefix}tenant:{tenant}"

    @property
    def single(self) -> str:
        """HASH: tenant -> score (8 bytes, a double) and id of its only waiting message."""
        return self.prefix + "single"

    @property
    def turn(self) -> str:
        """ZSET: tenant -> start tag in virtual time; these may be served now."""
        return self.prefix + "turn"

    @property
    def throttled(self) -> str:
        """ZSET: tenant -> µs of its next allowed time."""
        return self.prefix + "throttled"

    @property
    def at_concurrency(self) -> str:
        """ZSET: tenant -> 0; at its concurrency, with backlog."""
        return self.prefix + "at_concurrency"

    @property
    def paused(self) -> str:
        """ZSET: tenant -> 0; paused, with backlog."""
        return self.prefix + "paused"

    @property
    def resource_sets(self) -> str:
        """ZSET: set of resources with a backlog -> sequence time since when."""
        return self.prefix + "resource_sets"

    def rotation(self, resource: str) -> str:
        """ZSET: set with a backlog, or the resource itself -> sequence time of its last turn."""
        return f"{self.prefix}rotation:{resource}"

    @property
    def finish_tags(self) -> str:
        """ZSET: tenant -> finish tag ahead of virtual time, of tenants not in ``turn`` (see ``floor``)."""
        return self.prefix + "finish_tags"

    @property
    def limiter(self) -> str:
        """ZSET: tenant -> theoretical arrival time of its rate limit, µs; collected once it has passed."""
        return self.prefix + "limiter"

    @property
    def running(self) -> str:
        """HASH: tenant -> slots taken, with counts of claims while it has a backlog; no field means none."""
        return self.prefix + "running"

    @property
    def quotas(self) -> str:
        """HASH: ``t:<tenant>``, ``default`` or ``config`` -> packed quota."""
        return self.prefix + "quotas"

    @property
    def quota_info(self) -> str:
        """HASH: field of ``quotas`` -> ``<µs> <by>``, when and by which worker or user it was set."""
        return self.prefix + "quota_info"

    @property
    def config_before(self) -> str:
        """ZSET: packed quota of settings -> µs when it was replaced; expires."""
        return self.prefix + "config_before"

    @property
    def pauses(self) -> str:
        """ZSET: tenant -> µs since when it is paused, with backlog or without."""
        return self.prefix + "pauses"

    @property
    def pause_ends(self) -> str:
        """ZSET: tenant -> µs when its pause ends by itself."""
        return self.prefix + "pause_ends"

    @property
    def arriving(self) -> str:
        """ZSET: tenant that moves to this partition, and is not served yet -> µs since when."""
        return self.prefix + "arriving"

    @property
    def arrived(self) -> str:
        """SET: tenants that have moved to this partition, until the end of the change."""
        return self.prefix + "arrived"

    @property
    def outbox(self) -> str:
        """LIST: number, tenant, then a packed entry for each of its messages that move elsewhere now."""
        return self.prefix + "outbox"

    @property
    def imported(self) -> str:
        """HASH: number of another partition -> number of the last outbox from there."""
        return self.prefix + "imported"

    @property
    def delayed(self) -> str:
        """ZSET: message id -> due time, µs."""
        return self.prefix + "delayed"

    @property
    def discards(self) -> str:
        """ZSET: message id -> start tag among the tenants' discards, of messages that will not run."""
        return self.prefix + "discards"

    @property
    def discard_tags(self) -> str:
        """ZSET: tenant -> start tag of its next discard; collected once the discards have passed it."""
        return self.prefix + "discard_tags"

    @property
    def reasons(self) -> str:
        """HASH: message id -> why it was discarded."""
        return self.prefix + "reasons"

    @property
    def deliveries(self) -> str:
        """HASH: message id -> deliveries that ended in a crash; no field means none."""
        return self.prefix + "deliveries"

    @property
    def unreadable(self) -> str:
        """HASH: ``state|<field>`` or ``waiting|<tenant>`` -> what a script found there and could not read."""
        return self.prefix + "unreadable"

    @property
    def leases(self) -> str:
        """ZSET: consumer -> deadline, µs."""
        return self.prefix + "leases"

    def reap_grace(self, consumer: str) -> str:
        """STRING: µs until when this consumer, which renewed its lease late, reaps no other consumer."""
        return f"{self.prefix}reap_grace:{consumer}"

    def held(self, consumer: str) -> str:
        """HASH: message id -> packed claim number, score, claimed at, flags, tenant."""
        return f"{self.prefix}held:{consumer}"

    @property
    def wake(self) -> str:
        """LIST: at most one wake-up, for the consumers that wait for work."""
        return self.prefix + "wake"

    @property
    def woken(self) -> str:
        """CHANNEL: number of consumers, when ``wake`` has got a wake-up; on a Redis Cluster only."""
        return self.prefix + "woken"

    @property
    def leader(self) -> str:
        """HASH: token, who, since, until (µs), clean; the last term of an election without ZooKeeper."""
        return self.prefix + "leader"

    @property
    def candidates(self) -> str:
        """ZSET: candidate for the leadership -> time of its last look, in seconds."""
        return self.prefix + "candidates"

    @property
    def vacant(self) -> str:
        """LIST: at most one wake-up, for the candidates that wait to be elected."""
        return self.prefix + "vacant"

    @property
    def tombstones(self) -> str:
        """ZSET: task id -> expiry, µs; cancelled before it was published."""
        return self.prefix + "tombstones"

    def producer(self, producer: str) -> str:
        """STRING: the last sequence that was accepted from ``producer``."""
        return f"{self.prefix}producer:{producer}"

    @property
    def dead(self) -> str:
        """HASH: message id -> record, of the dead letters."""
        return self.prefix + "dead"

    @property
    def dead_info(self) -> str:
        """HASH: message id -> JSON: reason, worker, at, deliveries, tenant, task."""
        return self.prefix + "dead_info"

    @property
    def dead_index(self) -> str:
        """ZSET: message id -> µs when it became a dead letter."""
        return self.prefix + "dead_index"

    @property
    def dedup_locks(self) -> str:
        """HASH: dedup scope -> packed since, claim number, timeout, marks, head, heir, tail."""
        return self.prefix + "dedup_locks"

    @property
    def dedup_members(self) -> str:
        """HASH: message id -> dedup scope, of every head, heir and tail."""
        return self.prefix + "dedup_members"

    @property
    def blocked(self) -> str:
        """ZSET: message id -> score with which it will wait after the head of its dedup key has ended."""
        return self.prefix + "blocked"

    @property
    def following(self) -> str:
        """HASH: message id of a follower -> id of the message whose result it gets."""
        return self.prefix + "following"

    def followers(self, message: str) -> str:
        """LIST: ids of the messages that get the result of this one."""
        return f"{self.prefix}followers:{message}"

    @property
    def evictions(self) -> str:
        """ZSET: dedup scope -> µs when its head exceeds the dedup timeout."""
        return self.prefix + "evictions"

    @property
    def verdicts(self) -> str:
        """HASH: verdict -> how often it was given; most of ``accept`` is counted in ``state``."""
        return self.prefix + "verdicts"

    @property
    def evicted(self) -> str:
        """CHANNEL: claim number, ``/``, message id, zero byte, dedup scope; of a run that lost its lock."""
        return self.prefix + "evicted"


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
