"""The options of singleton queues and elections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from celery_dq.duration import SECOND_US
from celery_dq.errors import ConfigurationError
from celery_dq.options.schema import (
    checked,
    fields_of_settings,
    refuse_unknown,
    refuse_unreadable_url,
    setting,
)
from celery_dq.shown import shown_setting, shown_url

__all__ = ["SingletonOptions", "read_election", "read_singletons"]

_SCHEMES = ("zookeeper", "redis", "rediss")
_ZOOKEEPER_OPTIONS = ("auth", "sasl", "tls")


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


def read_singletons(table: Any) -> Iterable[SingletonOptions]:
    """Yield one section per queue of ``dq_singleton_queues``.

    Args:
        table: A dict of dicts, or only the names of the queues.

    Raises:
        ConfigurationError: A name or an option is not accepted.
    """
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


def read_election(url: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the checked ``dq_election_options``, by name.

    Raises:
        ConfigurationError: The URL names no server for elections, or an option is unknown or has no effect.
    """
    scheme = url.partition("://")[0]
    if url and scheme not in _SCHEMES:
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
