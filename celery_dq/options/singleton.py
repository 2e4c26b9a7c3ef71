"""The options of singleton queues and elections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from celery_dq.duration import SECOND_US
from celery_dq.errors import ConfigurationError
from celery_dq.options.schema import Kind, Setting, refuse_unknown, without_password

__all__ = ["ELECTION_SETTINGS", "SingletonOptions", "read_election", "read_singletons"]

ELECTION_SETTINGS = (
    Setting(
        "dq_singleton_queues",
        Kind.TABLE,
        {},
        "Queues that one elected worker at a time consumes, in order; per queue: hand_over, grace, career.",
    ),
    Setting(
        "dq_election",
        Kind.TEXT,
        "",
        "Server of the elections: zookeeper://host:2181,host:2181/chroot or redis://host/db; '' is the "
        "broker.",
    ),
    Setting(
        "dq_election_session",
        Kind.DURATION,
        10 * SECOND_US,
        "Silence after which a leader is replaced; the leader stops its work after 0.6 of that time.",
        low=SECOND_US,
        high=300 * SECOND_US,
    ),
    Setting(
        "dq_election_options",
        Kind.TABLE,
        {},
        "Credentials and TLS for ZooKeeper: auth, sasl, tls; see celery_dq.zookeeper.session.",
    ),
    Setting(
        "dq_beat_scheduler",
        Kind.TEXT,
        "celery.beat:Scheduler",
        "The scheduler that celery_dq.beat:ElectedScheduler wraps, as 'module:name'.",
    ),
    Setting(
        "dq_beat_name",
        Kind.TEXT,
        "",
        "Name of the schedule: elected beats with one name have one leader; '' is the app's name.",
    ),
)

_HAND_OVER = Setting(
    "hand_over",
    Kind.TEXT,
    "finish",
    "Whether a hand-over lets the running message end, or aborts it.",
    choices=("finish", "abort"),
)
_GRACE = Setting(
    "grace",
    Kind.DURATION,
    0,
    "How long a successor waits after a leader that did not hand over, for effects without fencing.",
    high=3_600 * SECOND_US,
)
_CAREER = Setting("career", Kind.TEXT, "", "A subclass of Career, as 'module:name'.")
_SECTION = (_HAND_OVER, _GRACE, _CAREER)

_SCHEMES = ("zookeeper", "redis", "rediss")
_ZOOKEEPER_OPTIONS = ("auth", "sasl", "tls")


@dataclass(frozen=True)
class SingletonOptions:
    """Options of one singleton queue.

    Attributes:
        name: Name of the queue.
        hand_over: With ``finish`` (default) a voluntary hand-over waits for the running message. With
            ``abort`` it kills the process of the message, which runs again only if its task acknowledges
            late.
        grace_us: Microseconds that a successor waits after a leader that did not hand over; default 0, which
            is right for effects with fencing.
        career: Dotted path of the class whose ``inaugurate`` and ``hand_over`` are called; "" is none.
    """

    name: str
    hand_over: Literal["finish", "abort"] = "finish"
    grace_us: int = 0
    career: str = ""


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
    table = ELECTION_SETTINGS[0].check(table)
    for name in sorted(table, key=str):
        where = f"dq_singleton_queues[{name!r}]"
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{where}: {name!r} is not the name of a queue: give a text, not empty")
        section = table[name] or {}
        if not isinstance(section, Mapping):
            raise ConfigurationError(f"{where} = {section!r} is not a dict")
        refuse_unknown(section, [setting.name for setting in _SECTION], where=where)
        values = {
            setting.name: setting.check(section[setting.name], where=f"{where}[{setting.name!r}]")
            for setting in _SECTION
            if setting.name in section
        }
        if "grace" in values:
            values["grace_us"] = values.pop("grace")
        yield SingletonOptions(name, **values)


def read_election(url: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the checked ``dq_election_options``, by name.

    Raises:
        ConfigurationError: The URL names no server for elections, or an option is unknown or has no effect.
    """
    scheme = urlsplit(url).scheme if url else ""
    if url and (scheme not in _SCHEMES or not url.startswith(f"{scheme}://")):
        raise ConfigurationError(
            f"dq_election = {without_password(url)!r} names no election: give zookeeper://host:2181, "
            "redis://host/db, rediss://host/db, or '' for the broker"
        )
    refuse_unknown(options, _ZOOKEEPER_OPTIONS, where="dq_election_options")
    if options and scheme != "zookeeper":
        raise ConfigurationError(
            f"dq_election_options = {dict(options)!r} has no effect without dq_election = 'zookeeper://…': "
            "leave it out"
        )
    return tuple(sorted(options.items()))
