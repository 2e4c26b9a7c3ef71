"""Run the model on one implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
from hypothesis import HealthCheck, Phase, seed as seeded, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.dedup.model.broker import BrokerDriver
from tests.dedup.model.broker_world import BrokerWorld
from tests.dedup.model.coordinators import LocalDriver, RedisDriver
from tests.dedup.model.world import World

KINDS = ("local", "redis", "broker")


def run_stories(
    kind: str, url: str, *, examples: int, steps: int = 40, seed: int | None = None, shorten: bool = True
) -> int:
    """Run stories on an empty database, and return the number of those that came to their end.

    Args:
        kind: one of :data:`KINDS`.
        url: a Redis database for this run only.
        examples: number of stories.
        steps: limit of the steps of a story.
        seed: repeats a run; None leaves it to hypothesis.
        shorten: look for the shortest story that fails; otherwise report the first one.
    """
    with redis.Redis.from_url(url, socket_timeout=None) as client:
        drivers: dict[str, Callable[[], tuple[type[World], Any]]] = {
            "local": lambda: (World, LocalDriver()),
            "redis": lambda: (World, RedisDriver(client)),
            "broker": lambda: (BrokerWorld, BrokerDriver(client)),
        }
        base, driver = drivers[kind]()
        world: Any = type(kind.title(), (base,), {"driver": driver})
        run_state_machine_as_test(
            world if seed is None else seeded(seed)(world),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                phases=[Phase.reuse, Phase.generate, *([Phase.shrink] if shorten else [])],
                database=settings().database if shorten else None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
        return int(world.closed)
