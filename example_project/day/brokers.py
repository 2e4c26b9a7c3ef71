"""The brokers that the day can run on, and the look-up of the messages that are left in them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis

QUEUE = "push"


@dataclass(frozen=True)
class Broker:
    """A broker: ``name`` as on the command line, ``title`` for the report, ``scheme`` of its URL."""

    name: str
    title: str
    scheme: str

    def url(self, redis_url: str) -> str:
        """Return the broker URL for a Redis server."""
        return self.scheme + redis_url.removeprefix("redis")


STOCK = Broker("stock", "stock Redis transport", "redis")
DQ = Broker("dq", "celery-dq", "dq-redis")
BROKERS = {broker.name: broker for broker in (STOCK, DQ)}


def left_behind(broker: Broker, redis_url: str) -> tuple[set[str], set[str]]:
    """Return the ids that the broker holds for a worker and the ids that wait in it, when no worker runs.

    On celery-dq there is no look-up. A live worker must have delivered all notices within the run, so each
    missing one counts as lost.
    """
    if broker is not STOCK:
        return set(), set()
    with redis.Redis.from_url(redis_url) as client:
        unacked: Any = client.hvals("unacked")
        held = {delivery_id(json.loads(row)[0]) for row in unacked}
        queued: set[str] = set()
        keys: Iterable[Any] = client.scan_iter(f"{QUEUE}*", _type="list")
        for key in keys:
            waiting: Any = client.lrange(key, 0, -1)
            queued |= {delivery_id(json.loads(row)) for row in waiting}
    return held, queued


def delivery_id(message: dict[str, Any]) -> str:
    """Return the id of the notice in a message in kombu's format."""
    args, _kwargs, _embed = json.loads(base64.b64decode(message["body"]))
    return str(args[1])
