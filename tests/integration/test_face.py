"""``app.dq`` on a real Redis, without a worker: look, cancel, move, quotas, dead letters, explain."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

import celery_dq
from celery_dq.app.broker import Opened
from celery_dq.errors import ConfigurationError, InvalidMessage, InvalidQuota, InvalidTenant
from celery_dq.options import Quota
from celery_dq.testing.processes import free_port


def send(app: Any, *merchants: Any, **options: Any) -> list[str]:
    """Publish a `notify` for each of them; returns the task ids."""
    notify = app.tasks["notify"]
    return [notify.apply_async((merchant, place), **options).id for place, merchant in enumerate(merchants)]


def claim(app: Any, want: int = 1, queue: str = "push") -> list[Any]:
    """Take messages, as a worker would."""
    with app.dq._broker.open(queue) as (partition, client):
        claimed = partition.claim("worker:1", lease_ms=60_000, want=want).run(client)
        return list(claimed.entries)


def bury(app: Any, merchant: str = "a") -> str:
    """Publish a message and give up on it; returns its id."""
    (task_id,) = send(app, merchant)
    (entry,) = claim(app)
    with app.dq._broker.open("push") as (partition, client):
        partition.dead_letter("worker:1", entry.tag, reason="rejected", worker="worker:1").run(client)
    return task_id


# Looking.


def test_a_queue_is_counted_by_what_its_messages_do(shop: Any) -> None:
    send(shop, "a", "a", "b")
    send(shop, "c", countdown=100)
    queue = shop.dq.queues["push"]
    queue.cancel(send(shop, "d")[0])
    assert len([each for each in claim(shop, want=2) if not each.reason]) == 1
    bury(shop)
    now = queue.snapshot()
    assert (now.waiting, now.delayed, now.held, now.discards, now.dead) == (2, 1, 2, 0, 1)
    assert queue.depth == 3
    assert [(consumer.name, consumer.held) for consumer in now.consumers] == [("worker:1", 2)]
    assert 0 < now.consumers[0].lease_s <= 60


def test_the_queues_are_those_declared_configured_or_known_to_the_server(shop: Any) -> None:
    shop.conf.dq_queues = {"configured": {"rate": 5}}
    shop.tasks["notify"].apply_async(("a",), queue="declared")
    assert list(shop.dq.queues) == ["configured", "declared", "push"]
    assert "declared" in shop.dq.queues
    assert len(shop.dq.queues) == 3


def test_peek_shows_one_message_of_each_tenant_first(shop: Any) -> None:
    send(shop, "a", "a", "a", "b", "c")
    shop.dq.quotas.pause("push", "c")
    queue = shop.dq.queues["push"]
    assert [message.tenant for message in queue.peek()] == ["a", "b", "c", "a", "a"]
    assert [message.args for message in queue.peek(2, tenant="a")] == ["('a', 0)", "('a', 1)"]
    assert queue.peek(2, tenant="nobody") == []
    assert queue.depth == 5


def test_peek_shows_delayed_messages_by_due_time(shop: Any) -> None:
    later, sooner = (send(shop, "a", countdown=seconds)[0] for seconds in (200, 100))
    found = shop.dq.queues["push"].peek(delayed=True)
    assert [message.id for message in found] == [sooner, later]
    assert found[0].due is not None
    assert abs(found[0].due - datetime.now(timezone.utc) - timedelta(seconds=100)) < timedelta(seconds=20)


def test_a_task_is_found_wherever_it_is(shop: Any) -> None:
    waiting, delayed = send(shop, "a")[0], send(shop, "b", countdown=100)[0]
    elsewhere = send(shop, "c", queue="other")[0]
    places = [
        (found.queue, found.state, found.tenant)
        for each in (waiting, delayed, elsewhere)
        for found in shop.dq.find(each)
    ]
    assert places == [("push", "waiting", "a"), ("push", "delayed", "b"), ("other", "waiting", "c")]
    claim(shop)
    assert shop.dq.find(waiting)[0].state == "claimed"
    assert shop.dq.find(waiting)[0].consumer == "worker:1"
    assert shop.dq.find(bury(shop))[0].state == "dead"
    assert shop.dq.find("never-published") == []


def test_a_foreign_record_is_shown_as_unreadable(shop: Any) -> None:
    (task_id,) = send(shop, "a")
    with shop.dq._broker.open("push") as (partition, client):
        record = client.hget(partition.keys.messages, task_id)
        client.hset(partition.keys.messages, task_id, record[:60] + b"\xff" * (len(record) - 60))
    assert "unreadable" in shop.dq.queues["push"].peek()[0].args


# Cancelling.


def test_a_cancelled_task_is_handed_over_only_to_be_discarded(shop: Any) -> None:
    waiting, delayed = send(shop, "a")[0], send(shop, "b", countdown=100)[0]
    queue = shop.dq.queues["push"]
    assert [queue.cancel(each) for each in (waiting, delayed, waiting)] == ["waiting", "delayed", "discarded"]
    assert sorted((entry.id, entry.reason) for entry in claim(shop, want=5)) == sorted(
        [(waiting, "cancelled"), (delayed, "cancelled")]
    )


def test_a_task_that_is_not_published_yet_can_be_cancelled(shop: Any) -> None:
    assert shop.dq.queues["push"].cancel("soon") == "tombstone"
    assert shop.dq.explain(task_id="soon").reason == "cancelled"
    shop.tasks["notify"].apply_async(("a",), task_id="soon")
    assert claim(shop)[0].reason == "cancelled"


def test_a_tenant_is_cancelled_with_its_delayed_messages(shop: Any) -> None:
    send(shop, *"ab" * 150)
    send(shop, "a", "b", "a", countdown=100)
    queue = shop.dq.queues["push"]
    assert queue.cancel_tenant("a") == 152
    assert (queue.snapshot().waiting, queue.snapshot().delayed, queue.snapshot().discards) == (150, 1, 152)
    assert queue.cancel_tenant("a") == 0


def test_a_task_name_is_cancelled_whatever_its_tenants_and_its_ids(shop: Any) -> None:
    for _ in range(3):
        shop.tasks["invoice"].apply_async(("b",), task_id="same~1")
    send(shop, *range(120))
    send(shop, "a", countdown=100)
    queue = shop.dq.queues["push"]
    assert queue.cancel_task_name("notify") == 121
    assert queue.cancel_task_name("invoice") == 1
    assert queue.depth == 0


def test_purge_removes_without_bookkeeping(shop: Any) -> None:
    send(shop, *range(5))
    send(shop, "a", countdown=100)
    queue = shop.dq.queues["push"]
    assert queue.purge() == 6
    assert claim(shop) == []


# Revoking.


def test_revoke_lasts_without_any_worker(shop: Any) -> None:
    result = shop.tasks["notify"].delay("a")
    other = send(shop, "b", queue="other")[0]
    result.revoke()
    shop.control.revoke([other, "not-yet"])
    assert [entry.reason for entry in claim(shop, want=5)] == ["cancelled"]
    assert [entry.reason for entry in claim(shop, want=5, queue="other")] == ["cancelled"]
    shop.tasks["notify"].apply_async(("a",), task_id="not-yet", queue="other")
    assert [entry.reason for entry in claim(shop, want=5, queue="other")] == ["cancelled"]


def test_revoke_for_single_workers_leaves_the_broker_alone(shop: Any) -> None:
    (task_id,) = send(shop, "a")
    shop.control.revoke(task_id, destination=["celery@one"])
    assert shop.dq.find(task_id)[0].state == "waiting"


def test_revoke_works_on_a_stock_broker_as_before(redis_url: str) -> None:
    with Celery("stock", broker=redis_url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.control.revoke("some-id")
        app.pool.force_close_all()


# Moving.


def test_a_tenant_is_moved_in_order_and_nothing_is_lost(shop: Any) -> None:
    sent = send(shop, *["a"] * 230)
    stays = send(shop, "b")
    queue = shop.dq.queues["push"]
    assert queue.move("other", tenant="a") == 230
    assert [message.id for message in shop.dq.queues["other"].peek(500)] == sent
    assert [message.id for message in queue.peek()] == stays
    assert queue.snapshot().held == 0
    assert queue.snapshot().consumers == ()


def test_a_task_is_moved_with_its_eta_tenant_and_priority(shop: Any) -> None:
    (task_id,) = send(shop, "vip", countdown=100, priority=7)
    assert shop.dq.queues["push"].move("other", task_id=task_id) == 1
    (found,) = shop.dq.find(task_id)
    assert (found.queue, found.state, found.tenant, found.priority) == ("other", "delayed", "vip", 7)


def test_what_a_worker_has_is_not_moved(shop: Any) -> None:
    (task_id,) = send(shop, "a")
    claim(shop)
    assert shop.dq.queues["push"].move("other", task_id=task_id) == 0
    assert shop.dq.queues["push"].move("other", task_id="unknown") == 0
    assert shop.dq.find(task_id)[0].state == "claimed"


@pytest.mark.parametrize("countdown", [None, 100])
def test_a_mover_that_dies_gives_back(shop: Any, countdown: int | None) -> None:
    (task_id,) = send(shop, "a", countdown=countdown)
    with shop.dq._broker.open("push") as (partition, client):
        assert len(partition.take("move:dead", [task_id], lease_ms=1).run(client)) == 1
        assert shop.dq.find(task_id)[0].state == "claimed"
        while not partition.renew("worker:1", lease_ms=60_000).run(client).reaped:
            pass
    assert shop.dq.find(task_id)[0].state == ("delayed" if countdown else "waiting")


def test_a_move_needs_one_thing_and_another_queue(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    for wrong in ({}, {"task_id": "a", "tenant": "b"}):
        with pytest.raises(InvalidMessage, match="one of them"):
            queue.move("other", **wrong)
    with pytest.raises(InvalidMessage, match="the queue itself"):
        queue.move("push", tenant="a")


# Quotas.


def test_a_quota_is_set_part_by_part_and_removed(shop: Any) -> None:
    quotas = shop.dq.quotas
    quotas.set("push", 42, rate="50/s", burst=10)
    assert quotas.set("push", "42", concurrency=8) == Quota(rate=50, burst=10, concurrency=8)
    assert quotas.list("push") == {"42": Quota(rate=50, burst=10, concurrency=8)}
    quotas.remove("push", 42)
    assert quotas.get("push", 42) == Quota()
    assert quotas.list("push") == {}


def test_a_default_reaches_the_backlog_of_every_tenant(shop: Any) -> None:
    quotas, queue = shop.dq.quotas, shop.dq.queues["push"]
    send(shop, *range(30))
    quotas.set("push", 0, weight=2)
    quotas.set_default("push", paused=True)
    assert quotas.get("push", 1).paused
    (of_0,) = queue.peek(1, tenant=0)
    assert [entry.id for entry in claim(shop, want=50)] == [of_0.id]
    assert queue.snapshot().paused == 29
    quotas.remove_default("push")
    assert queue.snapshot().paused == 0
    assert len(claim(shop, want=50)) == 29


def test_pause_and_resume_leave_no_trace(shop: Any) -> None:
    send(shop, "a", "b")
    shop.dq.quotas.pause("push", "a")
    assert [message.tenant for message in shop.dq.queues["push"].peek()] == ["b", "a"]
    assert shop.dq.queues["push"].snapshot().paused == 1
    shop.dq.quotas.resume("push", "a")
    assert shop.dq.quotas.list("push") == {}
    assert len(claim(shop, want=5)) == 2


@pytest.mark.parametrize(
    ("parts", "lesson"),
    [({"rate": "fast"}, "fast"), ({"weigth": 2}, "did you mean 'weight'"), ({"burst": 0}, "burst")],
)
def test_an_impossible_quota_is_refused(shop: Any, parts: Any, lesson: str) -> None:
    with pytest.raises(InvalidQuota, match=lesson):
        shop.dq.quotas.set("push", "a", **parts)
    with pytest.raises(InvalidQuota, match=lesson):
        shop.dq.quotas.set_default("push", **parts)
    with pytest.raises(InvalidTenant):
        shop.dq.quotas.set("push", "a\n", rate=1)
    assert shop.dq.quotas.list("push") == {}


# Dead letters.


def test_dead_letters_are_listed_replayed_and_purged(shop: Any) -> None:
    first, second, third = bury(shop, "a"), bury(shop, "b"), bury(shop, "c")
    dead = shop.dq.dead_letters["push"]
    assert [(letter.id, letter.reason, letter.tenant) for letter in dead.list()] == [
        (third, "rejected", "c"),
        (second, "rejected", "b"),
        (first, "rejected", "a"),
    ]
    assert dead.list(1, offset=1)[0].id == second
    assert dead.list()[0].worker == "worker:1"
    assert dead.list()[0].task == "notify"
    assert dead.replay(second) == 1
    assert dead.replay(second) == 0
    assert shop.dq.find(second)[0].state == "waiting"
    assert dead.purge(first) == 1
    assert len(dead) == 1
    assert dead.replay() == 1
    assert dead.purge() == 0
    assert [entry.id for entry in claim(shop, want=5)] == [second, third]


def test_a_dead_letter_is_edited_and_sent_again(shop: Any) -> None:
    task_id = bury(shop, "a")
    dead = shop.dq.dead_letters["push"]
    with pytest.raises(InvalidMessage, match="'argz'"):
        dead.edit(task_id, argz=())
    with pytest.raises(InvalidTenant):
        dead.edit(task_id, tenant="\n")
    assert dead.edit(task_id, args=("z", 9), tenant="z", priority=3) is not None
    assert dead.edit(task_id, tenant="z") is None
    with shop.connection_for_read() as connection:
        message = connection.default_channel.basic_get("push", no_ack=True)
        message = connection.default_channel.message_to_python(message)
    assert message.decode()[:2] == [["z", 9], {}]
    assert (message.properties["tenant"], message.properties["priority"]) == ("z", 3)
    assert message.headers["argsrepr"] == "('z', 9)"


# Explaining.


def test_a_waiting_task_is_explained_by_its_tenant(shop: Any) -> None:
    first, second = send(shop, "a", "a")
    explain = shop.dq.explain
    assert (explain(task_id=first).reason, explain(task_id=second).reason) == ("no-worker", "behind")
    assert "behind 1 message of tenant 'a'" in str(explain(task_id=second))
    shop.dq.quotas.pause("push", "a")
    assert explain(task_id=first).reason == "paused"
    assert "app.dq.quotas.resume('push', 'a')" in str(explain(tenant="a", queue="push"))
    shop.dq.quotas.set("push", "a", paused=False, concurrency=1)
    claim(shop)
    assert explain(task_id=first).reason == "running"
    limited = explain(tenant="a", queue="push")
    assert (limited.reason, limited.until) == ("concurrency", None)
    assert "1 of 1 run at once" in str(limited)


def test_a_throttled_tenant_knows_until_when(shop: Any) -> None:
    shop.dq.quotas.set("push", "a", rate="1/m")
    send(shop, "a", "a")
    assert len(claim(shop, want=5)) == 1
    found = shop.dq.explain(tenant="a", queue="push")
    assert (found.state, found.reason) == ("throttled", "rate")
    assert found.until is not None
    assert timedelta(seconds=30) < found.until - datetime.now(timezone.utc) <= timedelta(seconds=60)


def test_an_eligible_tenant_waits_for_its_turn(shop: Any) -> None:
    send(shop, "z", "a", "b")
    claim(shop)
    found = shop.dq.queues["push"].explain("z")
    assert (found.reason, found.state) == ("turn", "eligible")
    assert "after 1 other tenant" in found.sentence


def test_every_other_state_is_explained(shop: Any) -> None:
    delayed, dead = send(shop, "a", countdown=100)[0], bury(shop)
    explain = shop.dq.explain
    assert explain(task_id=delayed).reason == "eta"
    assert explain(task_id=delayed).until is not None
    assert explain(task_id=dead).reason == "dead"
    shop.dq.queues["push"].cancel(delayed)
    assert explain(task_id=delayed).reason == "cancelled"
    assert explain(task_id="never").reason == "unknown"
    assert explain(tenant="nobody", queue="push").reason == "empty"
    with pytest.raises(InvalidMessage, match="task_id=…, or tenant=… together with queue="):
        explain(tenant="a")


# Connections.


def test_a_broker_of_another_kind_is_an_error_that_says_so(redis_url: str) -> None:
    with Celery("stock", broker=redis_url, set_as_current=False) as app:
        celery_dq.setup(app)
        with pytest.raises(ConfigurationError, match="set broker_url to dq-redis://"):
            app.dq.queues["push"].snapshot()
        app.pool.force_close_all()


def test_a_dead_broker_is_an_error_within_seconds() -> None:
    with Celery("dead", broker=f"dq-redis://127.0.0.1:{free_port()}/0", set_as_current=False) as app:
        celery_dq.setup(app)
        with pytest.raises(OperationalError):
            app.dq.queues["push"].snapshot()


def test_a_wrong_setting_is_an_error_of_the_first_connection(broker_url: str) -> None:
    with Celery("wrong", broker=broker_url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.dq_leese = 5
        with pytest.raises(ConfigurationError, match="did you mean 'dq_lease'"):
            app.send_task("notify")


def test_settings_may_come_after_setup_and_users_options_stay(broker_url: str) -> None:
    with Celery("late", broker=broker_url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.update(dq_environment="sandbox", broker_transport_options={"socket_timeout": 7})
        with app.connection_for_write() as connection:
            assert connection.default_channel.partition("push").keys.environment == "sandbox"
            assert connection.transport_options["socket_timeout"] == 7
        assert app.conf.broker_transport_options == {"socket_timeout": 7}


def test_threads_share_the_face(shop: Any) -> None:
    send(shop, *range(4))
    counts: list[int] = []

    def look() -> None:
        counts.extend(shop.dq.queues["push"].depth for _ in range(10))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [4] * 80


def test_a_lent_partition_is_a_plain_pair(shop: Any) -> None:
    with shop.dq._broker.open("push") as opened:
        assert isinstance(opened, Opened)
        assert opened.partition.keys.queue == "push"
