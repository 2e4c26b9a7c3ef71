"""The URL schemes of this package, as kombu knows them."""

from __future__ import annotations

#: Scheme -> where its transport is, as kombu's alias table wants it. Names, so that nothing is
#: imported before a connection is made.
SCHEMES = (
    ("dq-redis", "celery_dq.transport.redis.transport:Transport"),
    ("dq-rediss", "celery_dq.transport.redis.transport:Transport"),
    ("dq-sentinel", "celery_dq.transport.redis.sentinel:SentinelTransport"),
    ("dq-zookeeper", "celery_dq.transport.zookeeper.transport:Transport"),
)
#: The schemes of the tenant broker.
TENANT_SCHEMES = ("dq-redis", "dq-rediss", "dq-sentinel")
#: The scheme of the broker on ZooKeeper.
ZOOKEEPER_SCHEME = "dq-zookeeper"


def register_transports() -> None:
    """Tell kombu the schemes, so that ``kombu.Connection("dq-redis://…")`` works. Idempotent.

    ``celery_dq.setup(app)`` and the ``celery dq`` command call it; a program that uses kombu without
    Celery calls it itself.
    """
    from kombu.transport import TRANSPORT_ALIASES

    for scheme, transport in SCHEMES:
        TRANSPORT_ALIASES.setdefault(scheme, transport)
