"""The audit stream: each change of a person is one entry, and no entry has data of messages."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from getpass import getuser
from typing import Any

import pytest
import redis

from celery_dq.app.api import audit
from celery_dq.errors import InvalidRequest, TooFewReplicas
from celery_dq.inspector.dead_letters import DeadLetterFilter
from celery_dq.inspector.live_quotas import LiveQuotas
from celery_dq.keys import audit_stream
from celery_dq.options import Quota
from tests.dq_command import Run
from tests.integration.shop import dead_letter, send


def raw(shop: Any) -> str:
    with shop.dq._broker.channel() as channel:
        return repr(channel.client.xrange(audit_stream("online")))


def test_each_change_is_an_entry(shop: Any) -> None:
    quotas, push, dead = shop.dq.quotas, shop.dq.queues["push"], shop.dq.dead_letters["push"]
    letters = [dead_letter(shop) for _ in range(4)]
    (first, *_) = send(shop, "secret-tenant", "b", "b", "c", "d")
    (key,) = send(shop, "a", dedup={"key": "secret{merchant}"})
    quotas.set("push", "a", rate=5)
    quotas.set("push", "a", paused=True)
    quotas.set("push", "a", paused=False)
    quotas.remove("push", "a")
    quotas.set_default("push", rate=9)
    quotas.make(quotas.changes("push", LiveQuotas()))
    quotas.set_default("push", weight=2)
    quotas.remove_default("push")
    quotas.apply_settings("push")
    push.pause(until=timedelta(hours=1))
    push.pause("c")
    push.resume()
    push.cancel(first)
    push.cancel_tenant("b")
    push.move("other", tenant="c")
    shop.dq.dedup["push"].release(shop.dq.dedup["push"].list()[0].key, tenant="a")
    push.cancel_task_name("notify")
    push.purge()
    dead.replay(letters[0])
    dead.edit(letters[1], args=("secret",))
    dead.purge(letters[2])
    dead.replay()
    entries = list(reversed(shop.dq.audit()))
    assert [(each.action, each.tenant, each.count) for each in entries] == [
        *(("quota_set", "a", 1), ("paused", "a", 1), ("resumed", "a", 1), ("quota_removed", "a", 1)),
        *(("default_set", "", 1), ("quotas_made", "", 1), ("default_set", "", 1), ("default_removed", "", 1)),
        *(("settings_applied", "", 1), ("paused", "", 1), ("paused", "c", 1), ("resumed", "", 1)),
        *(("cancelled", "", 1), ("cancelled", "b", 2), ("moved", "c", 1), ("dedup_evicted", "a", 1)),
        *(("cancelled", "", 2), ("purged", "", 5), ("dead_replayed", "", 1), ("dead_edited", "", 1)),
        *(("dead_purged", "", 1), ("dead_replayed", "", 1)),
    ]
    assert {(each.queue, each.door) for each in entries} == {("push", "app.dq")}
    assert all(each.by.startswith(f"{getuser()}@") for each in entries)
    details = [each.details for each in entries]
    assert details[0].startswith("rate=5/s")
    assert details[9].startswith("until 2")
    assert (details[14], details[15], details[16]) == ("to other", key, "task notify")
    assert (details[5], details[18]) == ("default", letters[0])
    assert details[19] == f"{letters[1]}: args"
    assert "secret" not in raw(shop)
    assert abs(entries[-1].at - datetime.now(timezone.utc)) < timedelta(minutes=2)


def test_a_filter_and_the_tenants_of_made_quotas_are_named(shop: Any) -> None:
    quotas, dead = shop.dq.quotas, shop.dq.dead_letters["push"]
    letters = [dead_letter(shop), dead_letter(shop)]
    since = datetime(2026, 3, 1, tzinfo=timezone.utc)
    dead.replay(wanted=DeadLetterFilter("a", "notify", "reject", since))
    (entry,) = shop.dq.audit()
    assert (entry.tenant, entry.details) == (
        "a",
        "task notify, reason reject, since 2026-03-01T00:00:00+00:00",
    )
    quotas.make(quotas.changes("push", LiveQuotas(None, {name: Quota(weight=2) for name in "abcd"})))
    assert (shop.dq.audit()[0].details, shop.dq.audit()[0].count) == ("'a', 'b', 'c', …", 4)
    with pytest.raises(InvalidRequest, match="either message_id or wanted"):
        dead.replay(letters[0], wanted=DeadLetterFilter("b"))


def test_a_call_that_changes_nothing_is_no_entry(shop: Any) -> None:
    push, dead = shop.dq.queues["push"], shop.dq.dead_letters["push"]
    push.resume()
    push.purge()
    push.purge(dry_run=True)
    push.cancel_tenant("a")
    assert push.cancel("unknown") == "tombstone"
    dead.replay()
    dead.purge("x")
    shop.dq.dedup["push"].release("k")
    assert shop.dq.audit() == []


def test_the_door_and_the_user(run: Run, shop: Any) -> None:
    run("pause push")
    with shop.dq.audit.through("admin", by="anna"):
        shop.dq.queues["push"].resume()
        shop.dq.quotas.set("other", "a", rate=1)
    with pytest.raises(InvalidRequest), shop.dq.audit.through("admin", by="anna"):
        shop.dq.queues["push"].pause(until=datetime(2020, 1, 1))
    assert shop.dq.audit.author != "anna"
    (origin,) = shop.dq.quotas.origins("other", "a")
    assert origin.by == "anna"
    entries = json.loads(run("audit --json"))
    assert [(each["door"], each["action"]) for each in entries] == [
        *(("admin", "quota_set"), ("admin", "resumed"), ("celery dq", "paused")),
    ]  # fmt: skip
    assert [each["by"] for each in entries[:2]] == ["anna", "anna"]
    assert [each["action"] for each in json.loads(run("audit --queue push --limit 1 --json"))] == ["resumed"]
    assert "quota_set" in run("audit --since 1h --queue other")
    assert run("audit --since 2100-01-01") == "No change is known.\n"
    assert "Did you mean 'push'?" in run("audit --queue pusj", status=1)
    assert "is not a time such as" in run("audit --since 2100", status=2)
    assert "before the year 1" in run("audit --since 999999d", status=2)
    refused = run("audit --since yesterday", status=2)
    assert "'yesterday' is not a time such as" in refused
    assert "nor a duration such as 2h" in refused
    assert "quota_set" in run("audit --since 1960-01-01")
    assert len(shop.dq.audit(since=datetime.min)) == 3


def test_an_interrupted_change_is_written_with_its_count(shop: Any) -> None:
    dead_letters = shop.dq.dead_letters["push"]
    for _ in range(3):
        dead_letter(shop)

    def interrupt(count: int) -> None:
        if count == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dead_letters.replay(on_progress=interrupt)
    (entry,) = shop.dq.audit()
    assert (entry.action, entry.count, entry.details) == ("dead_replayed", 2, "interrupted; at least 2")


@pytest.mark.parametrize("error", [KeyboardInterrupt, redis.TimeoutError, TooFewReplicas])
def test_a_change_whose_reply_is_lost_is_written(shop: Any, error: type[BaseException]) -> None:
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.pause(None).run(client)
        with pytest.raises(error), shop.dq.audit.change(client, "purged", "push", details="why"):
            raise error
        # A refused change has changed nothing.
        with pytest.raises(redis.ResponseError), shop.dq.audit.change(client, "purged", "push"):
            client.execute_command("HGET", partition.keys.state)
        with pytest.raises(InvalidRequest), shop.dq.audit.change(client, "purged", "push"):
            raise InvalidRequest
    (entry,) = shop.dq.audit()
    assert (entry.action, entry.count, entry.details) == ("purged", 0, "why; interrupted; at least 0")


def test_a_failed_write_is_a_warning(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    with shop.dq._broker.channel() as channel:
        channel.client.set(audit_stream("online"), "of another type")
    with caplog.at_level(logging.WARNING, "celery_dq"):
        shop.dq.queues["push"].pause()
    assert shop.dq.queues["push"].snapshot().pause is not None
    (record,) = [each for each in caplog.records if getattr(each, "event", "") == "audit_not_written"]
    assert "Change paused of queue push by" in record.getMessage()


def test_the_stream_is_bounded_and_read_in_chunks(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with shop.dq._broker.open_home("push") as (_, client):
        shop.dq.queues["other"].pause()
        for number in range(600):
            with shop.dq.audit.change(client, "purged", "push", details=str(number)) as change:
                change.count = 1
        assert [each.action for each in shop.dq.audit(queue="other", limit=5)] == ["paused"]
        assert [each.details for each in shop.dq.audit(limit=550)] == [
            str(599 - place) for place in range(550)
        ]
        monkeypatch.setattr(audit, "MAX_ENTRIES", 100)
        shop.dq.queues["other"].resume()
        assert 100 <= client.xlen(audit_stream("online")) < 250
    assert shop.dq.audit()[0].action == "resumed"


@pytest.fixture(params=["XST-5", "XST+5", "UTC"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zone of the process. In UTC no test sees a zone that is forgotten."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zone")
def test_a_time_without_a_zone_is_local_time(run: Run, shop: Any) -> None:
    push, dead = shop.dq.queues["push"], shop.dq.dead_letters["push"]
    dead_letter(shop)
    push.pause(until=datetime.now() + timedelta(minutes=2))
    left = push.snapshot().pause.until - datetime.now(timezone.utc)
    assert timedelta(minutes=1) < left < timedelta(minutes=3)
    ago, ahead = (datetime.now() + timedelta(minutes=each) for each in (-2, 2))
    assert [len(shop.dq.audit(since=since)) for since in (ago, ahead)] == [1, 0]
    assert [dead.replay(wanted=DeadLetterFilter(since=since)) for since in (ahead, ago)] == [0, 1]
    assert "paused" in run(f"audit --since {ago.isoformat()}")
    assert run(f"audit --since {ahead.isoformat()}") == "No change is known.\n"


@pytest.mark.usefixtures("zone")
def test_a_time_that_has_no_number_in_some_zones_may_be_given(shop: Any) -> None:
    shop.dq.quotas.pause("push", "b")
    dead_letter(shop)
    for at, found in ((datetime.min, 1), (datetime.max, 0)):
        for hours in (None, -12, 12):
            since = at if hours is None else at.replace(tzinfo=timezone(timedelta(hours=hours)))
            assert len(shop.dq.audit(since=since)) == found
            wanted = DeadLetterFilter(since=since)
            assert shop.dq.dead_letters["push"].replay(wanted=wanted, dry_run=True) == found
            with pytest.raises(InvalidRequest, match="give a datetime of the years 1970 to 2254"):
                shop.dq.queues["push"].pause(until=since)
