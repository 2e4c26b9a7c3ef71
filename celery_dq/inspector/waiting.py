"""Reads the waiting messages of tenants, in both forms in which the scripts store them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from celery_dq.inspector.redis_values import CHUNK, Client, chunks, first_of
from celery_dq.keys import PartitionKeys

__all__ = ["waiting_of"]

_SCORE = struct.Struct(">d")


def waiting_of(
    keys: PartitionKeys, client: Client, tenants: Sequence[str], limit: int
) -> list[list[tuple[bytes, float]]]:
    """Return up to `limit` message ids with their scores per tenant, in order."""
    if limit < 1:
        return [[] for _ in tenants]
    found: list[list[tuple[bytes, float]]] = []
    for chunk in chunks(tenants):
        pipeline: Any = client.pipeline(transaction=False)
        # Read first, because a single message may become the first of several meanwhile. Then it is read
        # twice instead of missed.
        pipeline.hmget(keys.single, list(chunk))
        for tenant in chunk:
            pipeline.zrange(keys.tenant(tenant), 0, min(limit, CHUNK) - 1, withscores=True)
        singles, *sets = pipeline.execute()
        for tenant, single, waiting in zip(chunk, singles, sets, strict=True):
            if single is not None and not waiting:
                waiting = [(single[_SCORE.size :], _SCORE.unpack_from(single)[0])]
            if limit > CHUNK == len(waiting):
                waiting = first_of(client, keys.tenant(tenant), limit)
            found.append(waiting)
    return found
