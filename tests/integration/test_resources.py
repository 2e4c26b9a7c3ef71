"""``app.dq`` and a producer with messages that any of several resources may take, without a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import celery_dq
from celery_dq import AnyOf
from celery_dq.errors import InvalidQuota, InvalidRequest, InvalidTenant
from celery_dq.inspector.live_quotas import LiveQuotas, read_document
from celery_dq.options import Quota
from tests.dq_command import run_dq
from tests.integration.partitioned_shop import A, B, claim_in
from tests.integration.shop import claim, send

A_B = AnyOf("a", "b")


def test_a_set_is_shown_with_its_backlog_and_its_resources(shop: Any) -> None:
    push = shop.dq.queues["push"]
    shop.dq.quotas.set("push", "a", concurrency=1)
    shop.dq.quotas.pause("push", "b")
    ids = send(shop, A_B, A_B, A_B)
    claim(shop, 3)
    assert {each.tenant: (each.state, each.waiting) for each in push.tenants()} == {
        A_B: ("resource_set", 2),
        "a": ("at_concurrency", 0),
        "b": ("paused", 0),
    }
    assert [each.tenant for each in push.tenant_page(state="resource_set").tenants] == [A_B]
    assert [each.id for each in push.peek()] == [each.id for each in push.peek(tenant=A_B)] == ids[1:]
    snapshot = push.snapshot()
    assert (snapshot.waiting, snapshot.resource_sets, snapshot.at_concurrency, snapshot.paused) == (
        2,
        1,
        1,
        1,
    )
    assert snapshot.oldest_waiting_s > 0
    assert "resource_set" in run_dq(shop, "tenants push").output
    assert "a resource" in run_dq(shop, "top --once").output


def test_an_explanation_names_the_wait_of_each_resource(shop: Any) -> None:
    shop.dq.quotas.set("push", "a", concurrency=1)
    shop.dq.quotas.pause("push", "b")
    ids = send(shop, A_B, A_B)
    claim(shop, 2)
    found = shop.dq.explain(tenant=A_B, queue="push")
    assert (found.reason, found.state) == ("resources", "resource_set")
    assert "'a': 1 of 1 run at once" in found.sentence
    assert "'b': it is paused until" in found.sentence
    assert shop.dq.explain(task_id=ids[1]).reason == "resources"
    assert "with worker worker:1 for resource 'a': it runs" in shop.dq.explain(task_id=ids[0]).sentence
    assert shop.dq.queues["push"].find(ids[0]).resource == "a"
    shop.dq.quotas.resume("push", "b")
    found = shop.dq.explain(tenant=A_B, queue="push")
    assert found.reason == "turn"
    assert "resource 'b' has room" in found.sentence


def test_a_set_in_a_singleton_queue_waits_for_its_leader(shop: Any) -> None:
    send(shop, A_B)
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.fence(1).run(client)
    found = shop.dq.explain(tenant=A_B, queue="push")
    assert found.reason == "no-leader"
    assert "resource 'a' has room, no worker leads this singleton queue" in found.sentence


def test_runnable_messages_of_a_set_are_those_that_its_resources_have_room_for(shop: Any) -> None:
    push = shop.dq.queues["push"]
    send(shop, A_B, A_B, A_B, A_B, A_B)
    assert push.backlogs().runnable == 5
    shop.dq.quotas.set("push", "a", concurrency=1)
    shop.dq.quotas.set("push", "b", concurrency=3)
    assert push.backlogs().runnable == 4
    send(shop, "b", "b")
    assert push.backlogs().runnable == 2 + 2
    assert [(each.tenant, each.waiting) for each in push.backlogs(1).largest] == [(A_B, 5)]
    shop.dq.quotas.pause("push", "a")
    shop.dq.quotas.pause("push", "b")
    assert push.backlogs().runnable == 0


def test_a_tenant_is_cancelled_moved_and_found_without_its_sets(shop: Any) -> None:
    push = shop.dq.queues["push"]
    (own,) = send(shop, "a")
    ids = send(shop, A_B, A_B)
    assert push.find(ids[0]).state == "waiting"
    assert push.cancel_tenant("a") == 1
    assert push.move(to="other", tenant=A_B) == 2
    assert sorted(each.id for each in shop.dq.queues["other"].peek(tenant=A_B)) == sorted(ids)
    assert {each.resource for each in claim(shop, 2, "other")} == {"a", "b"}
    send(shop, A_B)
    assert push.cancel_tenant("any_of(b,a)") == 1
    assert own not in {each.id for each in push.peek()}


def test_calls_with_one_dedup_key_are_one_in_a_set(shop: Any) -> None:
    notify = shop.tasks["notify"]
    first = notify.apply_async(("x",), tenant=A_B, dedup={"key": "{order}"})
    second = notify.apply_async(("x",), tenant=AnyOf("b", "a"), dedup={"key": "{order}"})
    assert second.covering == first.id
    (entry,) = claim(shop, 5)
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.release("worker:1", [entry.tag], mode="unstarted").run(client)
    third = notify.apply_async(("x",), tenant=A_B, dedup={"key": "{order}"})
    assert third.covering == first.id
    assert [each.id for each in claim(shop, 5)] == [first.id]


def test_a_set_has_no_quota_and_no_pause(shop: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: shop.dq.quotas.set("push", A_B, rate=1),
        lambda: shop.dq.quotas.pause("push", A_B),
        lambda: shop.dq.queues["push"].pause(A_B),
    ]
    for call in calls:
        with pytest.raises(InvalidTenant, match="is a set of resources, which has no"):
            call()
    wanted = LiveQuotas(tenants={A_B: Quota(weight=2)})
    with pytest.raises(InvalidTenant, match="set of resources"):
        shop.dq.quotas.make(shop.dq.quotas.changes("push", wanted))
    assert not shop.dq.quotas.list("push")
    with pytest.raises(InvalidQuota, match="is a set of resources"):
        read_document('{"push": {"tenants": {"any_of(a,b)": {}}}}', "file")


def test_a_queue_with_several_partitions_refuses_a_set(wide: Any, queue: Any) -> None:
    with pytest.raises(InvalidTenant, match="has 4 partitions"):
        send(wide, AnyOf(A, B))
    assert queue.depth == 0
    send(wide, A)
    assert len(claim_in(wide, A)) == 1


@pytest.mark.parametrize("where", ["waiting", "delayed", "in flight", "blocked"])
def test_a_queue_gets_no_more_partitions_while_it_has_messages_for_a_set(shop: Any, where: str) -> None:
    push, notify = shop.dq.queues["push"], shop.tasks["notify"]
    options: dict[str, Any] = {}
    if where == "delayed":
        options["countdown"] = 3600
    elif where == "blocked":
        options["dedup"] = {"key": "k"}
    first = notify.apply_async(("x",), tenant=A_B, **options)
    claimed = claim(shop) if where in ("in flight", "blocked") else []
    if where == "blocked":
        notify.apply_async(("y",), tenant=A_B, **options)
        with shop.dq._broker.open_home("push") as (partition, client):
            partition.ack("worker:1", settle=[claimed[0].tag]).run(client)
    # In another partition, its resources would have neither their quotas nor their slots.
    with pytest.raises(InvalidRequest, match=r"wait or run for 'any_of\(a,b\)'"):
        push.set_partitions(4)
    if where == "waiting":
        push.cancel(first.id)
        assert push.set_partitions(2, timeout=0).after == 2


@pytest.fixture
def buffered(broker_url: str, tmp_path: Path) -> Iterator[Any]:
    """An app whose calls are buffered, with a task for two resources."""
    with Celery("studio", broker=broker_url, set_as_current=False) as plain:
        plain.conf.update(dq_buffer=True, dq_buffer_folder=str(tmp_path / "spill"), task_default_queue="push")
        app: Any = celery_dq.setup(plain)

        @plain.task(shared=False, name="render", tenant=A_B)
        def render(scene: int) -> None: ...

        yield app
        app.dq.buffer.close(timeout=0.2)


def test_buffered_calls_reach_their_set(buffered: Any) -> None:
    render = buffered.tasks["render"]
    ids = [render.delay(number).id for number in range(3)]
    ids.append(render.apply_async((3,), tenant=AnyOf("b", "c")).id)
    buffered.dq.buffer.flush(timeout=30)
    assert {each.tenant: each.waiting for each in buffered.dq.queues["push"].tenants() if each.waiting} == {
        A_B: 3,
        "any_of(b,c)": 1,
    }
    assert sorted(each.id for each in claim(buffered, 5)) == sorted(ids)


def test_a_buffered_call_to_a_set_is_rejected_by_several_partitions_and_others_are_not(buffered: Any) -> None:
    buffered.conf.dq_queues = {"push": {"partitions": 4}}
    reported: list[tuple[str, str]] = []
    buffered.dq.buffer.on_error(lambda error, message, state: reported.append((message.task_id, state)))
    render = buffered.tasks["render"]
    first = render.apply_async((0,), tenant="a")
    refused = render.apply_async((1,))
    last = render.apply_async((2,), tenant="b")
    buffered.dq.buffer.flush(timeout=30)
    assert reported == [(refused.id, "rejected")]
    assert sorted(each.id for each in buffered.dq.queues["push"].peek()) == sorted([first.id, last.id])


def test_buffered_calls_reach_the_shares_of_a_spread_tenant(buffered: Any) -> None:
    buffered.conf.dq_queues = {"push": {"partitions": 4}}
    buffered.dq.quotas.set("push", "42", concurrency=4, spread=2)
    render = buffered.tasks["render"]
    ids = [render.apply_async((number,), tenant="42").id for number in range(20)]
    buffered.dq.buffer.flush(timeout=30)
    push = buffered.dq.queues["push"]
    assert sorted(each.id for each in push.peek(30)) == sorted(ids)
    assert len([each for each in push.snapshot().partitions if each.waiting]) == 2
