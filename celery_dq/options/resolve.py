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
from celery_dq.options.quota import QUOTA_KEYS, UNLIMITED, Quota
from celery_dq.options.schema import (
    checked,
    fields_of_settings,
    read_section,
    refuse_unknown,
    refuse_unreadable_url,
)
from celery_dq.options.sections import SETTINGS, Options, QueueOptions, SingletonOptions
from celery_dq.shown import shown_setting, shown_url

__all__ = ["REDIS_URLS", "resolve"]

_PREFIX = "dq_"
_ELECTIONS = ("zookeeper", "redis", "rediss")
_ZOOKEEPER_OPTIONS = ("auth", "sasl", "tls")
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
    singletons = tuple(_singletons(given.pop("dq_singleton_queues", {})))
    values = {
        name: each.check(given[name]) if name in given else each.default for name, each in known.items()
    }
    default_quota = _quota(values["dq_default_quota"], UNLIMITED, "dq_default_quota")
    names_quota = bool(values["dq_default_quota"])
    defaults = read_section(QueueOptions, values, quota=default_quota, names_quota=names_quota)
    lease_us, watchdog_us = values["dq_lease"], values["dq_watchdog"]
    options = read_section(
        Options,
        values,
        key_prefix=_key_prefix(values["dq_key_prefix"]),
        # A lease may be longer than the default of the watchdog, so the default grows with it.
        watchdog_us=watchdog_us if "dq_watchdog" in given else max(watchdog_us, lease_us),
        dedup_url=_dedup_url(values["dq_dedup_url"]),
        defaults=defaults,
        default_quota=default_quota,
        queues=tuple(_queues(values["dq_queues"], defaults)),
        singletons=singletons,
        election_options=_election(values["dq_election"], values["dq_election_options"]),
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


def _queues(table: Mapping[Any, Any], defaults: QueueOptions) -> Iterable[QueueOptions]:
    """Yield one section per entry of ``dq_queues``, by name."""
    for name in table:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"dq_queues: {name!r} is not the name of a queue: give a text, not empty"
            )
    own = fields_of_settings(QueueOptions)
    known = (*QUOTA_KEYS, *(each.name.removeprefix(_PREFIX) for each in own.values()))
    for name in sorted(table):
        where = f"dq_queues[{name!r}]"
        section = table[name]
        if not isinstance(section, Mapping):
            raise ConfigurationError(f"{where} = {section!r} is not a dict")
        _refuse_spread(section, where)
        refuse_unknown(section, known, where=where)
        parts = {key: section[key] for key in QUOTA_KEYS if key in section}
        yield replace(
            defaults,
            name=name,
            quota=_quota(parts, defaults.quota, where),
            names_quota=bool(parts) or defaults.names_quota,
            **checked(own, section, where, _PREFIX),
        )


def _singletons(table: Any) -> Iterable[SingletonOptions]:
    """Yield one section per queue of ``dq_singleton_queues``: a dict of dicts, or only the names."""
    if isinstance(table, (list, tuple, set, frozenset)):
        table = {name: {} for name in table}
    elif not isinstance(table, Mapping):
        example = f": write [{table!r}]" if isinstance(table, str) and table else ""
        raise ConfigurationError(
            f"dq_singleton_queues = {table!r} is neither a list of the names of queues nor a dict of their "
            f"options{example}"
        )
    own = fields_of_settings(SingletonOptions)
    for name in sorted(table, key=str):
        where = f"dq_singleton_queues[{name!r}]"
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{where}: {name!r} is not the name of a queue: give a text, not empty")
        section = table[name] or {}
        if not isinstance(section, Mapping):
            raise ConfigurationError(f"{where} = {section!r} is not a dict")
        refuse_unknown(section, [each.name for each in own.values()], where=where)
        yield SingletonOptions(name, **checked(own, section, where))


def _election(url: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return ``dq_election_options``, by name, after checking that the election can use them."""
    scheme = url.partition("://")[0]
    if url and scheme not in _ELECTIONS:
        raise ConfigurationError(
            f"dq_election = {shown_url(url)!r} names no election: give zookeeper://host:2181, "
            "redis://host/db, rediss://host/db, or '' for the broker"
        )
    if scheme != "zookeeper":
        refuse_unreadable_url("dq_election", url)
    elif "@" in url:
        raise ConfigurationError(
            f"dq_election = {shown_url(url)!r} holds a login, and this URL has no place for one: give the "
            "hosts alone, and dq_election_options = {'auth': [('digest', 'user:password')]}"
        )
    refuse_unknown(options, _ZOOKEEPER_OPTIONS, where="dq_election_options")
    if options and scheme != "zookeeper":
        raise ConfigurationError(
            f"dq_election_options = {shown_setting(options)} has no effect without dq_election = "
            "'zookeeper://…': leave it out"
        )
    return tuple(sorted(options.items()))


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
    if without_effect := quota.without_effect(base):
        raise ConfigurationError(f"{where}: {without_effect}")
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
        refuse_unreadable_url("dq_dedup_url", url)
        return url
    shown = shown_url(url)
    plain = shown.removeprefix("dq-")
    if plain.startswith(REDIS_URLS):
        raise ConfigurationError(f"dq_dedup_url = {shown!r} is the URL of a broker: give {plain!r}")
    raise ConfigurationError(
        f"dq_dedup_url = {shown!r} names no Redis: give redis://host/db, rediss://host/db, unix://path?db=0, "
        "or '' for the Redis of the broker or the results"
    )


def _refuse_contradictions(options: Options) -> None:
    _refuse_useless(options)
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


def _refuse_useless(options: Options) -> None:
    """Check that no setting needs another one that is not set."""
    buffer, election = options.buffer, options.election
    if options.allocation.enabled and not election.startswith("zookeeper://"):
        raise ConfigurationError(
            f"dq_allocation = True needs a ZooKeeper, and dq_election is {shown_url(election)!r}: set it to "
            "zookeeper://host:2181,host:2181/chroot"
        )
    if buffer.enabled and buffer.folder is None:
        raise ConfigurationError(
            "dq_buffer = True needs dq_buffer_folder: name a folder that outlives the process, so that no "
            "message is lost when the process is killed, or '' to accept that loss and hold messages in "
            "memory only"
        )
    if not buffer.folder:
        syncs = {
            "dq_buffer_sync_every": buffer.sync_every,
            "dq_buffer_sync_interval": buffer.sync_interval_us,
        }
        for name, value in syncs.items():
            if value:
                raise ConfigurationError(
                    f"{name} = {value!r} has no effect without dq_buffer_folder: set the folder, or "
                    "leave it out"
                )
