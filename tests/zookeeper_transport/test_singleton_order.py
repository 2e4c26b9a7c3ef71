"""A singleton queue: a message that comes back keeps its place, and those behind it wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.options import resolve
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.zookeeper import subscription as subscription_module
from tests.conformance.kombu_queue import KombuQueue, drain_until
from tests.zookeeper_transport.expiry import expire
from tests.zookeeper_transport.kinds import Connect

COUNT = 5


@pytest.fixture
def leader(connect: Connect) -> Any:
    """The connection of a worker that leads the queue ``ledger``."""
    context = AppContext("leader", lambda: resolve({}))
    context.leaderships = SimpleNamespace(is_singleton=lambda queue: queue == "ledger")
    options: dict[str, Any] = {APP_CONTEXT: context}
    return connect(**options)


def next_body(room: KombuQueue) -> Any:
    """Fetch the next message; return its body, or None if no message may begin now."""
    message = room.bound.get()
    if message is None:
        return None
    room.received.append(message)
    return message.payload


@pytest.mark.parametrize("behind", [1, COUNT])
def test_a_suspect_that_waits_for_another_one_keeps_its_place(
    connect: Connect, leader: Any, behind: int
) -> None:
    # Given a worker that was lost while it ran a message of each queue
    lost = connect()
    ledger, mail = (KombuQueue(lost, queue) for queue in ("ledger", "mail"))
    ledger.publish(*range(1 + behind))
    mail.publish("mail")
    assert next_body(ledger) == 0
    mail.consume()
    mail.drain(1)
    expire(lost)
    with pytest.raises(lost.connection_errors):
        drain_until(lost, lambda: False, deadline=60)
    # When its successor runs the one message
    ledger, mail = (KombuQueue(leader, queue) for queue in ("ledger", "mail"))
    mail.consume()
    mail.drain(1)
    # Then the other one waits, and so do those behind it.
    assert [next_body(ledger) for _ in range(2 * COUNT)] == [None] * 2 * COUNT
    mail.received[0].ack()
    wait_until(lambda: next_body(ledger) is not None)
    assert next_body(ledger) == 1
    assert ledger.bodies == [0, 1]


def test_a_requeued_message_is_next_although_the_queue_is_long(
    leader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The queue counts as long, and as just listed.
    monkeypatch.setattr(subscription_module, "SHORT", 1)
    monkeypatch.setattr(subscription_module, "LISTING_SHARE", 1e9)
    ledger = KombuQueue(leader, "ledger")
    ledger.publish(*range(COUNT))
    for _ in range(2):
        assert next_body(ledger) == 0
        ledger.received[-1].requeue()
    assert next_body(ledger) == 0
