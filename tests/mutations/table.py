"""All mutations, from one module per area."""

from __future__ import annotations

from tests.mutations import (
    beat,
    counters,
    dedup,
    leadership,
    publishing,
    scripts,
    shared,
    singleton,
    transport,
    wakeups,
    worker,
    zookeeper,
)
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *scripts.MUTATIONS,
    *counters.MUTATIONS,
    *transport.MUTATIONS,
    *wakeups.MUTATIONS,
    *publishing.MUTATIONS,
    *dedup.MUTATIONS,
    *singleton.MUTATIONS,
    *worker.MUTATIONS,
    *zookeeper.MUTATIONS,
    *leadership.MUTATIONS,
    *beat.MUTATIONS,
    *shared.MUTATIONS,
)
