"""All settings of celery-dq, declared as the fields of frozen sections.

Names of durations end in ``_us``: they are whole microseconds. A section is immutable, hashable and
picklable. The transport gets :class:`Options` through its ``transport_options``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from celery_dq.duration import SECOND_US
from celery_dq.options.quota import UNLIMITED, Quota
from celery_dq.options.schema import section, setting, settings_of

# A head start of 31 years per step gives strict priority, because no message waits that long. Nine steps
# subtracted from a time in microseconds are still exact in a double.
STRICT_HEAD_START_US = 10**15
#: Most partitions of a queue.
MAX_PARTITIONS = 4096

_MINUTE_US = 60 * SECOND_US
_HOUR_US = 60 * _MINUTE_US
_DAY_US = 24 * _HOUR_US
_GIB = 1024**3


@dataclass(frozen=True)
class QueueOptions:
    """Options of one queue.

    Attributes:
        name: Name of the queue; "" for all queues without their own section.
        quota: Quota of each tenant without its own quota.
        names_quota: Whether the settings name a part of a quota for the queue.
    """

    name: str = ""
    quota: Quota = UNLIMITED
    names_quota: bool = False
    priority_aging_us: int | None = setting(
        "dq_priority_aging",
        None,
        "Waiting time that equals one step of priority, so that low ones are not starved; None is strict.",
        low=1_000,
        high=366 * _DAY_US,
    )
    max_deliveries: int = setting(
        "dq_max_deliveries",
        5,
        "Number of lost workers after which a message becomes a dead letter; other deliveries do not count.",
        low=1,
        high=1_000_000,
    )
    partitions: int = setting(
        "dq_partitions",
        1,
        "Number of partitions of the queue; each tenant lives in one of them.",
        low=1,
        high=MAX_PARTITIONS,
    )
    spread_above_per_s: int | None = setting(
        "dq_spread_above_per_s",
        None,
        "Rate of a tenant's own quota, per second, for each partition in which it then lives; None spreads "
        "none.",
        low=1,
        high=100_000,
    )
    allocated: bool | None = setting(
        "dq_allocated",
        None,
        "Whether dq_allocation holds for the queue; None holds for a queue with several partitions.",
    )

    @property
    def head_start_us(self) -> int:
        """Microseconds that one step of priority subtracts from a message's score."""
        return STRICT_HEAD_START_US if self.priority_aging_us is None else self.priority_aging_us


#: The keys of dq_queues[name] besides the parts of a quota; there they have no prefix.
QUEUE_SETTINGS = settings_of(QueueOptions)
_QUEUE_OPTIONS = [each.name.removeprefix("dq_") for each in QUEUE_SETTINGS]


@dataclass(frozen=True)
class SingletonOptions:
    """Options of one singleton queue.

    Attributes:
        name: Name of the queue.
    """

    name: str
    hand_over: Literal["finish", "abort"] = setting(
        "hand_over",
        "finish",
        "Whether a hand-over lets the running message end, or aborts it.",
        choices=("finish", "abort"),
    )
    grace_us: int = setting(
        "grace",
        0,
        "How long a successor waits after a leader that did not hand over, for effects without fencing.",
        high=3_600 * SECOND_US,
    )
    career: str = setting("career", "", "A subclass of Career, as 'module:name'.")


@dataclass(frozen=True)
class AllocationOptions:
    """Options of the allocation of partitions to workers."""

    enabled: bool = setting(
        "dq_allocation",
        False,
        "Whether workers share the partitions of their queues, each partition with one worker, through the "
        "ZooKeeper of dq_election.",
    )
    join_delay_us: int = setting(
        "dq_allocation_join_delay",
        3 * SECOND_US,
        "How long partitions stay where they are after a worker has joined, so that workers that start "
        "together cause one change.",
        low=0,
        high=10 * _MINUTE_US,
    )


@dataclass(frozen=True)
class BufferOptions:
    """Options of the buffered producer."""

    enabled: bool = setting(
        "dq_buffer", False, "Whether calls without their own option `buffered` are buffered."
    )
    folder: str | None = setting(
        "dq_buffer_folder",
        None,
        "Folder of buffered messages until the broker has them; '' keeps them in memory only.",
    )
    in_workers: bool = setting(
        "dq_buffer_in_workers",
        False,
        "Whether calls from tasks and from beat are buffered too.",
    )
    linger_us: int = setting(
        "dq_buffer_linger",
        5_000,
        "Time that a message waits for further messages of its batch.",
        low=0,
        high=_MINUTE_US,
    )
    batch_size: int = setting("dq_buffer_batch_size", 500, "Messages in a batch.", low=1, high=1_000)
    max_messages: int = setting(
        "dq_buffer_max_messages", 100_000, "Messages in memory; more go to disk only.", low=1
    )
    max_bytes: int = setting("dq_buffer_max_bytes", _GIB // 16, "Bytes of messages in memory.", low=64 * 1024)
    max_spill_bytes: int = setting(
        "dq_buffer_max_spill_bytes",
        _GIB,
        "Limit of dq_buffer_folder in bytes, all processes together.",
        low=4 * 1024 * 1024,
    )
    max_block_us: int = setting(
        "dq_buffer_max_block",
        SECOND_US,
        "Time that a call waits for room before it raises BufferFull; 0 raises at once.",
        low=0,
        high=_HOUR_US,
    )
    sync_every: int = setting(
        "dq_buffer_sync_every",
        0,
        "A call waits for the disk rather than being this many messages ahead of it; 1: each call; 0 is off.",
        low=0,
    )
    sync_interval_us: int = setting(
        "dq_buffer_sync_interval",
        0,
        "Time after which buffered messages are synced to disk; 0 is off.",
        low=1_000,
        high=_HOUR_US,
        zero_is_off=True,
    )
    close_timeout_us: int = setting(
        "dq_buffer_close_timeout",
        2 * SECOND_US,
        "Time that a process may take at its end to send the remaining messages.",
        low=0,
        high=_HOUR_US,
    )


@dataclass(frozen=True)
class PublishingOptions:
    """Options of calls that are not buffered."""

    timeout_us: int = setting(
        "dq_publish_timeout",
        10 * SECOND_US,
        "Time that a call which is not buffered may take, retries included; 0 sets no limit.",
        low=100_000,
        high=_HOUR_US,
        zero_is_off=True,
    )
    breaker_failures: int = setting(
        "dq_breaker_failures",
        3,
        "Failed calls in a row after which further calls fail at once for dq_breaker_pause; 0 is off.",
        low=0,
    )
    breaker_pause_us: int = setting(
        "dq_breaker_pause",
        SECOND_US,
        "Time for which calls fail at once, until one of them tries the broker again.",
        low=1_000,
        high=_HOUR_US,
    )

    @property
    def step_s(self) -> float:
        """Seconds that one step of a publish may take, a third of the timeout; 0 sets no limit."""
        return self.timeout_us / 3e6


@dataclass(frozen=True)
class OutboxOptions:
    """Options of the outbox in the databases of a Django project."""

    aliases: str = setting(
        "dq_outbox",
        "",
        "Aliases of the Django databases, with commas between them, in whose transactions a call is a row "
        "that is published after the commit; '' is off.",
    )
    opt_in: bool = setting(
        "dq_outbox_opt_in",
        False,
        "Whether only calls and tasks with the option `outbox` are rows.",
    )
    max_rows: int = setting(
        "dq_outbox_max_rows",
        1_000_000,
        "Rows of an outbox above which a call raises QueueFull.",
        low=1,
        high=1_000_000_000,
    )
    poll_us: int = setting(
        "dq_outbox_poll",
        100_000,
        "Time between two looks of the relay at an empty outbox.",
        low=1_000,
        high=_MINUTE_US,
    )

    @cached_property
    def databases(self) -> tuple[str, ...]:
        """The aliases of the databases that have an outbox."""
        return tuple(filter(None, map(str.strip, self.aliases.split(","))))


@dataclass(frozen=True)
class MetricsOptions:
    """Options of the metrics."""

    port: int | None = setting(
        "dq_metrics_port",
        None,
        "Port on which each worker serves metrics for Prometheus; None is off.",
        low=1,
        high=65_535,
    )
    host: str = setting(
        "dq_metrics_host",
        "127.0.0.1",
        "Address on which a worker serves metrics; '0.0.0.0' is all. The metrics ask for no password.",
    )
    tenants: int = setting(
        "dq_metrics_tenants",
        0,
        "Number of tenants with the largest backlogs that have metrics of their own; 0 is none.",
        low=0,
        high=200,
    )
    timeout_us: int = setting(
        "dq_metrics_timeout",
        5 * SECOND_US,
        "Time after which a request for metrics is answered without the broker's.",
        low=100_000,
        high=_MINUTE_US,
    )


@dataclass(frozen=True)
class WebOptions:
    """Options of the dashboard."""

    read_only: bool = setting(
        "dq_web_read_only",
        False,
        "Whether the dashboard refuses every change, whatever the permissions of its user.",
    )
    show_arguments: bool = setting(
        "dq_web_show_arguments",
        False,
        "Whether the dashboard shows arguments and unknown headers to users with 'view_arguments'.",
    )


@dataclass(frozen=True)
class Options:
    """All settings in checked form.

    Attributes:
        defaults: Options of a queue that ``dq_queues`` does not name.
        queues: One section per named queue, in order of name.
        singletons: One section per singleton queue.
    """

    environment: str = setting(
        "dq_environment",
        "online",
        "Namespace of all stored data.",
        choices=("online", "sandbox"),
    )
    app: str = setting("dq_app", "", "Celery app of a Django project, such as 'shop.celery:app'.")
    key_prefix: str = setting("dq_key_prefix", "", "Prefix of all keys in Redis.")
    lease_us: int = setting(
        "dq_lease",
        15 * SECOND_US,
        "Silence after which a worker counts as dead and its messages return to their places.",
        low=SECOND_US,
        high=_HOUR_US,
    )
    defaults: QueueOptions = section(QueueOptions, "max_deliveries", "priority_aging_us")
    queues: tuple[QueueOptions, ...] = setting(
        "dq_queues",
        {},
        f"Per queue: the parts of a quota, {', '.join(_QUEUE_OPTIONS)}.",
        unset=(),
    )
    default_quota: Quota = setting(
        "dq_default_quota",
        {},
        "Quota of each tenant, in queues without a quota of their own.",
        unset=UNLIMITED,
    )
    inherit_tenant: bool = setting(
        "dq_inherit_tenant",
        False,
        "Whether a call of a running task that names no tenant gets the tenant of that task.",
    )
    dead_letter_failures: bool = setting(
        "dq_dead_letter_failures",
        False,
        "Whether tasks that failed for good (retries exhausted, rejected) are kept as dead letters.",
    )
    otel: bool = setting(
        "dq_otel",
        False,
        "Whether the buffer and workers make spans of OpenTelemetry; needs the extra ``otel``.",
    )
    dead_letter_retention_us: int | None = setting(
        "dq_dead_letter_retention",
        None,
        "Age after which the heartbeat of a worker deletes a dead letter; None keeps it.",
        low=_MINUTE_US,
        high=3_660 * _DAY_US,
    )
    dead_letter_limit: int | None = setting(
        "dq_dead_letter_limit",
        None,
        "Number of dead letters of a queue beyond which the heartbeat of a worker deletes the oldest ones. "
        "Each of N partitions keeps limit / N of them, rounded up, so a busy partition deletes earlier.",
        low=1,
        high=100_000_000,
    )
    confirm_replicas: int = setting(
        "dq_confirm_replicas",
        0,
        "Number of replicas that must confirm a message before its publish counts as done; 0 asks none.",
        low=0,
        high=100,
    )
    watchdog_us: int = setting(
        "dq_watchdog",
        _MINUTE_US,
        "Time with backlog, free slots and no claim after which a worker reconnects, then exits; 0 is off.",
        low=5 * SECOND_US,
        high=_DAY_US,
        zero_is_off=True,
    )
    claim_ahead_us: int = setting(
        "dq_claim_ahead",
        50_000,
        "Work, in measured service time, that a worker claims beyond its free slots; 0 claims none.",
        low=0,
        high=10 * SECOND_US,
    )
    allow_eviction: bool = setting(
        "dq_allow_eviction",
        False,
        "Whether to run on a Redis whose maxmemory-policy may delete messages.",
    )
    producer_marker_ttl_us: int = setting(
        "dq_producer_marker_ttl",
        _HOUR_US,
        "How long the broker keeps an idle producer's last sequence, to recognise a resent batch.",
        low=_MINUTE_US,
        high=30 * _DAY_US,
    )
    dedup_url: str = setting(
        "dq_dedup_url",
        "",
        "Redis with the dedup locks of workers on another broker; '' is that of the broker or the results.",
    )
    tombstone_ttl_us: int = setting(
        "dq_tombstone_ttl",
        3 * _HOUR_US,
        "How long the cancellation of a task that is not published yet is kept.",
        low=SECOND_US,
        high=30 * _DAY_US,
    )
    probe_file: str = setting(
        "dq_probe_file",
        "",
        "File that a worker keeps for 'celery dq alive' and 'ready'; %n and %h as in --logfile. '' is none.",
    )
    singletons: tuple[SingletonOptions, ...] = setting(
        "dq_singleton_queues",
        {},
        "Queues that one elected worker at a time consumes, in order; per queue: hand_over, grace, career.",
        unset=(),
    )
    election: str = setting(
        "dq_election",
        "",
        "Server of the elections: zookeeper://host:2181,host:2181/chroot or redis://host/db; '' is the "
        "broker.",
    )
    election_session_us: int = setting(
        "dq_election_session",
        10 * SECOND_US,
        "Silence after which a leader is replaced; the leader stops its work after 0.6 of that time.",
        low=SECOND_US,
        high=5 * _MINUTE_US,
    )
    election_options: tuple[tuple[str, Any], ...] = setting(
        "dq_election_options",
        {},
        "Credentials and TLS for ZooKeeper: auth, sasl, tls; see celery_dq.zookeeper.session.",
        unset=(),
        hashed=False,
    )
    beat_scheduler: str = setting(
        "dq_beat_scheduler",
        "celery.beat:Scheduler",
        "The scheduler that celery_dq.beat:ElectedScheduler wraps, as 'module:name'.",
    )
    beat_name: str = setting(
        "dq_beat_name",
        "",
        "Name of the schedule: elected beats with one name have one leader; '' is the app's name.",
    )
    allocation: AllocationOptions = section(AllocationOptions)
    buffer: BufferOptions = section(BufferOptions)
    outbox: OutboxOptions = section(OutboxOptions)
    publishing: PublishingOptions = section(PublishingOptions)
    metrics: MetricsOptions = section(MetricsOptions)
    web: WebOptions = section(WebOptions)

    @cached_property
    def _queues_by_name(self) -> Mapping[str, QueueOptions]:
        return {each.name: each for each in self.queues}

    def is_allocated(self, name: str, partitions: int) -> bool:
        """Return whether the partitions of an ordinary queue are allocated to workers.

        Args:
            name: Name of the queue.
            partitions: Its number of partitions, as the broker has it.
        """
        allocated = self.queue(name).allocated
        return self.allocation.enabled and (partitions > 1 if allocated is None else allocated)

    def queue(self, name: str) -> QueueOptions:
        """Return the section of queue `name`; the defaults without a section."""
        return self._queues_by_name.get(name, self.defaults)


SETTINGS = settings_of(Options)
