"""The tables of all settings of celery-dq, and the frozen objects that are made from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_dq.duration import SECOND_US
from celery_dq.options.allocation import ALLOCATED, ALLOCATION_SETTINGS, AllocationOptions
from celery_dq.options.buffer import BUFFER_SETTINGS, BufferOptions
from celery_dq.options.metrics import METRICS_SETTINGS, MetricsOptions
from celery_dq.options.publishing import PUBLISHING_SETTINGS, PublishingOptions
from celery_dq.options.quota import UNLIMITED, Quota
from celery_dq.options.schema import Kind, Setting
from celery_dq.options.singleton import ELECTION_SETTINGS, SingletonOptions
from celery_dq.options.web import WEB_SETTINGS, WebOptions

__all__ = ["QUEUE_SETTINGS", "SETTINGS", "STRICT_HEAD_START_US", "Options", "QueueOptions"]

# A head start of 31 years per step gives strict priority, because no message waits that long. Nine steps
# subtracted from a time in microseconds are still exact in a double.
STRICT_HEAD_START_US = 10**15

_DAY_US = 86_400 * SECOND_US

_PRIORITY_AGING = Setting(
    "dq_priority_aging",
    Kind.DURATION,
    None,
    "Waiting time that equals one step of priority, so that low ones are not starved; None is strict.",
    low=1_000,
    high=366 * _DAY_US,
    optional=True,
)
_MAX_DELIVERIES = Setting(
    "dq_max_deliveries",
    Kind.WHOLE,
    5,
    "Number of lost workers after which a message becomes a dead letter; other deliveries do not count.",
    low=1,
    high=1_000_000,
)
#: Most partitions of a queue.
MAX_PARTITIONS = 4096
_PARTITIONS = Setting(
    "dq_partitions",
    Kind.WHOLE,
    1,
    "Number of partitions of the queue; each tenant lives in one of them.",
    low=1,
    high=MAX_PARTITIONS,
)
_SPREAD_ABOVE = Setting(
    "dq_spread_above_per_s",
    Kind.WHOLE,
    None,
    "Rate of a tenant's own quota, per second, for each partition in which it then lives; None spreads none.",
    low=1,
    high=100_000,
    optional=True,
)

SETTINGS = (
    Setting(
        "dq_environment",
        Kind.TEXT,
        "online",
        "Namespace of all stored data.",
        choices=("online", "sandbox"),
    ),
    Setting("dq_app", Kind.TEXT, "", "Celery app of a Django project, such as 'shop.celery:app'."),
    Setting("dq_key_prefix", Kind.TEXT, "", "Prefix of all keys in Redis."),
    Setting(
        "dq_lease",
        Kind.DURATION,
        15 * SECOND_US,
        "Silence after which a worker counts as dead and its messages return to their places.",
        low=SECOND_US,
        high=3_600 * SECOND_US,
    ),
    _MAX_DELIVERIES,
    _PRIORITY_AGING,
    Setting(
        "dq_queues",
        Kind.TABLE,
        {},
        "Per queue: the parts of a quota, priority_aging, max_deliveries, partitions, spread_above_per_s, "
        "allocated.",
    ),
    Setting(
        "dq_default_quota", Kind.TABLE, {}, "Quota of each tenant, in queues without a quota of their own."
    ),
    Setting(
        "dq_dead_letter_failures",
        Kind.FLAG,
        False,
        "Whether tasks that failed for good (retries exhausted, rejected) are kept as dead letters.",
    ),
    Setting(
        "dq_otel",
        Kind.FLAG,
        False,
        "Whether the buffer and workers make spans of OpenTelemetry; needs the extra ``otel``.",
    ),
    Setting(
        "dq_dead_letter_retention",
        Kind.DURATION,
        None,
        "Age after which the heartbeat of a worker deletes a dead letter; None keeps it.",
        low=60 * SECOND_US,
        high=3_660 * _DAY_US,
        optional=True,
    ),
    Setting(
        "dq_dead_letter_limit",
        Kind.WHOLE,
        None,
        "Number of dead letters of a queue beyond which the heartbeat of a worker deletes the oldest ones. "
        "Each of N partitions keeps limit / N of them, rounded up, so a busy partition deletes earlier.",
        low=1,
        high=100_000_000,
        optional=True,
    ),
    Setting(
        "dq_confirm_replicas",
        Kind.WHOLE,
        0,
        "Number of replicas that must confirm a message before its publish counts as done; 0 asks none.",
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
        "Work, in measured service time, that a worker claims beyond its free slots; 0 claims none.",
        low=0,
        high=10 * SECOND_US,
    ),
    Setting(
        "dq_allow_eviction",
        Kind.FLAG,
        False,
        "Whether to run on a Redis whose maxmemory-policy may delete messages.",
    ),
    Setting(
        "dq_producer_marker_ttl",
        Kind.DURATION,
        3_600 * SECOND_US,
        "How long the broker keeps an idle producer's last sequence, to recognise a resent batch.",
        low=60 * SECOND_US,
        high=30 * _DAY_US,
    ),
    Setting(
        "dq_dedup_url",
        Kind.TEXT,
        "",
        "Redis with the dedup locks of workers on another broker; '' is that of the broker or the results.",
    ),
    Setting(
        "dq_tombstone_ttl",
        Kind.DURATION,
        3 * 3_600 * SECOND_US,
        "How long the cancellation of a task that is not published yet is kept.",
        low=SECOND_US,
        high=30 * _DAY_US,
    ),
    Setting(
        "dq_probe_file",
        Kind.TEXT,
        "",
        "File that a worker keeps for 'celery dq alive' and 'ready'; %n and %h as in --logfile. '' is none.",
    ),
    *ELECTION_SETTINGS,
    *ALLOCATION_SETTINGS,
    *BUFFER_SETTINGS,
    *PUBLISHING_SETTINGS,
    *METRICS_SETTINGS,
    *WEB_SETTINGS,
)

# The keys of dq_queues[name] besides the parts of a quota; there they have no prefix.
QUEUE_SETTINGS = (_PRIORITY_AGING, _MAX_DELIVERIES, _PARTITIONS, _SPREAD_ABOVE, ALLOCATED)


@dataclass(frozen=True)
class QueueOptions:
    """Options of one queue.

    Attributes:
        name: Name of the queue; "" for all queues without their own section.
        quota: Quota of each tenant without its own quota; default unlimited.
        names_quota: Whether the settings name a part of a quota for the queue; default False.
        priority_aging_us: Microseconds of waiting that equal one step of priority; None (default) is strict
            priority.
        max_deliveries: Number of lost workers after which a message becomes a dead letter; default 5.
        partitions: Number of partitions that the queue gets when it is first declared; default 1.
        spread_above_per_s: Rate of a tenant's own quota for each partition in which it then lives; None
            (default) spreads no tenant by its rate.
        allocated: Whether its partitions are allocated to workers; None (default) is whether it has several.
    """

    name: str = ""
    quota: Quota = UNLIMITED
    names_quota: bool = False
    priority_aging_us: int | None = None
    max_deliveries: int = 5
    partitions: int = 1
    spread_above_per_s: int | None = None
    allocated: bool | None = None

    @property
    def head_start_us(self) -> int:
        """Microseconds that one step of priority subtracts from a message's score."""
        return STRICT_HEAD_START_US if self.priority_aging_us is None else self.priority_aging_us


@dataclass(frozen=True)
class Options:
    """All settings in checked form. The transport gets them through its ``transport_options``.

    Immutable, hashable and picklable. Durations are whole microseconds (``_us``).

    Attributes:
        environment: ``dq_environment``, namespace of all stored data: ``online`` (default) or ``sandbox``.
        key_prefix: ``dq_key_prefix``, prefix of all keys; default "".
        lease_us: ``dq_lease``, silence after which a worker counts as dead; default 15 s.
        dead_letter_failures: ``dq_dead_letter_failures``, whether failed tasks become dead letters; default
            False.
        otel: ``dq_otel``, whether the buffer and workers make spans of OpenTelemetry; default False.
        dead_letter_retention_us: ``dq_dead_letter_retention``, age after which a dead letter is deleted; None
            (default) is never.
        dead_letter_limit: ``dq_dead_letter_limit``, number of dead letters that each partition of a queue
            keeps; None (default) is all.
        confirm_replicas: ``dq_confirm_replicas``, number of replicas that must confirm a push; default 0.
        watchdog_us: ``dq_watchdog``, time without a claim after which a worker reconnects; default 60 s, 0 is
            off.
        claim_ahead_us: ``dq_claim_ahead``, service time that is claimed ahead; default 50 ms.
        allow_eviction: ``dq_allow_eviction``, whether Redis may evict keys; default False.
        producer_marker_ttl_us: ``dq_producer_marker_ttl``, how long a resent batch is recognised; default 1
            h.
        tombstone_ttl_us: ``dq_tombstone_ttl``, how long an early cancellation is kept; default 3 h.
        probe_file: ``dq_probe_file``, the file that a worker keeps for probes; default "".
        dedup_url: ``dq_dedup_url``, Redis of the dedup locks on other brokers; default "".
        buffer: ``dq_buffer`` and ``dq_buffer_…``, the buffered producer; default off.
        publishing: ``dq_publish_timeout`` and ``dq_breaker_…``, for calls that are not buffered.
        metrics: ``dq_metrics_…``; default off in workers.
        web: ``dq_web_…``, the dashboard.
        defaults: Options of a queue that ``dq_queues`` does not name: ``dq_default_quota``,
            ``dq_priority_aging`` (strict), ``dq_max_deliveries`` (5).
        queues: ``dq_queues``, one section per named queue, in order of name; default none.
        singletons: ``dq_singleton_queues``, one section per singleton queue; default none.
        election: ``dq_election``, URL of the server that holds elections; "" (default) is the broker.
        election_session_us: ``dq_election_session``, silence that ends a leadership; default 10 s.
        allocation: ``dq_allocation`` and ``dq_allocation_…``; default off.
        beat_scheduler: ``dq_beat_scheduler``, the scheduler that the elected beat wraps.
        beat_name: ``dq_beat_name``, name of the shared schedule; "" (default) is the app's name.
        election_options: ``dq_election_options``, credentials and TLS for ZooKeeper.
    """

    environment: str = "online"
    key_prefix: str = ""
    lease_us: int = 15 * SECOND_US
    dead_letter_failures: bool = False
    otel: bool = False
    dead_letter_retention_us: int | None = None
    dead_letter_limit: int | None = None
    confirm_replicas: int = 0
    watchdog_us: int = 60 * SECOND_US
    claim_ahead_us: int = 50_000
    allow_eviction: bool = False
    producer_marker_ttl_us: int = 3_600 * SECOND_US
    tombstone_ttl_us: int = 3 * 3_600 * SECOND_US
    probe_file: str = ""
    dedup_url: str = ""
    buffer: BufferOptions = field(default_factory=BufferOptions)
    publishing: PublishingOptions = field(default_factory=PublishingOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    web: WebOptions = field(default_factory=WebOptions)
    defaults: QueueOptions = field(default_factory=QueueOptions)
    queues: tuple[QueueOptions, ...] = ()
    singletons: tuple[SingletonOptions, ...] = ()
    election: str = ""
    election_session_us: int = 10 * SECOND_US
    allocation: AllocationOptions = field(default_factory=AllocationOptions)
    beat_scheduler: str = "celery.beat:Scheduler"
    beat_name: str = ""
    election_options: tuple[tuple[str, Any], ...] = field(default=(), hash=False)

    def singleton(self, name: str) -> SingletonOptions:
        """Return the options of singleton queue `name`; the defaults without a section."""
        return next((each for each in self.singletons if each.name == name), SingletonOptions(name))

    def is_allocated(self, name: str, partitions: int) -> bool:
        """Return whether the partitions of a queue are allocated to workers.

        Args:
            name: Name of the queue.
            partitions: Its number of partitions, as the broker has it.
        """
        allocated = self.queue(name).allocated
        is_singleton = any(each.name == name for each in self.singletons)
        return (
            self.allocation.enabled
            and not is_singleton
            and (partitions > 1 if allocated is None else allocated)
        )

    def queue(self, name: str) -> QueueOptions:
        """Return the section of queue `name`; the defaults without a section."""
        for section in self.queues:
            if section.name == name:
                return section
        return self.defaults
