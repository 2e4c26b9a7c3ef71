"""No page and no command ends with a traceback, whatever a message or a stored field contains."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_dq.keys import audit_stream, history_stream
from tests.hostile_messages import TYPED, publish_kinds, raw_records, some_kinds
from tests.hostile_readers import (
    CHANGES,
    COMMANDS,
    LISTS,
    faults_of_commands,
    faults_of_pages,
)
from tests.integration.shop import claim, send

LATER = "2100-01-01T00:00:00+00:00"
#: A header that kombu's decoder answers with an error of arithmetic.
UNREADABLE = {"x": {"__type__": "decimal", "__value__": "abc"}}


@pytest.fixture
def hostile(shop: Any) -> Any:
    """An app whose queue has messages of many kinds, delayed, dead and waiting, and good ones."""
    with shop.connection_for_write() as connection:
        publish_kinds(connection, "push", "notify", some_kinds(), headers={"eta": LATER}, tenant="a")
        publish_kinds(connection, "push", "notify", some_kinds(), tenant="a")
        with shop.dq._broker.open_home("push") as (partition, client):
            keys = partition.keys
            for entry in claim(shop, want=1000):
                partition.dead_letter("worker:1", entry.tag, reason="rejected", worker="w").run(client)
            for number, record in enumerate(raw_records().values()):
                client.hset(keys.dead, f"raw-{number}", record)
                client.hset(keys.dead_info, f"raw-{number}", b"[1]" if number % 2 else b'{"deliveries": "x"}')
                client.zadd(keys.dead_index, {f"raw-{number}": 1e18 if number % 3 else number})
        send(shop, "a")
        publish_kinds(connection, "push", "notify", some_kinds(), tenant="a")
        with shop.dq._broker.open_home("push") as (partition, client):
            for message_id, record in zip(
                client.zrange(keys.tenant("a"), 0, -1), raw_records().values(), strict=False
            ):
                client.hset(keys.messages, message_id, record)
    return shop


def test_pages_and_commands_list_hostile_messages(hostile: Any, operator: Any) -> None:
    assert list(faults_of_commands(hostile, "none", LISTS)) == []
    assert list(faults_of_pages(operator, "none")) == []


@pytest.mark.parametrize("state", ["waiting", "delayed", "dead"])
def test_a_message_that_cannot_be_read_is_shown_as_such(shop: Any, operator: Any, state: str) -> None:
    headers = {**UNREADABLE, "id": "bad", **({"eta": LATER} if state == "delayed" else {})}
    with shop.connection_for_write() as connection:
        publish_kinds(connection, "push", "notify", iter([("", {"headers": headers})]), tenant="a")
    if state == "dead":
        (entry,) = claim(shop)
        with shop.dq._broker.open_home("push") as (partition, client):
            partition.dead_letter("worker:1", entry.tag, reason="rejected", worker="w").run(client)
    queue, letters = shop.dq.queues["push"], shop.dq.dead_letters["push"]
    if state == "dead":
        (letter,) = letters.list()
        page, shown = "/dq/dead-letters/?queue=push", letter.args
    else:
        (message,) = queue.peek(delayed=state == "delayed")
        page, shown = f"/dq/message/?queue=push&id={message.id}", message.args
    assert shown.startswith("unreadable: the envelope of a stored message cannot be read: InvalidOperation")
    assert "unreadable" in operator.get(page).content.decode()
    commands = [line for line in COMMANDS if line not in LISTS]
    assert list(faults_of_pages(operator, "bad")) == []
    assert list(faults_of_commands(shop, "bad", (*commands, *CHANGES[:-4]))) == []
    if state == "dead":
        # The dead letter keeps the bytes: an edit that does not touch the envelope sends it again.
        (again,) = queue.peek()
        assert (again.priority, again.args) == (4, shown)


def test_stored_fields_that_cannot_be_read(shop: Any, operator: Any) -> None:
    send(shop, "a", "a", "b")
    send(shop, "a", countdown=1000)
    claim(shop, want=1)
    rubbish = b"\x1b[2J\xff"
    with shop.dq._broker.open_home("push") as (partition, client):
        keys = partition.keys
        for field in (b"t:a", b"default", b"config"):
            client.hset(keys.quotas, field, rubbish)
            client.hset(keys.quota_info, field, rubbish)
        for name in ("running", "deliveries", "verdicts", "dedup_locks", "single"):
            client.hset(getattr(keys, name), "a", rubbish)
        for name in ("pushed", "released", "paused_until", "v", "waits_alone", "claim_window", "epoch"):
            client.hset(keys.state, name, rubbish)
    assert list(faults_of_pages(operator, "none")) == []
    lists = [
        line
        for line in LISTS
        if not line.startswith(("peek", "top", "move", "cancel", "purge", "dead replay"))
    ]
    assert list(faults_of_commands(shop, "none", tuple(lists))) == []


@pytest.mark.parametrize("partitions", [b"\xff", b"0", b"2<", b"1000000000", b"", b"1#" + b"9" * 40])
def test_a_map_of_partitions_that_cannot_be_read_is_named(
    shop: Any, operator: Any, partitions: bytes
) -> None:
    send(shop, "a")
    with shop.dq._broker.open_home("push") as (partition, client):
        client.hset(partition.keys.state, "partitions", partitions)
    assert list(faults_of_commands(shop, "none", LISTS)) == []
    answer = operator.get("/dq/")
    assert answer.status_code == 503
    assert "restore the number there" in answer.content.decode()


def test_streams_that_cannot_be_read(shop: Any, operator: Any) -> None:
    send(shop, "a")
    shop.dq.quotas.set("push", "a", rate="1/s")
    options = shop.dq.options
    with shop.dq._broker.open_home("push") as (_, client):
        for stream in (
            audit_stream(options.environment, options.key_prefix),
            history_stream(options.environment, "push", options.key_prefix),
        ):
            names = {name for _, entry in client.xrevrange(stream, count=5) for name in entry}
            for value in (b"\xff\x1b[2J", b"", b"nan", b"[1]", b"1e400"):
                client.xadd(stream, {"x": value, **dict.fromkeys(names, value)})
    assert list(faults_of_pages(operator, "none")) == []
    assert list(faults_of_commands(shop, "none", LISTS)) == []


def test_a_quota_that_cannot_be_read_is_overwritten(shop: Any) -> None:
    with shop.dq._broker.open_home("push") as (partition, client):
        for field in (b"t:a", b"default"):
            client.hset(partition.keys.quotas, field, b"rubbish")
    shop.dq.quotas.set("push", "a", rate="1/s")
    shop.dq.quotas.set_default("push", rate="2/s")
    assert shop.dq.quotas.get("push", "a").rate == 1
    assert shop.dq.quotas.get("push", "other").rate == 2


def test_a_page_of_headers_that_json_cannot_hold(shop: Any, operator: Any) -> None:
    headers = {"a": TYPED["bytes"], "b": TYPED["a signaling NaN"]}
    with shop.connection_for_write() as connection:
        publish_kinds(connection, "push", "notify", iter([("", {"headers": headers})]), tenant="a")
    answer = operator.get("/dq/message/?queue=push&id=hostile-0&format=json")
    assert json.loads(answer.content)["places"][0]["message"]["task"] == "notify"
