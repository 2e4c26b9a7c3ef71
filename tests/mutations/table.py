"""All mutations, from one module per area."""

from __future__ import annotations

from tests.mutations import (
    acks,
    allocation,
    beat,
    cluster,
    counters,
    dashboard,
    dedup,
    heartbeats,
    leadership,
    metrics,
    migration,
    operating,
    partitioned_queues,
    partitions,
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
    *heartbeats.MUTATIONS,
    *counters.MUTATIONS,
    *dashboard.MUTATIONS,
    *transport.MUTATIONS,
    *wakeups.MUTATIONS,
    *cluster.MUTATIONS,
    *acks.MUTATIONS,
    *partitioned_queues.MUTATIONS,
    *publishing.MUTATIONS,
    *partitions.MUTATIONS,
    *allocation.MUTATIONS,
    *dedup.MUTATIONS,
    *singleton.MUTATIONS,
    *worker.MUTATIONS,
    *zookeeper.MUTATIONS,
    *leadership.MUTATIONS,
    *beat.MUTATIONS,
    *metrics.MUTATIONS,
    *shared.MUTATIONS,
    *operating.MUTATIONS,
    *migration.MUTATIONS,
)
