"""What waits for tenants, in the two forms in which the scripts keep it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from celery_dq.inspector.reading import Client
from celery_dq.keys import PartitionKeys

__all__ = ["waiting_of"]

_SCORE = struct.Struct(">d")


def waiting_of(
    keys: PartitionKeys, client: Client, tenants: Sequence[str], limit: int
) -> list[list[tuple[bytes, float]]]:
    """Return per tenant up to `limit` message ids with their scores, in their order."""
    if not tenants or limit < 1:
        return [[] for _ in tenants]
    pipeline: Any = client.pipeline(transaction=False)
    # First: a sole message that becomes the first of many meanwhile is seen twice, and not missed.
    pipeline.hmget(keys.sole, list(tenants))
    for tenant in tenants:
        pipeline.zrange(keys.tenant(tenant), 0, limit - 1, withscores=True)
    soles, *sets = pipeline.execute()
    found = []
    for sole, waiting in zip(soles, sets, strict=True):
        if sole is not None and not waiting:
            waiting = [(sole[_SCORE.size :], _SCORE.unpack_from(sole)[0])]
        found.append(waiting)
    return found
