"""Every option of celery-dq, checked: the tables, and the frozen objects made from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_dq.duration import SECOND_US
from celery_dq.options.buffer import BUFFER_SETTINGS, BufferOptions
from celery_dq.options.publishing import PUBLISHING_SETTINGS, PublishingOptions
from celery_dq.options.quota import UNLIMITED, Quota
from celery_dq.options.schema import Kind, Setting
from celery_dq.options.singleton import ELECTION_SETTINGS, SingletonOptions

__all__ = ["QUEUE_SETTINGS", "SETTINGS", "STRICT_HEAD_START_US", "Options", "QueueOptions"]

# No message waits 31 years, so this head start cannot be outlived: strict priority. Nine of them
# taken from a time in microseconds are still exact in a double.
STRICT_HEAD_START_US = 10**15

_DAY_US = 86_400 * SECOND_US

_PRIORITY_AGING = Setting(
    "dq_priority_aging",
    Kind.DURATION,
    None,
    "Waiting time that outweighs one step of priority, so that none is starved; None is strict priority.",
    low=1_000,
    high=366 * _DAY_US,
    optional=True,
)
_MAX_DELIVERIES = Setting(
    "dq_max_deliveries",
    Kind.WHOLE,
    5,
    "Lost workers after which a message is a dead letter; deliveries that ended otherwise do not count.",
    low=1,
    high=1_000_000,
)

SETTINGS = (
    Setting(
        "dq_environment",
        Kind.TEXT,
        "online",
        "Namespace of everything that is stored.",
        choices=("online", "sandbox"),
    ),
    Setting("dq_app", Kind.TEXT, "", "Where a Django project's Celery app is, such as 'shop.celery:app'."),
    Setting("dq_key_prefix", Kind.TEXT, "", "Put in front of every key."),
    Setting(
        "dq_lease",
        Kind.DURATION,
        15 * SECOND_US,
        "Silence after which a worker is taken for dead and its messages go back to their places.",
        low=SECOND_US,
        high=3_600 * SECOND_US,
    ),
    _MAX_DELIVERIES,
    _PRIORITY_AGING,
    Setting("dq_queues", Kind.TABLE, {}, "Per queue: the parts of a quota, priority_aging, max_deliveries."),
    Setting(
        "dq_default_quota", Kind.TABLE, {}, "Quota of every tenant of every queue that says nothing else."
    ),
    Setting(
        "dq_dead_letter_failures",
        Kind.FLAG,
        False,
        "Whether tasks that failed for good (retries exhausted, rejected) are kept as dead letters.",
    ),
    Setting(
        "dq_confirm_replicas",
        Kind.WHOLE,
        0,
        "Replicas that must have a message before its publication counts as done; 0 asks none.",
        low=0,
        high=100,
    ),
    Setting(
        "dq_watchdog",
        Kind.DURATION,
        60 * SECOND_US,
        "Time with backlog, free slots and no claim after which a worker reconnects, then exits; 0 is off.",
        low=5 * SECOND_US,
        high=_DAY_US,
        zero_is_off=True,
    ),
    Setting(
        "dq_claim_ahead",
        Kind.DURATION,
        50_000,
        "Work, in measured service time, that a worker takes beyond its free slots; 0 takes none.",
        low=0,
        high=10 * SECOND_US,
    ),
    Setting(
        "dq_allow_eviction",
        Kind.FLAG,
        False,
        "Whether to run on a Redis whose maxmemory-policy may throw messages away.",
    ),
    Setting(
        "dq_producer_marker_ttl",
        Kind.DURATION,
        3_600 * SECOND_US,
        "How long the broker remembers a silent producer's last sequence, to recognise a resent batch.",
        low=60 * SECOND_US,
        high=30 * _DAY_US,
    ),
    Setting(
        "dq_dedup_url",
        Kind.TEXT,
        "",
        "Redis where workers on another broker keep dedup claims; empty: that of the broker or the results.",
    ),
    Setting(
        "dq_tombstone_ttl",
        Kind.DURATION,
        3 * 3_600 * SECOND_US,
        "How long the cancellation of a task that is not in the queue yet is remembered.",
        low=SECOND_US,
        high=30 * _DAY_US,
    ),
    *ELECTION_SETTINGS,
    *BUFFER_SETTINGS,
    *PUBLISHING_SETTINGS,
)

# What dq_queues[name] takes besides the parts of a quota. The names lack the prefix there.
QUEUE_SETTINGS = (_PRIORITY_AGING, _MAX_DELIVERIES)


@dataclass(frozen=True)
class QueueOptions:
    """What holds for one queue.

    :param name: the queue; "" for every queue that has no section of its own.
    :param quota: of each tenant that has none of its own; default unlimited.
    :param priority_aging_us: microseconds of waiting that outweigh one priority step; None (default)
        is strict priority.
    :param max_deliveries: crash deliveries after which a message is a dead letter; default 5.
    """

    name: str = ""
    quota: Quota = UNLIMITED
    priority_aging_us: int | None = None
    max_deliveries: int = 5

    @property
    def head_start_us(self) -> int:
        """Microseconds that one step of priority is worth in a message's score."""
        return STRICT_HEAD_START_US if self.priority_aging_us is None else self.priority_aging_us


@dataclass(frozen=True)
class Options:
    """All settings, checked; what the transport finds in ``transport_options["dq"]``.

    Immutable, hashable and picklable. Durations are whole microseconds (``_us``).

    :param environment: ``dq_environment``, namespace of everything: ``online`` (default), ``sandbox``.
    :param key_prefix: ``dq_key_prefix``, in front of every key; default "".
    :param lease_us: ``dq_lease``, silence after which a worker is taken for dead; default 15 s.
    :param dead_letter_failures: ``dq_dead_letter_failures``, keep tasks that failed for good; default False.
    :param confirm_replicas: ``dq_confirm_replicas``, replicas a push waits for; default 0.
    :param watchdog_us: ``dq_watchdog``, idle time that is suspicious; default 60 s, 0 is off.
    :param claim_ahead_us: ``dq_claim_ahead``, service time claimed ahead; default 50 ms.
    :param allow_eviction: ``dq_allow_eviction``, accept a Redis that may evict; default False.
    :param producer_marker_ttl_us: ``dq_producer_marker_ttl``, memory for resent batches; default 1 h.
    :param tombstone_ttl_us: ``dq_tombstone_ttl``, memory for early cancellations; default 3 h.
    :param dedup_url: ``dq_dedup_url``, Redis of the dedup claims on other brokers; default "".
    :param buffer: ``dq_buffer`` and ``dq_buffer_…``, the buffered producer; default off.
    :param publishing: ``dq_publish_timeout`` and ``dq_breaker_…``, of calls that are not buffered.
    :param defaults: what holds for a queue that ``dq_queues`` does not name: ``dq_default_quota``,
        ``dq_priority_aging`` (strict), ``dq_max_deliveries`` (5).
    :param queues: ``dq_queues``, a section per named queue, in order of name; default none.
    :param singletons: ``dq_singleton_queues``, a section per queue with a leader; default none.
    :param election: ``dq_election``, who holds the elections; "" (default) is the broker.
    :param election_session_us: ``dq_election_session``, silence that ends a leadership; default 10 s.
    :param beat_scheduler: ``dq_beat_scheduler``, what the elected beat wraps.
    :param beat_name: ``dq_beat_name``, whose schedule it is; "" (default) is the app's name.
    :param election_options: ``dq_election_options``, how to talk to ZooKeeper.
    """

    environment: str = "online"
    key_prefix: str = ""
    lease_us: int = 15 * SECOND_US
    dead_letter_failures: bool = False
    confirm_replicas: int = 0
    watchdog_us: int = 60 * SECOND_US
    claim_ahead_us: int = 50_000
    allow_eviction: bool = False
    producer_marker_ttl_us: int = 3_600 * SECOND_US
    tombstone_ttl_us: int = 3 * 3_600 * SECOND_US
    dedup_url: str = ""
    buffer: BufferOptions = field(default_factory=BufferOptions)
    publishing: PublishingOptions = field(default_factory=PublishingOptions)
    defaults: QueueOptions = field(default_factory=QueueOptions)
    queues: tuple[QueueOptions, ...] = ()
    singletons: tuple[SingletonOptions, ...] = ()
    election: str = ""
    election_session_us: int = 10 * SECOND_US
    beat_scheduler: str = "celery.beat:Scheduler"
    beat_name: str = ""
    election_options: tuple[tuple[str, Any], ...] = field(default=(), hash=False)

    def singleton(self, name: str) -> SingletonOptions:
        """What holds for queue `name` when it has a leader."""
        return next((each for each in self.singletons if each.name == name), SingletonOptions(name))

    def queue(self, name: str) -> QueueOptions:
        """The section of queue `name`; for one that has none, the defaults."""
        for section in self.queues:
            if section.name == name:
                return section
        return self.defaults
