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
    ready, subscription = ReadyQueues(), Subscription(_NoQueue())  # type: ignore[arg-type]  # only its state counts
    ready.wake(subscription)
    ready.needing_slots.add(subscription)
    leave(ready, subscription)
    assert not ready.needing_slots


def test_a_queue_at_its_own_limit_needs_no_capacity() -> None:
    limits = [0]
    ready = ReadyQueues()
    subscription = Subscription(_NoQueue(), lambda: limits[-1])  # type: ignore[arg-type]  # only its state counts
    ready.wake(subscription)
    without_room = ready.has_claimable
    assert not without_room
    assert ready.next_claimable(may_lead=True) is None
    limits.append(1)
    assert ready.has_claimable
    assert ready.next_claimable(may_lead=True) is subscription
