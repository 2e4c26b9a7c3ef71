"""The URL schemes of this package, and their registration with kombu."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from celery_dq.errors import ConfigurationError

#: Pairs of scheme and transport, in the form of kombu's alias table. A transport is imported when a
#: connection is made.
SCHEMES = (
    ("dq-redis", "celery_dq.transport.redis.transport:Transport"),
    ("dq-rediss", "celery_dq.transport.redis.transport:Transport"),
    ("dq-sentinel", "celery_dq.transport.redis.sentinel:SentinelTransport"),
    ("dq-rediscluster", "celery_dq.transport.redis.cluster:ClusterTransport"),
    ("dq-zookeeper", "celery_dq.transport.zookeeper.transport:Transport"),
    ("dq-sqlite", "celery_dq.testing.sqlite_broker:Transport"),
)
#: The schemes of the tenant broker.
TENANT_SCHEMES = ("dq-redis", "dq-rediss", "dq-sentinel", "dq-rediscluster")
#: The scheme of the tenant broker on a Redis Cluster.
CLUSTER_SCHEME = "dq-rediscluster"
#: The scheme of the broker on ZooKeeper.
ZOOKEEPER_SCHEME = "dq-zookeeper"
#: The schemes of the brokers without tenants and quotas.
PLAIN_SCHEMES = (ZOOKEEPER_SCHEME, "dq-sqlite")


def leases_messages(connection: Any) -> bool:
    """Return whether the messages of a kombu connection have the leases and states of the tenant broker."""
    return connection.transport_cls in TENANT_SCHEMES or getattr(
        connection.get_transport_cls(), "leases_messages", False
    )


def schemes_in(url: Any) -> list[str]:
    """Return the schemes of a broker URL, of several joined by semicolons, or of a list of URLs."""
    return [each.partition("://")[0].partition("+")[0] for each in alternatives_in(url)]


def alternatives_in(url: Any) -> list[str]:
    """Return the single URLs in a broker URL, in several joined by semicolons, or in a list of URLs."""
    urls = [url] if isinstance(url, str) else list(url or ())
    alternatives = (each.strip() for joined in urls for each in str(joined).split(";"))
    return [each for each in alternatives if "://" in each]


def refuse_misspelt(url: Any) -> None:
    """Refuse a broker URL with a misspelt scheme of this package; kombu's own error names another remedy.

    Args:
        url: Broker URL, several joined by semicolons, or a list of URLs.

    Raises:
        ConfigurationError: The scheme is misspelt. The text names the scheme that was probably meant.
    """
    known = [scheme for scheme, _ in SCHEMES]
    for scheme in schemes_in(url):
        plain = scheme.lower()
        if plain.startswith("dq") and plain not in known:
            close = get_close_matches(plain.replace("_", "-"), known, 1)
            meant = f"did you mean {close[0]}://?" if close else f"known are {', '.join(known)}"
            why = (
                "a URL's scheme cannot hold an underscore" if "_" in plain else "celery-dq has no such scheme"
            )
            raise ConfigurationError(f"broker_url begins with {scheme}://: {why}; {meant}")


def register_transports() -> None:
    """Register the schemes with kombu, so that ``kombu.Connection("dq-redis://…")`` works. Idempotent.

    ``celery_dq.setup(app)`` and the ``celery dq`` command call it; a program that uses kombu without
    Celery calls it itself.
    """
    from kombu.transport import TRANSPORT_ALIASES

    for scheme, transport in SCHEMES:
        TRANSPORT_ALIASES.setdefault(scheme, transport)
