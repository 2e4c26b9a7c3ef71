"""``max_waiting`` as a program with ``app.dq`` sees it, on a real Redis, without a worker."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_dq import AnyOf, QueueFull
from celery_dq.testing.waiting import wait_until
from tests.integration.shop import claim, dead_letter, send


def waiting(shop: Any, tenant: str = "a") -> int:
    """Return how many messages of a tenant wait for their turn."""
    return int(shop.dq.queues["push"].tenant(tenant).waiting)


def fill(shop: Any, count: int, when_full: str = "refuse", **options: Any) -> list[str]:
    """Give tenant ``a`` a bound, and publish as many messages as it allows; return their ids."""
    shop.dq.quotas.set("push", "a", max_waiting=count, when_full=when_full)
    return send(shop, *"a" * count, **options)


def test_a_call_of_a_full_tenant_raises_an_error_that_names_the_bound(shop: Any) -> None:
    fill(shop, 2)
    with pytest.raises(QueueFull, match="2 messages of tenant 'a' wait in queue 'push'") as caught:
        send(shop, "a")
    assert isinstance(caught.value, OperationalError), "code that handles an absent broker handles it, too"
    send(shop, "b")
    assert (waiting(shop), waiting(shop, "b")) == (2, 1)
    claim(shop, want=1)
    send(shop, "a")


def test_messages_that_do_not_wait_for_their_turn_are_not_counted(shop: Any) -> None:
    shop.dq.quotas.set("push", "a", max_waiting=1)
    send(shop, "a", "a", "a", countdown=3600)
    dead_letter(shop)
    send(shop, "a")
    (entry,) = claim(shop)
    assert not entry.reason
    send(shop, "a")
    queue = shop.dq.queues["push"].snapshot()
    assert (waiting(shop), queue.delayed, queue.dead, queue.counters.full) == (1, 3, 1, 0)


def test_messages_behind_a_dedup_lock_are_not_counted(shop: Any) -> None:
    fill(shop, 1, dedup={"key": "k"})
    claim(shop)
    (blocked,) = send(shop, "a", dedup={"key": "k"})
    assert (shop.dq.explain(task_id=blocked).state, waiting(shop)) == ("blocked", 0)
    send(shop, "a")
    with pytest.raises(QueueFull):
        send(shop, "a")


def test_messages_that_were_accepted_before_are_never_refused(shop: Any) -> None:
    replayed = dead_letter(shop)
    (moved,) = send(shop, "a", queue="other")
    (later,) = send(shop, "a", countdown=0.1)
    fill(shop, 2)
    assert shop.dq.queues["other"].move("push", task_id=moved) == 1
    assert shop.dq.dead_letters["push"].replay(replayed) == 1
    wait_until(lambda: promoted(shop) == 5, what="the delayed message waits for its turn")
    assert {moved, replayed, later} <= {*kept(shop)}
    with pytest.raises(QueueFull):
        send(shop, "a")


def promoted(shop: Any) -> int:
    """Return how many messages wait after all that are due have been promoted."""
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.claim("worker:1", lease_ms=60_000, want=0).run(client)
    return waiting(shop)


@pytest.mark.parametrize("when_full", ["refuse", "wait"])
def test_a_lower_bound_keeps_waiting_messages(shop: Any, when_full: str) -> None:
    shop.conf.dq_publish_timeout = 0.1
    fill(shop, 5, when_full)
    shop.dq.quotas.set("push", "a", max_waiting=2)
    with pytest.raises(QueueFull):
        send(shop, "a")
    assert waiting(shop) == 5
    claim(shop, want=4)
    send(shop, "a")


def test_with_discard_the_first_messages_make_room(shop: Any) -> None:
    first, second, third = fill(shop, 3, "discard")
    (newest,) = send(shop, "a")
    assert kept(shop) == [second, third, newest]
    assert "will not run" in shop.dq.explain(task_id=first).sentence
    # The most urgent message is the first in line, even if it is the new one.
    (urgent,) = send(shop, "a", priority=9)
    assert kept(shop) == [second, third, newest]
    assert "will not run" in shop.dq.explain(task_id=urgent).sentence
    # A lower bound takes effect with the next call.
    shop.dq.quotas.set("push", "a", max_waiting=1)
    assert waiting(shop) == 3
    assert send(shop, "a") == kept(shop)
    assert shop.dq.queues["push"].snapshot().counters.overflowed == 5


def kept(shop: Any) -> list[str]:
    """Return the task ids that wait, in their order."""
    return [each.task_id for each in shop.dq.queues["push"].peek(9, tenant="a")]


def test_with_dead_letter_the_first_messages_can_be_replayed(shop: Any) -> None:
    (first,) = fill(shop, 1, "dead_letter")
    send(shop, "a")
    (letter,) = shop.dq.dead_letters["push"].list()
    assert (letter.task_id, letter.reason, letter.tenant) == (first, "overflow", "a")
    shop.dq.queues["push"].purge()
    assert shop.dq.dead_letters["push"].replay() == 1
    assert waiting(shop) == 1


def test_a_default_bounds_each_tenant_and_each_set_of_resources(shop: Any) -> None:
    shop.dq.quotas.set_default("push", max_waiting=2)
    either = AnyOf("gpu-1", "gpu-2")
    for tenant in ("a", "b", "gpu-1", either):
        for _ in range(4):
            with suppress(QueueFull):
                shop.tasks["notify"].apply_async((0, 0), tenant=tenant)
    assert [waiting(shop, each) for each in ("a", "b", "gpu-1", either)] == [2, 2, 2, 2]
    assert "so new calls are refused" in shop.dq.explain(tenant=either, queue="push").sentence
    shop.dq.quotas.remove_default("push")
    send(shop, "a")
