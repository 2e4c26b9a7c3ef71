"""The options of the allocation of partitions to workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_dq.duration import SECOND_US
from celery_dq.errors import ConfigurationError
from celery_dq.options.schema import Kind, Setting

__all__ = ["ALLOCATED", "ALLOCATION_SETTINGS", "AllocationOptions", "allocation_options"]

ALLOCATION_SETTINGS = (
    Setting(
        "dq_allocation",
        Kind.FLAG,
        False,
        "Whether workers share the partitions of their queues, each partition with one worker, through the "
        "ZooKeeper of dq_election.",
    ),
    Setting(
        "dq_allocation_join_delay",
        Kind.DURATION,
        3 * SECOND_US,
        "How long partitions stay where they are after a worker has joined, so that workers that start "
        "together cause one change.",
        low=0,
        high=600 * SECOND_US,
    ),
)
#: The key of dq_queues[name].
ALLOCATED = Setting(
    "dq_allocated",
    Kind.FLAG,
    None,
    "Whether dq_allocation holds for the queue; None holds for a queue with several partitions.",
    optional=True,
)


@dataclass(frozen=True)
class AllocationOptions:
    """Options of the allocation. Durations are whole microseconds (``_us``).

    Attributes:
        enabled: ``dq_allocation``, whether workers share the partitions of their queues; default False.
        join_delay_us: ``dq_allocation_join_delay``, how long a better balance waits for more workers; default
            3 s.
    """

    enabled: bool = False
    join_delay_us: int = 3 * SECOND_US


def allocation_options(values: Mapping[str, Any]) -> AllocationOptions:
    """Return the options of the allocation.

    Args:
        values: The checked settings, by name.

    Raises:
        ConfigurationError: ``dq_election`` names no ZooKeeper.
    """
    election = values["dq_election"]
    if values["dq_allocation"] and not election.startswith("zookeeper://"):
        raise ConfigurationError(
            f"dq_allocation = True needs a ZooKeeper, and dq_election is {election!r}: set it to "
            "zookeeper://host:2181,host:2181/chroot"
        )
    return AllocationOptions(values["dq_allocation"], values["dq_allocation_join_delay"])
