"""The brokers that the day can run on, and how to ask each what it still keeps in the end."""

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
    """Return the ids that the broker holds for a worker and those that wait in it, once no worker runs.

    On celery-dq nothing is looked up: with a live worker at hand everything must have been delivered within
    the run, so whatever is missing counts as lost.
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
    """Return the delivery that a message in kombu's format is about."""
    args, _kwargs, _embed = json.loads(base64.b64decode(message["body"]))
    return str(args[1])
