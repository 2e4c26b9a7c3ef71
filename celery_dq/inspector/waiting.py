"""Reads the waiting messages of tenants, in both forms in which the scripts store them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from celery_dq.inspector.redis_values import CHUNK, chunks, first_of
from celery_dq.keys import PartitionKeys
from celery_dq.transport.redis.store.rounds import Rounds

__all__ = ["waiting_of"]

_SCORE = struct.Struct(">d")


def waiting_of(
    keys: PartitionKeys, tenants: Sequence[str], limit: int
) -> Rounds[list[list[tuple[bytes, float]]]]:
    """Return up to `limit` message ids with their scores per tenant, in order."""
    if limit < 1:
        return [[] for _ in tenants]
    found: list[list[tuple[bytes, float]]] = []
    for chunk in chunks(tenants):
        singles, *sets = yield partial(_put_reads, keys=keys, tenants=chunk, limit=min(limit, CHUNK))
        for tenant, single, waiting in zip(chunk, singles, sets, strict=True):
            if single is not None and not waiting:
                waiting = [(single[_SCORE.size :], _SCORE.unpack_from(single)[0])]
            if limit > CHUNK == len(waiting):
                waiting = yield from first_of(keys.tenant(tenant), limit)
            found.append(waiting)
    return found


def _put_reads(pipe: Any, *, keys: PartitionKeys, tenants: Sequence[str], limit: int) -> None:
    # Read first, because a single message may become the first of several meanwhile. Then it is read twice
    # instead of missed.
    pipe.hmget(keys.single, list(tenants))
    for tenant in tenants:
        pipe.zrange(keys.tenant(tenant), 0, limit - 1, withscores=True)
