"""Tenant queues for Celery on Redis, on a broker that does not lose messages.

Importing this package imports no library. Each public name is looked up in :data:`_HOMES` at its first use,
so a program that only needs an exception class loads neither Celery nor a Redis client.
"""

from __future__ import annotations

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

__version__ = "0.1.0"

# Each public name with the module that defines it.
_HOMES = (
    ("setup", "celery_dq.wiring"),
    ("Quota", "celery_dq.options"),
    ("AnyOf", "celery_dq.transport.resource_set"),
    ("dedup", "celery_dq.dedup"),
    ("Career", "celery_dq.leadership.career"),
    ("Runner", "celery_dq.leadership.runner"),
    ("CoveringRunUnknown", "celery_dq.errors"),
    ("DQError", "celery_dq.errors"),
    ("DedupLockLost", "celery_dq.errors"),
    ("AccessDenied", "celery_dq.errors"),
    ("ConfigurationError", "celery_dq.errors"),
    ("CorruptRecord", "celery_dq.errors"),
    ("CorruptSegment", "celery_dq.errors"),
    ("DeliveriesExhausted", "celery_dq.errors"),
    ("Fenced", "celery_dq.errors"),
    ("MessageTooLarge", "celery_dq.errors"),
    ("MissingLibrary", "celery_dq.errors"),
    ("NotElected", "celery_dq.errors"),
    ("StoreUnreachable", "celery_dq.errors"),
    ("ZooKeeperUnreachable", "celery_dq.errors"),
    ("DuplicateCall", "celery_dq.errors"),
    ("InvalidKey", "celery_dq.errors"),
    ("InvalidMessage", "celery_dq.errors"),
    ("InvalidPriority", "celery_dq.errors"),
    ("InvalidQuota", "celery_dq.errors"),
    ("InvalidRequest", "celery_dq.errors"),
    ("InvalidTenant", "celery_dq.errors"),
    ("QueueClosed", "celery_dq.errors"),
    ("QueueEmpty", "celery_dq.errors"),
    ("QueueFull", "celery_dq.errors"),
    ("ScriptError", "celery_dq.errors"),
    ("ServerError", "celery_dq.errors"),
    ("SpillFailed", "celery_dq.errors"),
    ("TenantMoving", "celery_dq.errors"),
    ("TooFewReplicas", "celery_dq.errors"),
    ("BrokerUnavailable", "celery_dq.producer.sender"),
    ("BufferFull", "celery_dq.producer.sender"),
    ("NotOnDisk", "celery_dq.producer.sender"),
    ("SingularUpdateQueue", "celery_dq.producer.singular_update_queue"),
    ("DistributedQueue", "celery_dq.curator.queue"),
    ("DistributedIdQueue", "celery_dq.curator.queue"),
    ("DistributedPriorityQueue", "celery_dq.curator.queue"),
    ("DistributedDelayQueue", "celery_dq.curator.queue"),
    ("SimpleDistributedQueue", "celery_dq.curator.queue"),
)

__all__ = ["__version__"]
__all__ += [name for name, _ in _HOMES]


def __getattr__(name: str) -> Any:
    for public, home in _HOMES:
        if public == name:
            from importlib import import_module

            module = import_module(home)
            # The package of dedup can be called as the decorator.
            return module if home == f"{__name__}.{name}" else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
