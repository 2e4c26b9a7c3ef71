"""Tenant queues for Celery on Redis, on a broker that does not lose messages.

Importing this package imports no library, only the errors. Each other public name is looked up in
:data:`_HOMES` at its first use, so a program that only needs an exception class loads neither Celery nor a
Redis client.
"""

from __future__ import annotations

from celery_dq.errors import (
    AccessDenied as AccessDenied,
    ConfigurationError as ConfigurationError,
    CorruptRecord as CorruptRecord,
    CorruptSegment as CorruptSegment,
    CoveringRunUnknown as CoveringRunUnknown,
    DedupLockLost as DedupLockLost,
    DeliveriesExhausted as DeliveriesExhausted,
    DQError as DQError,
    DuplicateCall as DuplicateCall,
    Fenced as Fenced,
    InvalidKey as InvalidKey,
    InvalidMessage as InvalidMessage,
    InvalidPriority as InvalidPriority,
    InvalidQuota as InvalidQuota,
    InvalidRequest as InvalidRequest,
    InvalidTenant as InvalidTenant,
    MessageTooLarge as MessageTooLarge,
    MissingLibrary as MissingLibrary,
    NotElected as NotElected,
    QueueClosed as QueueClosed,
    QueueEmpty as QueueEmpty,
    QueueFull as QueueFull,
    ScriptError as ScriptError,
    ServerError as ServerError,
    SpillFailed as SpillFailed,
    StoreUnreachable as StoreUnreachable,
    TenantMoving as TenantMoving,
    TooFewReplicas as TooFewReplicas,
    ZooKeeperUnreachable as ZooKeeperUnreachable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from celery_dq.curator.queue import (
        DistributedDelayQueue as DistributedDelayQueue,
        DistributedIdQueue as DistributedIdQueue,
        DistributedPriorityQueue as DistributedPriorityQueue,
        DistributedQueue as DistributedQueue,
        SimpleDistributedQueue as SimpleDistributedQueue,
    )
    from celery_dq.dedup.rule import dedup as dedup
    from celery_dq.leadership.career import Career as Career
    from celery_dq.leadership.runner import Runner as Runner
    from celery_dq.options import Quota as Quota
    from celery_dq.producer.sender import (
        BrokerUnavailable as BrokerUnavailable,
        BufferFull as BufferFull,
        NotOnDisk as NotOnDisk,
    )
    from celery_dq.producer.singular_update_queue import SingularUpdateQueue as SingularUpdateQueue
    from celery_dq.transport.resource_set import AnyOf as AnyOf
    from celery_dq.transport.throttled import Throttled as Throttled

__version__ = "0.1.0"

# Each other public name with the module that defines it.
_HOMES = {
    "setup": "celery_dq.wiring",
    "Quota": "celery_dq.options",
    "AnyOf": "celery_dq.transport.resource_set",
    "Throttled": "celery_dq.transport.throttled",
    "dedup": "celery_dq.dedup",
    "Career": "celery_dq.leadership.career",
    "Runner": "celery_dq.leadership.runner",
    "BrokerUnavailable": "celery_dq.producer.sender",
    "BufferFull": "celery_dq.producer.sender",
    "NotOnDisk": "celery_dq.producer.sender",
    "SingularUpdateQueue": "celery_dq.producer.singular_update_queue",
    "DistributedQueue": "celery_dq.curator.queue",
    "DistributedIdQueue": "celery_dq.curator.queue",
    "DistributedPriorityQueue": "celery_dq.curator.queue",
    "DistributedDelayQueue": "celery_dq.curator.queue",
    "SimpleDistributedQueue": "celery_dq.curator.queue",
}

__all__ = ["__version__"]
__all__ += [name for name, value in globals().items() if isinstance(value, type)]  # the errors
__all__ += _HOMES


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_HOMES[name])
    # The package of dedup can be called as the decorator.
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
