"""Every key that celery-dq keeps in Redis is spelled here, and nowhere else.

All keys of one partition share the prefix ``<key_prefix>dq:{<environment>/<queue>/<partition>}:``. What
stands between the braces is their Redis Cluster hash tag, so that a script may touch all of them. The scripts
are given one key, ``state``, and derive the others from it by the names below.
"""

from __future__ import annotations

import dataclasses
import re
from urllib.parse import quote, unquote

from celery_dq.errors import ConfigurationError

ENVIRONMENTS = ("online", "sandbox")

#: Fields of the hash ``quotas`` that belong to no tenant.
DEFAULT_QUOTA = "default"
CONFIG_QUOTA = "config"

_PARTITION = re.compile(r"dq:\{(?P<environment>[a-z]+)/(?P<queue>[^/{}]+)/(?P<partition>[0-9]+)\}:")


def quota_field(tenant: str) -> str:
    """The field of the hash ``quotas`` that holds the quota of ``tenant``."""
    return f"t:{tenant}"


@dataclasses.dataclass(frozen=True)
class PartitionKeys:
    """The keys of one partition of one queue.

    :param environment: ``online`` or ``sandbox``.
    :param queue: the Celery queue; percent-encoded in the keys outside ``[A-Za-z0-9_.-]``.
    :param partition: which slice of the queue.
    :param key_prefix: what the user wants in front of all keys; braces are refused, they would move
        the hash tag.
    """

    environment: str
    queue: str
    partition: int = 0
    key_prefix: str = ""
    prefix: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.environment not in ENVIRONMENTS:
            raise ConfigurationError(
                f"dq_environment must be 'online' or 'sandbox', not {self.environment!r}"
            )
        if "{" in self.key_prefix or "}" in self.key_prefix:
            raise ConfigurationError(
                f"dq_key_prefix may not hold braces, they mark the cluster hash tag: {self.key_prefix!r}"
            )
        queue = quote(self.queue, safe="").replace("~", "%7E")
        tag = f"{self.environment}/{queue}/{self.partition:d}"
        object.__setattr__(self, "prefix", f"{self.key_prefix}dq:{{{tag}}}:")

    @classmethod
    def parse(cls, key: str) -> PartitionKeys | None:
        """The partition that ``key`` belongs to, or None when it is not one of ours."""
        found = _PARTITION.search(key)
        if found is None or found["environment"] not in ENVIRONMENTS:
            return None
        return cls(
            found["environment"], unquote(found["queue"]), int(found["partition"]), key[: found.start()]
        )

    @property
    def state(self) -> str:
        """HASH: seq, v (virtual time), claim, held, head, appt, appt_owner, evict, floor, accepted."""
        return self.prefix + "state"

    @property
    def messages(self) -> str:
        """HASH: message id -> record; of a settled one only a zero byte and its consumer is left."""
        return self.prefix + "messages"

    def tenant(self, tenant: str) -> str:
        """ZSET: message id -> score, what waits for ``tenant``, unless that is one ``sole`` message."""
        return f"{self.prefix}tenant:{tenant}"

    @property
    def sole(self) -> str:
        """HASH: tenant -> score (8 bytes, a double) and id of the only message that waits for it."""
        return self.prefix + "sole"

    @property
    def turn(self) -> str:
        """ZSET: tenant -> start tag in virtual time; these may be served now."""
        return self.prefix + "turn"

    @property
    def throttled(self) -> str:
        """ZSET: tenant -> µs when its next token is due."""
        return self.prefix + "throttled"

    @property
    def limited(self) -> str:
        """ZSET: tenant -> 0; at its concurrency, with backlog."""
        return self.prefix + "limited"

    @property
    def parked(self) -> str:
        """ZSET: tenant -> 0; paused, with backlog."""
        return self.prefix + "parked"

    @property
    def finish(self) -> str:
        """ZSET: tenant -> finish tag ahead of virtual time, of who is not in ``turn`` (see ``floor``)."""
        return self.prefix + "finish"

    @property
    def limiter(self) -> str:
        """ZSET: tenant -> theoretical arrival time of its rate limit, µs; collected once it has passed."""
        return self.prefix + "limiter"

    @property
    def running(self) -> str:
        """HASH: tenant -> slots taken; no field means none."""
        return self.prefix + "running"

    @property
    def quotas(self) -> str:
        """HASH: ``t:<tenant>``, ``default`` or ``config`` -> packed quota."""
        return self.prefix + "quotas"

    @property
    def delayed(self) -> str:
        """ZSET: message id -> due time, µs."""
        return self.prefix + "delayed"

    @property
    def discards(self) -> str:
        """ZSET: message id -> when it was discarded, µs; waiting to be delivered flagged."""
        return self.prefix + "discards"

    @property
    def reasons(self) -> str:
        """HASH: message id -> why it was discarded."""
        return self.prefix + "reasons"

    @property
    def deliveries(self) -> str:
        """HASH: message id -> deliveries that ended in a crash; no field means none."""
        return self.prefix + "deliveries"

    @property
    def leases(self) -> str:
        """ZSET: consumer -> deadline, µs."""
        return self.prefix + "leases"

    def lenient(self, consumer: str) -> str:
        """STRING: µs until when this consumer, whose lease was all but over, takes nobody for dead."""
        return f"{self.prefix}lenient:{consumer}"

    def held(self, consumer: str) -> str:
        """HASH: message id -> packed claim number, score, claimed at, flags, tenant."""
        return f"{self.prefix}held:{consumer}"

    @property
    def wake(self) -> str:
        """LIST: at most one token, for whoever waits for work."""
        return self.prefix + "wake"

    @property
    def leader(self) -> str:
        """HASH: token, who, since, until (µs), clean; the last term of a leadership without ZooKeeper."""
        return self.prefix + "leader"

    @property
    def candidates(self) -> str:
        """ZSET: who stands for the leadership -> when it looked last, in seconds."""
        return self.prefix + "candidates"

    @property
    def vacant(self) -> str:
        """LIST: at most one token, for whoever waits to be elected."""
        return self.prefix + "vacant"

    @property
    def tombstones(self) -> str:
        """ZSET: task id -> expiry, µs; cancelled before it came."""
        return self.prefix + "tombstones"

    def producer(self, producer: str) -> str:
        """STRING: the last sequence that was accepted from ``producer``."""
        return f"{self.prefix}producer:{producer}"

    @property
    def dead(self) -> str:
        """HASH: message id -> record, of what was given up on."""
        return self.prefix + "dead"

    @property
    def dead_info(self) -> str:
        """HASH: message id -> JSON: reason, worker, at, deliveries, tenant, task."""
        return self.prefix + "dead_info"

    @property
    def dead_index(self) -> str:
        """ZSET: message id -> when it was given up on, µs."""
        return self.prefix + "dead_index"

    @property
    def claims(self) -> str:
        """HASH: dedup scope -> packed since, claim number, timeout, marks, head, heir, tail."""
        return self.prefix + "claims"

    @property
    def claimants(self) -> str:
        """HASH: message id -> dedup scope, of every head, heir and tail."""
        return self.prefix + "claimants"

    @property
    def blocked(self) -> str:
        """ZSET: message id -> score with which it will wait once the head of its key is done."""
        return self.prefix + "blocked"

    @property
    def following(self) -> str:
        """HASH: message id of a follower -> the message whose result it gets."""
        return self.prefix + "following"

    def followers(self, message: str) -> str:
        """LIST: ids of the messages that get the result of this one."""
        return f"{self.prefix}followers:{message}"

    @property
    def evictions(self) -> str:
        """ZSET: dedup scope -> µs when its head has been running for too long."""
        return self.prefix + "evictions"

    @property
    def verdicts(self) -> str:
        """HASH: verdict -> how often it was given; but for most of ``accept``, see ``state``."""
        return self.prefix + "verdicts"

    @property
    def evicted(self) -> str:
        """CHANNEL: claim number, ``/``, message id, zero byte, dedup scope; of a run that lost its key."""
        return self.prefix + "evicted"


def every_evicted(environment: str, key_prefix: str = "") -> str:
    """Pattern of the channels :attr:`PartitionKeys.evicted` of all partitions."""
    start = "".join(f"\\{each}" if each in "*?[]\\" else each for each in key_prefix)
    return f"{start}dq:{{{environment}/*}}:evicted"


def beat_state(environment: str, name: str, key_prefix: str = "") -> str:
    """HASH: what elected beats of one name share: their leader's token, and the ticks of each entry."""
    return f"{key_prefix}dq:{environment}:beat:{name}"


def queue_registry(environment: str, key_prefix: str = "") -> str:
    """SET: the names of all queues that were ever declared in the environment. In no partition's slot."""
    return f"{key_prefix}dq:{environment}:queues"


@dataclasses.dataclass(frozen=True)
class ClaimKeys:
    """The keys of the dedup coordinator that serves other brokers than ours. One slot holds all.

    :param environment: ``online`` or ``sandbox``.
    :param key_prefix: as in :class:`PartitionKeys`.
    """

    environment: str
    key_prefix: str = ""

    @property
    def prefix(self) -> str:
        """What all of them begin with."""
        return f"{self.key_prefix}dq:{{{self.environment}/dedup}}:"

    def claim(self, key: str) -> str:
        """HASH: head, heir, tail -> packed call, followed -> JSON; expires with the last lease."""
        return f"{self.prefix}claim:{quote(key, safe='')}"

    def verdicts(self, queue: str) -> str:
        """HASH: verdict -> how often it was given to calls of the queue."""
        return f"{self.prefix}verdicts:{quote(queue, safe='')}"

    @property
    def tokens(self) -> str:
        """STRING: the last fencing token."""
        return self.prefix + "tokens"

    @property
    def channel(self) -> str:
        """PUB/SUB: in front of an owner's name; told when one of its calls may start or was replaced."""
        return self.prefix + "turn:"
