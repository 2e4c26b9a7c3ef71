"""``app.dq.queues[…].pause``, ``celery dq pause``, and where a pause is shown."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dq.errors import InvalidRequest
from tests.dq_command import Run
from tests.integration.shop import claim, send, throttle

LATER = datetime(2100, 1, 1, 12, tzinfo=timezone.utc)


def test_a_queue_is_paused_until_a_time(run: Run, shop: Any) -> None:
    (task_id,) = send(shop, "a")
    text = run(f"pause push --until {LATER:%Y-%m-%dT%H:%MZ}")
    assert text == f"Queue 'push' is paused until {LATER.astimezone().isoformat(timespec='seconds')}.\n"
    assert claim(shop) == []
    pause = shop.dq.queues["push"].snapshot().pause
    assert pause.until == LATER
    assert abs(datetime.now(timezone.utc) - pause.since) < timedelta(minutes=2)
    assert "until 2100-01-01T12:00:00+00:00" in run("queues")
    assert "until 2100-01-01T12:00:00+00:00" in run("status")
    assert json.loads(run("queues --json"))[0]["pause"]["until"] == LATER.isoformat()
    found = shop.dq.explain(task_id=task_id)
    assert (found.reason, found.until) == ("paused", LATER)
    assert "the queue is paused until 2100-01-01T12" in found.sentence
    assert run("resume push") == "Queue 'push' is resumed.\n"
    assert "pause" not in run("queues").split()
    assert shop.dq.queues["push"].snapshot().pause is None
    assert [each.id for each in claim(shop)] == [task_id]


def test_a_tenant_is_paused_for_a_time(run: Run, shop: Any) -> None:
    send(shop, "a", "b")
    before = datetime.now(timezone.utc)
    run("pause push --tenant a --for 2h")
    until = shop.dq.quotas.paused("push")["a"].until
    assert timedelta(hours=1.9) < until - before < timedelta(hours=2.1)
    (found,) = (each for each in shop.dq.queues["push"].tenants() if each.tenant == "a")
    assert (found.state, found.paused_until, found.until) == ("paused", until, until)
    assert f"a: paused until {until.isoformat(timespec='seconds')}" in run("quotas get push")
    assert f"; paused until {until.isoformat(timespec='seconds')}" in run("quotas get push a")
    assert shop.dq.explain(tenant="a", queue="push").until == until
    assert len(claim(shop, want=5)) == 1
    run("pause push --tenant a")
    assert shop.dq.quotas.paused("push")["a"].until is None
    assert run("resume push --tenant a") == "Tenant 'a' of 'push' is resumed.\n"
    assert len(claim(shop, want=5)) == 1


def test_a_pause_in_the_past_and_other_brokers(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    with pytest.raises(InvalidRequest, match="is over by the clock of the server"):
        queue.pause(until=datetime(2020, 1, 1))
    for until in (datetime(1970, 1, 1, tzinfo=timezone.utc), datetime(1969, 1, 1), datetime.max):
        with pytest.raises(InvalidRequest, match="datetime of the years 1970 to 2254"):
            queue.pause(until=until)
    with pytest.raises(InvalidRequest, match="give seconds from 0 to"):
        queue.pause("a", until=timedelta.max)
    for length in (timedelta(0), timedelta(-1)):
        with pytest.raises(InvalidRequest, match=f"until = {length}: a pause needs a longer time"):
            queue.pause("a", until=length)
    with pytest.raises(InvalidRequest, match="until = 5: .* 1970 to 2254, or a timedelta"):
        queue.pause("a", until=5)
    assert queue.snapshot().pause is None
    assert queue.resume() is False


def test_a_pause_that_is_over_is_not_shown(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    for tenant in (None, "a"):
        pause = queue.pause(tenant, until=timedelta(microseconds=1))
        assert pause.until > pause.since
    assert queue.snapshot().pause is None
    assert shop.dq.quotas.paused("push") == {}


def test_a_pause_that_is_over_explains_nothing(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    send(shop, "a")
    pause = queue.pause("a", until=timedelta(microseconds=1))
    # No worker has claimed since.
    (found,) = queue.tenants()
    assert (found.state, found.paused_since, found.quota.paused) == ("eligible", None, False)
    assert shop.dq.quotas.get("push", "a").paused is False
    assert queue.explain("a").reason == "no-worker"
    assert queue.pause("a").since > pause.since


def test_the_pause_that_ends_last_is_the_explanation(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    send(shop, "a")
    queue.pause("a", until=timedelta(hours=1))
    queue.pause(until=LATER)
    assert "the queue is paused until 2100" in queue.explain("a").sentence
    queue.pause(until=timedelta(minutes=1))
    found = queue.explain("a")
    assert ": it is paused until" in found.sentence
    assert found.until == shop.dq.quotas.paused("push")["a"].until
    shop.dq.quotas.set_default("push", paused=True)
    found = queue.explain("a")
    assert (found.until, "its quota has paused = True" in found.sentence) == (None, True)


def test_the_pause_by_a_task_is_shown_with_its_cause(run: Run, shop: Any) -> None:
    (task_id,) = send(shop, "a")
    cause = throttle(shop, "a", "429 of \x1b[31mapi")
    why = r"because task notify[7d3c] was throttled (429 of \x1b[31mapi)"
    pause = shop.dq.quotas.paused("push")["a"]
    assert pause.cause == cause
    (tenant,) = shop.dq.queues["push"].tenants()
    assert (tenant.state, tenant.paused_until, tenant.pause_cause) == ("paused", pause.until, cause)
    for found in (shop.dq.explain(tenant="a", queue="push"), shop.dq.explain(task_id=task_id)):
        assert (found.reason, found.until) == ("paused", pause.until)
        assert why in found.sentence
    assert f"a: paused until {pause.until.isoformat(timespec='seconds')}, {why}" in run("quotas get push")
    assert why in run("quotas get push a")
    stored = {"reason": "429 of \x1b[31mapi", "task": "notify", "task_id": "7d3c"}
    assert json.loads(run("quotas get push --json"))["paused"]["a"]["cause"] == stored
    assert json.loads(run("tenants push --json"))[0]["pause_cause"] == stored
    assert run("tenants push").splitlines()[1].endswith(why.removeprefix("because "))
    assert shop.dq.audit() == []
    shop.dq.quotas.resume("push", "a")
    assert "pause_cause" not in run("tenants push")


def test_a_person_ends_or_replaces_the_pause_by_a_task(run: Run, shop: Any) -> None:
    throttle(shop, "a")
    run("pause push --tenant a --for 5m --in-advance")
    pause = shop.dq.quotas.paused("push")["a"]
    assert (pause.cause, pause.until - pause.since < timedelta(minutes=6)) == (None, True)
    throttle(shop, "a")
    assert shop.dq.quotas.paused("push")["a"].cause is not None
    assert run("resume push --tenant a") == "Tenant 'a' of 'push' is resumed.\n"
    assert shop.dq.quotas.paused("push") == {}


def test_the_cause_of_a_pause_follows_its_tenant_to_another_partition(shop: Any) -> None:
    tenants = [f"t{number}" for number in range(8)]
    send(shop, *tenants)
    causes = {tenant: throttle(shop, tenant, tenant) for tenant in tenants}
    shop.dq.queues["push"].set_partitions(4)
    pauses = shop.dq.quotas.paused("push")
    assert {tenant: pause.cause for tenant, pause in pauses.items()} == causes
    shop.dq.quotas.set("push", "t0", spread=3)
    throttle(shop, "t0", "again")
    with shop.dq._broker.open("push") as (partitions, client):
        stored = [each for each in partitions if client.hexists(each.keys.pause_causes, "t0")]
    assert len(stored) == 3
