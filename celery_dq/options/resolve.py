"""Conversion of an app's configuration to :class:`~celery_dq.options.sections.Options`.

Settings are only read. Defaults added to the configuration of a Celery app would override settings that the
user sets later.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from celery_dq.duration import format_duration
from celery_dq.errors import ConfigurationError, InvalidQuota
from celery_dq.options.allocation import allocation_options
from celery_dq.options.buffer import buffer_options
from celery_dq.options.metrics import metrics_options
from celery_dq.options.publishing import publishing_options
from celery_dq.options.quota import QUOTA_KEYS, UNLIMITED, Quota
from celery_dq.options.schema import Setting, refuse_unknown, without_password
from celery_dq.options.sections import QUEUE_SETTINGS, SETTINGS, Options, QueueOptions
from celery_dq.options.singleton import read_election, read_singletons
from celery_dq.options.web import web_options

__all__ = ["REDIS_URLS", "resolve"]

_PREFIX = "dq_"
#: What the URL of a Redis begins with, for redis-py.
REDIS_URLS = ("redis://", "rediss://", "unix://")


def resolve(conf: Mapping[str, Any]) -> Options:
    """Read and check the settings of celery-dq.

    Args:
        conf: An ``app.conf`` or another mapping of ``dq_*`` names. The names may be in upper case and have
            the namespace of the configuration (``CELERY_DQ_LEASE``).

    Raises:
        ConfigurationError: A ``dq_*`` name does not exist, a value has the wrong type or is out of range, or
            values contradict each other.
    """
    given = _given(conf)
    known = {setting.name: setting for setting in SETTINGS}
    refuse_unknown(given, known, where="settings", what="setting")
    singletons = tuple(read_singletons(given.pop("dq_singleton_queues", {})))
    values = {name: _checked(setting, given) for name, setting in known.items()}
    lease_us = values["dq_lease"]
    defaults = QueueOptions(
        quota=_quota(values["dq_default_quota"], UNLIMITED, "dq_default_quota"),
        names_quota=bool(values["dq_default_quota"]),
        priority_aging_us=values["dq_priority_aging"],
        max_deliveries=values["dq_max_deliveries"],
    )
    options = Options(
        environment=values["dq_environment"],
        key_prefix=_key_prefix(values["dq_key_prefix"]),
        lease_us=lease_us,
        dead_letter_failures=values["dq_dead_letter_failures"],
        otel=values["dq_otel"],
        dead_letter_retention_us=values["dq_dead_letter_retention"],
        dead_letter_limit=values["dq_dead_letter_limit"],
        confirm_replicas=values["dq_confirm_replicas"],
        # A lease longer than the default of the watchdog is no contradiction, so the default grows with it.
        watchdog_us=values["dq_watchdog"] if "dq_watchdog" in given else max(values["dq_watchdog"], lease_us),
        claim_ahead_us=values["dq_claim_ahead"],
        allow_eviction=values["dq_allow_eviction"],
        producer_marker_ttl_us=values["dq_producer_marker_ttl"],
        tombstone_ttl_us=values["dq_tombstone_ttl"],
        probe_file=values["dq_probe_file"],
        dedup_url=_dedup_url(values["dq_dedup_url"]),
        buffer=buffer_options(values),
        publishing=publishing_options(values),
        metrics=metrics_options(values),
        web=web_options(values),
        defaults=defaults,
        queues=tuple(_queues(values["dq_queues"], defaults)),
        singletons=singletons,
        election=values["dq_election"],
        beat_scheduler=values["dq_beat_scheduler"],
        beat_name=values["dq_beat_name"],
        allocation=allocation_options(values),
        election_session_us=values["dq_election_session"],
        election_options=read_election(values["dq_election"], values["dq_election_options"]),
    )
    _refuse_contradictions(options)
    return options


def _given(conf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``dq_*`` settings of `conf` under their plain names."""
    # The first look-up loads a Celery configuration. Before that its namespace is unknown.
    conf.get("dq_environment")
    namespace = str(getattr(conf, "prefix", None) or "").lower().rstrip("_")
    given: dict[str, Any] = {}
    for key in conf:
        name = str(key)
        if namespace and name.lower().startswith(f"{namespace}_{_PREFIX}"):
            name = name[len(namespace) + 1 :]
        elif namespace and not name.startswith(_PREFIX):
            # In Django's settings a name DQ_... without the namespace belongs to another library.
            continue
        name = name.lower()
        if name.startswith(_PREFIX) and name not in given:
            # A Celery configuration finds a plain name under its namespace; another mapping may not.
            given[name] = conf[name] if name in conf else conf[key]
    return given


def _checked(setting: Setting, given: Mapping[str, Any]) -> Any:
    return setting.check(given[setting.name]) if setting.name in given else setting.default


def _queues(table: Mapping[Any, Any], defaults: QueueOptions) -> Iterable[QueueOptions]:
    """Yield one section per entry of ``dq_queues``, by name."""
    for name in table:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"dq_queues: {name!r} is not the name of a queue: give a text, not empty"
            )
    own = {setting.name.removeprefix(_PREFIX): setting for setting in QUEUE_SETTINGS}
    for name in sorted(table):
        where = f"dq_queues[{name!r}]"
        section = table[name]
        if not isinstance(section, Mapping):
            raise ConfigurationError(f"{where} = {section!r} is not a dict")
        _refuse_spread(section, where)
        refuse_unknown(section, (*QUOTA_KEYS, *own), where=where)
        parts = {key: section[key] for key in QUOTA_KEYS if key in section}
        queue = replace(
            defaults,
            name=name,
            quota=_quota(parts, defaults.quota, where),
            names_quota=bool(parts) or defaults.names_quota,
        )
        if "priority_aging" in section:
            aging = own["priority_aging"].check(section["priority_aging"], where=f"{where}['priority_aging']")
            queue = replace(queue, priority_aging_us=aging)
        if "max_deliveries" in section:
            most = own["max_deliveries"].check(section["max_deliveries"], where=f"{where}['max_deliveries']")
            queue = replace(queue, max_deliveries=most)
        if "partitions" in section:
            count = own["partitions"].check(section["partitions"], where=f"{where}['partitions']")
            queue = replace(queue, partitions=count)
        if "spread_above_per_s" in section:
            above = own["spread_above_per_s"].check(
                section["spread_above_per_s"], where=f"{where}['spread_above_per_s']"
            )
            queue = replace(queue, spread_above_per_s=above)
        if "allocated" in section:
            allocated = own["allocated"].check(section["allocated"], where=f"{where}['allocated']")
            queue = replace(queue, allocated=allocated)
        yield queue


def _refuse_spread(values: Mapping[str, Any], where: str) -> None:
    if "spread" in values:
        raise ConfigurationError(
            f"{where}: spread = {values['spread']!r} belongs to the quota of one tenant, and this one is for "
            "all tenants: leave it out, and run celery dq quotas set QUEUE TENANT --spread …"
        )


def _quota(values: Mapping[str, Any], base: Quota, where: str) -> Quota:
    _refuse_spread(values, where)
    refuse_unknown(values, QUOTA_KEYS, where=where)
    try:
        quota = Quota.parse(values, base=base, where=where)
    except InvalidQuota as error:
        raise ConfigurationError(str(error)) from None
    if quota.rate is None and "burst" in values and quota.burst != 1:
        raise ConfigurationError(
            f"{where}: burst = {quota.burst!r} has no effect without a rate: "
            "give a rate as well, or leave it out"
        )
    return quota


def _key_prefix(prefix: str) -> str:
    """Return `prefix` after checking that it does not replace the hash tag of the keys."""
    if "{" in prefix or "}" in prefix:
        raise ConfigurationError(
            f"dq_key_prefix = {prefix!r} holds a brace, which Redis Cluster would take for the slot of "
            "every key: leave it out"
        )
    if any(unicodedata.category(character).startswith("C") for character in prefix):
        raise ConfigurationError(f"dq_key_prefix = {prefix!r} holds a control character: leave it out")
    return prefix


def _dedup_url(url: str) -> str:
    """Return `url` after checking that it names a Redis, or nothing."""
    if not url or url.startswith(REDIS_URLS):
        return url
    shown = without_password(url)
    plain = shown.removeprefix("dq-")
    if plain.startswith(REDIS_URLS):
        raise ConfigurationError(f"dq_dedup_url = {shown!r} is the URL of a broker: give {plain!r}")
    raise ConfigurationError(
        f"dq_dedup_url = {shown!r} names no Redis: give redis://host/db, rediss://host/db, unix://path?db=0, "
        "or '' for the Redis of the broker or the results"
    )


def _refuse_contradictions(options: Options) -> None:
    for singleton in options.singletons:
        count = options.queue(singleton.name).partitions
        if count > 1:
            raise ConfigurationError(
                f"dq_queues[{singleton.name!r}]['partitions'] = {count}, but dq_singleton_queues names the "
                "queue: one leader consumes all of it in order; leave one of the two out"
            )
        if options.queue(singleton.name).allocated:
            raise ConfigurationError(
                f"dq_queues[{singleton.name!r}]['allocated'] = True, but dq_singleton_queues names the "
                "queue, and its election chooses the worker: leave one of the two out"
            )
    for queue in options.queues:
        if queue.allocated and not options.allocation.enabled:
            raise ConfigurationError(
                f"dq_queues[{queue.name!r}]['allocated'] = True has no effect without dq_allocation = True: "
                "set both, or leave it out"
            )
    lease = format_duration(options.lease_us)
    # After 0.6 of the lease no task may start, so messages claimed ahead must have started by then.
    if options.claim_ahead_us * 10 > options.lease_us * 6:
        raise ConfigurationError(
            f"dq_claim_ahead = {format_duration(options.claim_ahead_us)} is more than 0.6 of "
            f"dq_lease = {lease}: shorten dq_claim_ahead or lengthen the lease"
        )
    if 0 < options.watchdog_us < options.lease_us:
        raise ConfigurationError(
            f"dq_watchdog = {format_duration(options.watchdog_us)} is shorter than dq_lease = {lease}: "
            "it would act before the messages of a dead worker are reaped; lengthen it, or set 0 for off"
        )
    if options.producer_marker_ttl_us < options.lease_us:
        raise ConfigurationError(
            f"dq_producer_marker_ttl = {format_duration(options.producer_marker_ttl_us)} is shorter than "
            f"dq_lease = {lease}: lengthen it"
        )
