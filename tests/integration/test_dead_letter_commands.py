"""``celery dq dead show``, ``edit`` and ``replay`` with filters and a rate."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from celery_dq import AnyOf
from celery_dq.cli import dead_letters
from celery_dq.errors import InvalidMessage, InvalidRequest
from tests.dq_command import Run, run_dq
from tests.integration.partitioned_shop import COUNT
from tests.integration.shop import dead_letter, receive, send


@pytest.fixture
def run(shop: Any) -> Run:
    return lambda *words, **options: run_dq(shop, "dead", *words, **options).output


def test_a_dead_letter_is_shown_with_its_arguments(run: Run, shop: Any) -> None:
    dead_letter(shop, args=("a", 7), priority=3, expires=3600, task_id="known")
    found = json.loads(run("show", "push", "known", "--json"))
    assert (found["args"], found["kwargs"], found["priority"], found["due"]) == (["a", 7], {}, 3, None)
    assert (found["letter"]["reason"], found["letter"]["task"]) == ("rejected", "notify")
    assert datetime.fromisoformat(found["expires"]) > datetime.now(timezone.utc)
    lines = run("show", "push", "known").splitlines()
    assert {"id:         known", "priority:   3", 'args:       ["a", 7]', "tenant:     a"} <= {*lines}
    assert "no dead letter 'x'" in run("show", "push", "x", status=1)
    assert shop.dq.dead_letters["push"].show("x") is None


def test_dead_letters_are_listed_by_the_filters_of_a_replay(
    run: Run, shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [dead_letter(shop, args=(who,)) for who in ("a", "b", "a")]

    def listed(*words: str) -> list[str]:
        return [row.split()[0] for row in run("list", "push", *words).splitlines()[1:]]

    assert listed("--tenant", "a") == [ids[2], ids[0]]
    assert listed("--task", "notify", "--reason", "reject", "--since", "1h") == ids[::-1]
    for words in (["--task", "x"], ["--reason", "x"], ["--since", "2999-01-01T00:00"], ["--tenant", "x"]):
        assert run("list", "push", *words) == "No dead letter of 'push' matches.\n"
    assert run("list", "push", "--tenant", "a", "--limit", "1").endswith(
        "\nLooked at the latest 1 of 3 dead letters.\n"
    )
    monkeypatch.setattr(dead_letters, "CHUNK", 1)
    assert listed("--tenant", "b") == [ids[1]]
    monkeypatch.setattr(dead_letters, "MOST_LOOKS", 1)
    assert run("list", "push", "--tenant", "b").endswith("\nLooked at the latest 1 of 3 dead letters.\n")
    assert "no queue 'psuh'" in run("list", "psuh", "--tenant", "a", status=1)


def test_a_body_of_another_serializer_is_not_decoded(run: Run, shop: Any) -> None:
    dead_letter(shop, args=("a",), serializer="pickle", task_id="known")
    assert json.loads(run("show", "push", "known", "--json"))["args"] is None
    assert "args:       ('a',)" in run("show", "push", "known")


class Planted:
    """An argument whose unpickling runs a call that the publisher chose: it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_an_edit_decodes_only_the_content_that_the_app_accepts(run: Run, shop: Any, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    task_id = dead_letter(shop, args=(Planted(planted),), serializer="pickle", tenant="a")
    text = run("edit", "push", task_id, "--args", "[1]", status=1)
    assert "content type 'application/x-python-serialize', and accept_content has" in text
    assert not planted.exists()
    assert len(shop.dq.dead_letters["push"]) == 1
    shop.conf.accept_content = ["json", "pickle"]
    assert run("edit", "push", task_id, "--args", "[1]") == f"Sent again as {task_id}.\n"
    assert planted.exists()


def test_a_compressed_dead_letter_is_shown_and_edited(run: Run, shop: Any) -> None:
    task_id = dead_letter(shop, args=("a", "z" * 3000), compression="gzip")
    assert shop.dq.dead_letters["push"].show(task_id).args == ["a", "z" * 3000]
    run("edit", "push", task_id, "--args", '["a", "y"]')
    assert receive(shop).decode()[0] == ["a", "y"]
    unreadable = dead_letter(shop)
    with shop.dq._broker.open_home("push") as (partition, client):
        key = partition.keys.dead
        client.hset(key, unreadable, client.hget(key, unreadable).replace(b'[["a"', b'{{"a"'))
    text = run("edit", "push", unreadable, "--args", "[1]", status=1)
    assert "the body of the message (application/json) cannot be decoded" in text


def test_arguments_that_are_no_plain_json_are_shown(run: Run, shop: Any) -> None:
    values = [UUID(int=7), Decimal("1.5"), datetime(2026, 3, 1, tzinfo=timezone.utc)]
    task_id = dead_letter(shop, args=("a", values))
    text = '["a", ["00000000-0000-0000-0000-000000000007", "1.5", "2026-03-01T00:00:00+00:00"]]'
    assert f"args:       {text}" in run("show", "push", task_id)
    assert json.loads(run("show", "push", task_id, "--json"))["args"] == json.loads(text)


def test_a_dead_letter_is_edited_and_keeps_its_id(run: Run, shop: Any) -> None:
    task_id = dead_letter(shop)
    words = ["--args", '["z", 5]', "--kwargs", "{}", "--priority", "9", "--tenant", "z"]
    assert run("edit", "push", task_id, *words) == f"Sent again as {task_id}.\n"
    message = receive(shop)
    assert message.decode()[:2] == [["z", 5], {}]
    assert (message.properties["priority"], message.headers["id"]) == (9, task_id)
    later = dead_letter(shop)
    run("edit", "push", later, "--eta", "2100-01-01T00:00Z")
    (found,) = shop.dq.queues["push"].peek(delayed=True)
    assert (found.id, found.due) == (later, datetime(2100, 1, 1, tzinfo=timezone.utc))
    headers = shop.dq.queues["push"].details(later).headers
    assert datetime.fromisoformat(headers["eta"]) == found.due
    assert "no dead letter" in run("edit", "push", later, "--priority", "1", status=1)


def test_an_eta_is_removed(run: Run, shop: Any) -> None:
    task_id = dead_letter(shop)
    dead = shop.dq.dead_letters["push"]
    with shop.dq._broker.open_home("push") as (partition, client):
        dead.edit(task_id, eta=datetime(2100, 1, 1))
        (entry,) = partition.take("w", [task_id], lease_ms=60_000).run(client)
        partition.dead_letter("w", entry.tag, reason="rejected", worker="w").run(client)
    run("edit", "push", task_id, "--eta", "none")
    assert shop.dq.find(task_id)[0].state == "waiting"
    assert receive(shop).headers["eta"] is None


@pytest.mark.parametrize(
    ("words", "lesson", "status"),
    [
        ([], "at least one of", 2),
        (["--args", "[1"], "'[1' is not JSON", 2),
        (["--args", '{"a": 1}'], "args = {'a': 1}: give a list", 1),
        (["--kwargs", "[]"], "kwargs = []: give a dict", 1),
        (["--priority", "10"], "'--priority': 10 is not in the range 0<=x<=9", 2),
        (["--eta", "9999-01-01"], "eta = 9999-01-01 00:00:00+00:00: give a datetime", 1),
        (["--eta", "soon"], "'soon' is not a time", 2),
        (["--tenant", "\x01"], "control characters", 1),
    ],
)
def test_a_wrong_edit_changes_nothing(
    run: Run, shop: Any, words: list[str], lesson: str, status: int
) -> None:
    task_id = dead_letter(shop)
    assert lesson in run("edit", "push", task_id, *words, status=status)
    assert len(shop.dq.dead_letters["push"]) == 1
    with pytest.raises(InvalidMessage, match="eta = 5: give a datetime"):
        shop.dq.dead_letters["push"].edit(task_id, eta=5)
    expires = dead_letter(shop, expires=3600)
    with pytest.raises(InvalidRequest, match="the message expires at"):
        shop.dq.dead_letters["push"].edit(expires, eta=datetime(2100, 1, 1))


def test_some_dead_letters_are_replayed(run: Run, shop: Any) -> None:
    old, *_ = [dead_letter(shop, tenant) for tenant in "aabc"]
    with shop.dq._broker.open_home("push") as (partition, client):
        client.zadd(partition.keys.dead_index, {old: 1e15})  # in 2001
    count = ("--dry-run", "--json")
    assert json.loads(run("replay", "push", "--tenant", "a", *count))["found"] == 2
    assert json.loads(run("replay", "push", "--tenant", "a", "--since", "1h", *count))["found"] == 1
    assert json.loads(run("replay", "push", "--since", "2001-01-01", *count))["found"] == 4
    assert json.loads(run("replay", "push", "--reason", "reject", *count))["found"] == 4
    assert json.loads(run("replay", "push", "--reason", "other", *count))["found"] == 0
    assert json.loads(run("replay", "push", "--task", "invoice", *count))["found"] == 0
    assert run("replay", "push", "--tenant", "b", "--task", "notify", "--yes") == "Replayed 1.\n"
    assert "Give either" in run("replay", "push", "x", "--tenant", "b", status=2)
    assert "'fast' is not a rate" in run("replay", "push", "--all", "--yes", "--rate", "fast", status=1)
    assert "leave it out" in run("replay", "push", "--all", "--yes", "--rate", "0", status=1)
    assert "before the year 1" in run("replay", "push", "--since", "999999d", status=2)
    assert len(shop.dq.dead_letters["push"]) == 3
    before = time.monotonic()
    assert run("replay", "push", "--all", "--yes", "--rate", "20/s") == "Replayed 3.\n"
    assert time.monotonic() - before >= 2 / 20
    assert shop.dq.audit()[0].count == 3
    assert timedelta(0) <= datetime.now(timezone.utc) - shop.dq.audit()[0].at < timedelta(minutes=2)


@pytest.mark.parametrize("reason", ["cannot be read", "must be in one"])
def test_a_dead_letter_that_cannot_be_sent_stops_no_other(run: Run, shop: Any, reason: str) -> None:
    dead_letter(shop, task_id="first", tenant=AnyOf("a", "b"))
    for _ in range(2):
        dead_letter(shop)
    if reason == "cannot be read":
        with shop.dq._broker.open_home("push") as (partition, client):
            client.hset(partition.keys.dead, "first", b"?")
    else:
        shop.dq.queues["push"].set_partitions(2)
    assert reason in run("replay", "push", "first", status=1)
    assert run("replay", "push", "--all", "--yes") == "Replayed 2.\n"
    assert [each.id for each in shop.dq.dead_letters["push"].list()] == ["first"]
    assert shop.dq.dead_letters["push"].replay_part(lambda letter: True).sent == 0


def test_the_retention_of_the_settings_reaches_the_heartbeat(shop: Any) -> None:
    shop.conf.dq_dead_letter_retention = "1h"
    shop.conf.dq_dead_letter_limit = 10
    with shop.dq._broker.channel() as channel:
        assert channel.queues("push").partitions[0].retention == (3_600_000, 10)


def test_the_partitions_share_the_limit(wide: Any) -> None:
    wide.conf.dq_dead_letter_limit = 10
    send(wide, "a")
    with wide.dq._broker.channel() as channel:
        assert [each.retention[1] for each in channel.queues("push").partitions] == [3] * COUNT
