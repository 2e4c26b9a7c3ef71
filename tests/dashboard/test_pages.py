"""The pages and their JSON on a real Redis, without a worker."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

import pytest

from celery_dq.errors import QueueFull
from tests.integration.shop import claim, dead_letter, send, throttle


def page_of(client: Any, path: str, status: int = 200, **query: Any) -> str:
    answer = client.get(f"/dq/{path}", query)
    assert answer.status_code == status, answer.content.decode()
    return " ".join(answer.content.decode().split())


def data_of(client: Any, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
    answer = client.get(f"/dq/{path}", {**query, "format": "json"})
    assert (answer.status_code, answer["Content-Type"]) == (status, "application/json")
    document: dict[str, Any] = json.loads(answer.content)
    assert (document["version"], document["environment"]) == (1, "online")
    return document


def forget(client: Any) -> None:
    """Let the next page read the broker, although a page was shown within the last second."""
    client.post("/dq/tenant/resume/", {"queue": "other", "tenant": "other"})


def test_the_queues_are_counted_by_reason(shop: Any, operator: Any) -> None:
    shop.dq.quotas.set("push", "slow", rate="1/h")
    shop.dq.quotas.pause("push", "off")
    send(shop, "slow", "slow", "off", "a", "a")
    send(shop, "later", countdown=100)
    claim(shop, want=2)
    (row,) = data_of(operator, "")["queues"]
    queue = row["queue"]
    assert (queue["waiting"], queue["delayed"], queue["held"], queue["dead"]) == (3, 1, 2, 0)
    assert (queue["eligible"], queue["throttled"], queue["paused"]) == (1, 1, 1)
    assert (row["health"], row["workers"], row["waits"]["count"]) == ("active", 1, 2)
    text = page_of(operator, "")
    assert "<b>1</b> servable" in text
    assert "<b>1</b> throttled" in text
    assert 'aria-label="1 servable, 1 throttled, 1 paused"' in text


def test_a_tenant_shows_its_rate_and_its_cap(shop: Any, operator: Any) -> None:
    shop.dq.quotas.set("push", "slow", rate="1/h")
    shop.dq.quotas.set("push", "one", concurrency=1)
    send(shop, "slow", "slow", "one", "one", "free", "free", "free")
    claim(shop, want=3)
    rows = {
        each["tenant"]["tenant"]: each["tenant"]
        for each in data_of(operator, "queue/", queue="push")["tenants"]
    }
    assert {name: each["service"]["capped_by"] for name, each in rows.items()} == {
        "slow": "rate",
        "one": "concurrency",
        "free": "weight",
    }
    assert rows["slow"]["service"]["due_per_s"] == pytest.approx(1 / 3600)
    assert "of 1/h" in page_of(operator, "queue/", queue="push")
    # No second has passed since the first claim.
    assert "<dd>–<small>of 1/h due</small></dd>" in page_of(operator, "tenant/", queue="push", tenant="slow")
    assert '<dt>Capped by</dt><dd class="text">rate</dd>' in page_of(
        operator, "tenant/", queue="push", tenant="slow"
    )


@pytest.mark.parametrize(
    ("quota", "health"), [({"rate": "1/h"}, "throttled"), ({"concurrency": 1}, "at-concurrency")]
)
def test_a_queue_names_the_reason_for_which_all_of_it_waits(
    shop: Any, operator: Any, quota: dict[str, Any], health: str
) -> None:
    shop.dq.quotas.set("push", "a", **quota)
    send(shop, "a", "a")
    assert data_of(operator, "")["queues"][0]["health"] == "no-worker"
    claim(shop, want=2)
    forget(operator)
    assert data_of(operator, "")["queues"][0]["health"] == health


def test_queues_are_filtered_by_name_and_shown_in_parts(shop: Any, operator: Any) -> None:
    shop.conf.dq_queues = {f"q{number:02}": {} for number in range(30)}
    first = data_of(operator, "", q="Q")
    assert [row["queue"]["name"] for row in first["queues"]] == [f"q{number:02}" for number in range(25)]
    assert (first["total"], first["pages"]) == (30, 2)
    assert len(data_of(operator, "", q="q", page=2)["queues"]) == 5
    assert "Page 1 of 2" in page_of(operator, "", q="q")
    assert "give a whole number from 1" in page_of(operator, "", 400, page="0")


def test_a_tenant_at_its_bound_shows_it_and_the_end_of_new_calls(shop: Any, operator: Any) -> None:
    shop.dq.quotas.set("push", "a", max_waiting=2)
    send(shop, "a", "b")
    assert 'waiting">1<span class="note"> of 2</span>' in page_of(operator, "queue/", queue="push")
    assert "so new calls" not in page_of(operator, "tenant/", queue="push", tenant="a")
    send(shop, "a")
    with pytest.raises(QueueFull):
        send(shop, "a")
    forget(operator)
    text = page_of(operator, "tenant/", queue="push", tenant="a")
    assert "as many wait as its max_waiting of 2 allows, so new calls are refused" in text
    assert "max_waiting=2 when_full=refuse" in text
    (shown,) = data_of(operator, "")["queues"]
    assert shown["queue"]["counters"]["full"] == 1
    assert "refused by full tenants" in page_of(operator, "queue/", queue="push")


def test_tenants_come_in_parts_with_the_origin_of_their_quota(shop: Any, operator: Any) -> None:
    names = [f"t{number:03}" for number in range(120)]
    send(shop, *names)
    shop.dq.quotas.set_default("push", concurrency=5)
    shop.dq.quotas.set("push", "t119", rate="10/s")
    seen: list[str] = []
    after, parts = "", 0
    while True:
        part = data_of(operator, "queue/", queue="push", after=after)
        seen += [row["tenant"]["tenant"] for row in part["tenants"]]
        origins = {row["tenant"]["tenant"]: row["origin"]["source"] for row in part["tenants"]}
        assert {source for name, source in origins.items() if name != "t119"} == {"default"}
        after, parts = part["after"], parts + 1
        if not after:
            break
    assert (seen, parts, origins["t119"]) == (names, 3, "tenant")
    assert "give one of" in page_of(operator, "queue/", 400, queue="push", state="asleep")
    assert "is not a cursor" in page_of(operator, "queue/", 400, queue="push", after="paused")


def test_a_search_finds_tenants_by_a_part_of_their_name_and_idle_ones_by_all_of_it(
    shop: Any, operator: Any
) -> None:
    send(shop, *(f"t{number}" for number in range(60)), "Bluebird")
    shop.dq.quotas.set("push", "idle one", rate="10/s")
    found = data_of(operator, "queue/", queue="push", q="blue")
    assert [row["tenant"]["tenant"] for row in found["tenants"]] == ["Bluebird"]
    assert (found["looked_at"], found["after"]) == (61, "")
    assert [
        row["tenant"]["state"] for row in data_of(operator, "queue/", queue="push", q="idle one")["tenants"]
    ] == ["idle"]
    assert data_of(operator, "queue/", queue="push", q="idle two")["tenants"] == []
    shop.dq.quotas.pause("push", "t7")
    paused = data_of(operator, "queue/", queue="push", state="paused")
    assert [row["tenant"]["tenant"] for row in paused["tenants"]] == ["t7"]


def test_a_tenant_is_explained(shop: Any, operator: Any) -> None:
    send(shop, "a", "a")
    shop.dq.quotas.pause("push", "a")
    found = data_of(operator, "tenant/", queue="push", tenant="a")
    assert (found["row"]["tenant"]["state"], found["explanation"]["reason"]) == ("paused", "paused")
    assert len(found["next"]) == 2
    assert "it is paused until" in page_of(operator, "tenant/", queue="push", tenant="a")
    # A message without a tenant has the tenant "".
    assert data_of(operator, "tenant/", queue="push", tenant="")["explanation"]["reason"] == "empty"


def test_a_tenant_that_a_task_has_paused_shows_the_cause(shop: Any, operator: Any) -> None:
    send(shop, "a")
    cause = throttle(shop, "a", "<b>429</b>")
    found = data_of(operator, "tenant/", queue="push", tenant="a")
    assert found["row"]["tenant"]["pause_cause"] == asdict(cause)
    text = page_of(operator, "tenant/", queue="push", tenant="a")
    assert "Paused because" in text
    assert text.count("was throttled (&lt;b&gt;429&lt;/b&gt;)") == 2  # once in the explanation


def test_a_set_of_resources_leads_to_them_and_offers_no_quota(shop: Any, operator: Any) -> None:
    """A set has no quota and no pause of its own: both would be refused."""
    of_set: dict[str, Any] = {"queue": "push", "tenant": "any_of(a,b)"}
    send(shop, of_set["tenant"])
    assert data_of(operator, "tenant/", **of_set)["resources"] == ["a", "b"]
    text = page_of(operator, "tenant/", **of_set)
    assert "?queue=push&amp;tenant=a" in text
    assert "Preview the change" not in text
    assert "Pause the tenant" not in text
    assert "Preview the change" in page_of(operator, "tenant/", queue="push", tenant="a")


def test_an_outbox_that_cannot_be_read_is_named_beside_the_workers(
    use_app: Any, redis_url: str, operator: Any
) -> None:
    from celery_dq.contrib.django.outbox.tables import DjangoOutbox

    app = use_app(redis_url.replace("redis://", "dq-redis://", 1), dq_outbox="bank")
    app.dq.outbox.tables = DjangoOutbox(lambda: 1)
    (outbox,) = data_of(operator, "workers/")["outboxes"]
    assert (outbox["database"], outbox["rows"]) == ("bank", None)
    text = page_of(operator, "workers/")
    assert (
        "cannot be read: ConnectionDoesNotExist: The connection &#x27;bank&#x27; doesn&#x27;t exist." in text
    )
    assert "Buffered messages on this machine" in text


def test_a_message_is_explained_with_its_times(shop: Any, operator: Any) -> None:
    (task_id,) = send(shop, "a", expires=3600)
    (place,) = data_of(operator, "message/", id=task_id)["places"]
    assert [each["event"] for each in place["timeline"]] == ["in line", "expires"]
    assert place["headers"]["task"] == "notify"
    assert (place["message"]["tenant"], place["can_be_cancelled"]) == ("a", True)
    assert "no worker consumes" in page_of(operator, "message/", id=task_id)
    (claimed,) = send(shop, "b")
    claim(shop, want=2)
    (place,) = data_of(operator, "message/", id=claimed)["places"]
    assert [each["event"] for each in place["timeline"]] == ["claimed by worker:1"]
    assert data_of(operator, "message/", id="nowhere")["places"] == []
    assert "is in none of" in page_of(operator, "message/", id="nowhere")
    assert "give a text" in page_of(operator, "message/", 400)


@pytest.mark.parametrize("priority", [0, 7])
@pytest.mark.parametrize("aging", [None, "10m"])
def test_the_time_in_line_is_exact_with_priorities(
    use_app: Any, redis_url: str, priority: int, aging: str | None
) -> None:
    url = redis_url.replace("redis://", "dq-redis://", 1)
    shop = use_app(url, dq_priority_aging=aging)
    first, second = (send(shop, "a", priority=priority)[0] for _ in range(2))
    details = [shop.dq.queues["push"].details(each) for each in (first, second)]
    oldest = shop.dq.queues["push"].tenant("a").oldest_waiting_s
    gap = (details[1].in_line_since - details[0].in_line_since).total_seconds()
    assert 0 <= gap < 60
    with shop.dq._broker.open("push") as (_, client):
        now = client.time()[0]
    assert abs(now - details[0].in_line_since.timestamp() - oldest) < 5


def test_dead_letters_are_filtered(shop: Any, operator: Any) -> None:
    ids = [dead_letter(shop, merchant) for merchant in ("a", "b", "a")]
    assert data_of(operator, "dead-letters/")["counts"] == {"push": 3}
    every = data_of(operator, "dead-letters/", queue="push")
    assert [letter["id"] for letter in every["letters"]] == ids[::-1]
    chosen = data_of(
        operator, "dead-letters/", queue="push", tenant="a", task="NOTI", reason="rejec", since="1h"
    )
    assert [letter["id"] for letter in chosen["letters"]] == [ids[2], ids[0]]
    assert data_of(operator, "dead-letters/", queue="push", reason="other")["letters"] == []
    assert "is not a duration" in page_of(operator, "dead-letters/", 400, queue="push", since="soon")
    assert f'value="{ids[0]}"' in page_of(operator, "dead-letters/", queue="push")
    (place,) = data_of(operator, "message/", id=ids[0])["places"]
    assert [each["event"] for each in place["timeline"]] == ["became a dead letter (rejected)"]


def test_dedup_locks_and_verdicts(shop: Any, operator: Any) -> None:
    notify = shop.tasks["notify"]
    head = notify.apply_async(("a",), dedup={"key": "k"}).id
    for _ in range(2):
        notify.apply_async(("a",), dedup={"key": "k"})
    assert [*data_of(operator, "dedup/")["verdicts_by_queue"]] == ["push"]
    (lock,) = data_of(operator, "dedup/", queue="push")["locks"]
    assert (lock["head"], lock["tenant"], lock["running"]) == (head, "a", False)
    assert data_of(operator, "dedup/", queue="push", key="other")["locks"] == []
    assert head in page_of(operator, "dedup/", queue="push", key=lock["key"], tenant="a")


def test_leaders_and_workers(use_app: Any, redis_url: str, operator: Any) -> None:
    shop = use_app(redis_url.replace("redis://", "dq-redis://", 1), dq_singleton_queues=["ledger"])
    (leader,) = data_of(operator, "leaders/")["leaders"]
    assert (leader["name"], leader["state"]) == ("ledger", "vacant")
    assert "vacant" in page_of(operator, "leaders/")
    send(shop, "a", "b")
    claim(shop, want=2)
    (worker,) = data_of(operator, "workers/")["workers"]
    assert (worker["name"], worker["held"], worker["queues"]) == ("worker:1", 2, ["push"])
    assert "dq_buffer_folder" in page_of(operator, "workers/")


def test_buffered_messages_on_disk_are_shown(
    use_app: Any, redis_url: str, operator: Any, tmp_path: Any
) -> None:
    shop = use_app(redis_url.replace("redis://", "dq-redis://", 1), dq_buffer_folder=str(tmp_path))
    with shop.dq.buffer.buffered():
        send(shop, "a")
    (owner,) = data_of(operator, "workers/")["spill"]["owners"]
    assert owner["state"] == "this process"
    assert owner["name"] in page_of(operator, "workers/")
    shop.dq.buffer.close(5)


def test_links_lead_to_any_name(shop: Any, operator: Any) -> None:
    queue, tenant = "a/b?c=d&e #%2F ü", "x/y?z&amp;=+ é"
    send(shop, tenant, queue=queue)
    text = operator.get("/dq/").content.decode()
    assert f"/dq/queue/?{urlencode({'queue': queue})}".replace("&", "&amp;") in text
    assert data_of(operator, "queue/", queue=queue)["tenants"][0]["tenant"]["tenant"] == tenant
    text = operator.get("/dq/queue/", {"queue": queue}).content.decode()
    address = f"/dq/tenant/?{urlencode({'queue': queue, 'tenant': tenant})}"
    assert address.replace("&", "&amp;") in text
    assert operator.get(address).status_code == 200
