"""Dedup: per key at most one call runs, and at most one waits.

The other calls are answered with the result of the call that runs for them.

``key``, ``rule``     the key of a call, and the rule that a task declares with ``@dedup``
``machine``           the states of one key, pure, and the interface of the coordinators of all keys
``local``             the coordinator for the threads of one process
``repetition``        measures how often the calls of a queue repeat each other
``signals``           signals for user code, as Celery's are

On the tenant broker the verdict comes from ``transport/redis/lua/push.lua``, elsewhere from
``celery_dq.other_brokers``. Calls reach this package from ``celery_dq.app.publishing``.
"""

from __future__ import annotations

import sys
from types import ModuleType

from celery_dq.dedup.rule import Dedup as Dedup, dedup as dedup

__all__ = ["Dedup", "dedup"]


class _CallablePackage(ModuleType):
    """The decorator under its public name ``celery_dq.dedup``, which an import binds to this package."""

    __call__ = staticmethod(dedup)


sys.modules[__name__].__class__ = _CallablePackage
