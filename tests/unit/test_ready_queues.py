"""The order in which a channel claims from its queues."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.transport.redis.consuming.subscriptions import ReadyQueues, Subscription


class _NoQueue:
    """A queue to which nothing is sent."""

    token = 0


@pytest.mark.parametrize("leave", [ReadyQueues.rest, ReadyQueues.remove])
def test_a_queue_at_rest_needs_no_slot(leave: Any) -> None:
    ready, source = ReadyQueues(), Subscription(_NoQueue())  # type: ignore[arg-type]  # only its state counts
    ready.wake(source)
    ready.needing_slots.add(source)
    leave(ready, source)
    assert not ready.needing_slots
