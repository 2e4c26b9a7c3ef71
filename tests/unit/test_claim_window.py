"""How many messages a worker claims ahead, and when it delivers them."""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import pytest

from celery_dq.protocols import WorkerCapacity
from celery_dq.transport.in_flight import QoS
from celery_dq.transport.redis.consuming.channel_claims import LATE_WEIGHT, MAX_CLAIM, ClaimWindow

CLAIM_AHEAD_S = 0.05


class Slots:
    """The capacity of a worker with this many free slots, for which this many messages fit the time."""

    def __init__(self, free: int, fitting: int = 1000) -> None:
        self.free = free
        self.fitting = fitting

    def free_slots(self) -> int:
        return self.free

    def claim_ahead(self) -> int:
        return self.fitting


def slots(free: int, fitting: int = 1000) -> WorkerCapacity:
    return cast("WorkerCapacity", Slots(free, fitting))


@pytest.fixture
def qos() -> Any:
    prefetch: Any = QoS(None, 4)
    prefetch._on_collect.cancel()
    return prefetch


@pytest.fixture
def window() -> ClaimWindow:
    window = ClaimWindow(CLAIM_AHEAD_S)
    for _ in range(99):
        window.delivered(0.0)
    return window


def test_the_claims_of_a_busy_worker_are_halves_of_the_window(window: ClaimWindow, qos: Any) -> None:
    assert window.room(slots(0), qos, 0) == (50, 0)
    assert window.room(slots(0), qos, 50) == (50, 0)
    assert window.room(slots(0), qos, 51) == (0, 0)
    # Three requests are reserved in Celery beyond the slots.
    assert window.room(slots(-3), qos, 47) == (50, 0)
    assert window.room(slots(-3), qos, 48) == (0, 0)


def test_the_service_time_limits_the_claim(window: ClaimWindow, qos: Any) -> None:
    assert window.room(slots(0, fitting=10), qos, 0) == (5, 0)
    assert window.room(slots(0, fitting=0), qos, 0) == (0, 0)
    assert window.room(slots(2, fitting=0), qos, 0) == (2, 2)
    assert window.room(slots(2, fitting=0), qos, 1) == (1, 1)


def test_late_messages_shrink_the_window(window: ClaimWindow, qos: Any) -> None:
    for _ in range(10):
        window.delivered(2 * CLAIM_AHEAD_S)
    assert window.room(slots(0), qos, 0) == (50 - 10 * LATE_WEIGHT // 2, 0)
    for _ in range(100):
        window.delivered(2 * CLAIM_AHEAD_S)
    assert window.room(slots(1), qos, 0) == (1, 1)
    window.delivered(0.0)
    assert window.room(slots(0), qos, 0) == (1, 0)


def test_a_closed_window_opens_with_the_next_delivery(window: ClaimWindow, qos: Any) -> None:
    window.close()
    assert window.room(slots(0), qos, 0) == (0, 0)
    window.delivered(0.0)
    assert window.room(slots(0), qos, 0) == (1, 0)


def test_the_window_has_a_limit(window: ClaimWindow, qos: Any) -> None:
    for _ in range(1000):
        window.delivered(0.0)
    assert window.room(slots(0), qos, MAX_CLAIM) == (MAX_CLAIM, 0)
    assert window.room(slots(0), qos, MAX_CLAIM + 1) == (0, 0)


def test_a_full_worker_gets_messages_when_half_of_the_prefetch_count_or_a_slot_is_free(
    window: ClaimWindow, qos: Any
) -> None:
    for tag in "abcd":
        assert window.may_deliver(slots(0), qos)
        qos.append(None, tag)
    assert not window.may_deliver(slots(1), qos)
    qos._delivered.pop("a")
    assert not window.may_deliver(slots(0), qos)
    assert window.may_deliver(slots(1), qos)
    qos.append(None, "a")
    assert not window.may_deliver(slots(0), qos)
    for tag in "ab":
        qos._delivered.pop(tag)
    assert window.may_deliver(slots(0), qos)
    qos.append(None, "a")
    assert window.may_deliver(slots(0), qos)


@pytest.mark.parametrize("allows", [True, False])
def test_a_replaced_check_of_the_prefetch_count_decides_about_claims(
    window: ClaimWindow, qos: Any, allows: bool
) -> None:
    qos.can_consume = MethodType(lambda _: allows, qos)
    assert window.room(slots(0), qos, 0) == (0, 0)
    assert window.room(slots(2), qos, 0) == ((2, 2) if allows else (0, 0))
