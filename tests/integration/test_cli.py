"""``celery dq …`` as a user types it, on a real Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from celery.bin.celery import celery
from click.shell_completion import ShellComplete
from click.testing import Result

from celery_dq import QueueFull
from celery_dq.cli import dq
from celery_dq.testing.processes import dead_port
from tests.dq_command import run_dq
from tests.integration.shop import dead_letter, send

Run = Callable[..., Result]


@pytest.fixture
def run(shop: Any) -> Run:
    return partial(run_dq, shop)


def data(result: Result) -> Any:
    return json.loads(result.stdout)


@pytest.fixture
def ids(shop: Any) -> list[str]:
    return [shop.tasks["notify"].delay(merchant).id for merchant in "aab"]


def test_queues_and_tenants(run: Run, ids: list[str]) -> None:
    header, row = run("queues", "push").output.splitlines()
    assert dict(zip(header.split(), row.split(), strict=True))["partitions"] == "1"
    (push,) = data(run("queues", "push", "--json"))
    assert (push["waiting"], push["counters"]["pushed"]) == (3, 3)
    assert push["counters"]["waits_alone"] == {"count": 0, "sum_s": 0.0, "buckets": [0] * 11}
    oldest = data(run("tenants", "push", "--json"))[0]["oldest_waiting_s"]
    assert 0 <= push["oldest_waiting_s"] <= oldest < 60
    assert [row["tenant"] for row in data(run("tenants", "push", "--json"))] == ["a", "b"]
    assert "eligible" in run("tenants", "push").output
    run("purge", "push", "--yes")
    assert "No tenant" in run("tenants", "push").output


def test_a_search_for_tenants_reports_how_far_it_looked(run: Run, shop: Any) -> None:
    shop.dq.quotas.set("push", "Shop-9", paused=True)
    send(shop, *(f"shop-{number}" for number in range(9)), "Shop-9", "other")

    def search(*words: str) -> tuple[list[str], str]:
        table, _, note = run("tenants", "push", *words).output.removesuffix("\n").rpartition("\n")
        return [row.split()[0] for row in table.splitlines()[1:]], note

    found, note = search("--like", "SHOP", "--limit", "4")
    assert found == [f"shop-{number}" for number in range(4)]
    assert note == "Looked at 5 tenants; others follow: --after eligible.0.5"
    found, note = search("--like", "SHOP", "--after", "eligible.0.5")
    assert found == [*(f"shop-{number}" for number in range(4, 9)), "Shop-9"]
    assert note == "Looked at 6 tenants; there are no others."
    assert search("--state", "paused") == (["Shop-9"], "Looked at 1 tenant; there are no others.")
    assert len(search("--after", "")[0]) == 11
    assert run("tenants", "push", "--like", "x").output.startswith("No tenant matches.\nLooked at 11 tenants")
    assert "is not a cursor" in run("tenants", "push", "--after", "x", status=1).output
    assert "'asleep'" in run("tenants", "push", "--state", "asleep", status=2).output
    result = run("tenants", "push", "--like", "other", "--json")
    assert [row["tenant"] for row in json.loads(result.stdout)] == ["other"]
    assert result.stderr == "Looked at 11 tenants; there are no others.\n"


def test_peek_find_and_explain(run: Run, shop: Any, ids: list[str]) -> None:
    assert [row["id"] for row in data(run("peek", "push", "--json", "--tenant", "a"))] == ids[:2]
    assert "notify" in run("peek", "push").output
    assert run("peek", "push", "--delayed").output == "No message waits in 'push'.\n"
    assert ids[0] in run("find", ids[0]).output
    assert data(run("find", "x", "--json", status=1)) == []
    text = run("find", "x", status=1).output
    assert "Looked in 1 queue ('push'), for this id and its repetitions" in text
    assert "was cancelled" not in text
    shop.dq.revoke(["x"])
    assert "Task x was cancelled and is in no queue" in run("find", "x", status=1).output
    assert "no worker consumes 'push'" in run("explain", ids[0]).output
    assert data(run("explain", "--tenant", "a", "--queue", "push", "--json"))["reason"] == "no-worker"
    assert "--tenant needs --queue" in run("explain", "--tenant", "a", status=2).output


def test_a_listed_id_is_the_one_that_commands_take(run: Run, shop: Any) -> None:
    for number in range(2):
        shop.tasks["notify"].apply_async((str(number),), task_id="twice~0")
    with shop.dq._broker.open_home("push") as (partition, client):
        (entry,) = partition.take("w", ["twice~~0"], lease_ms=60_000).run(client)
        partition.ack("w", finish=[entry.tag]).run(client)
    (row,) = data(run("peek", "push", "--json"))
    assert (row["id"], row["task_id"]) == ("twice~~0~1", "twice~0")
    listed = run("peek", "push").output.splitlines()[1].split()[0]
    assert listed == run("find", listed).output.splitlines()[1].split()[0] == "twice~0"
    assert run("explain", listed).output.startswith("Task twice~0 (notify) in 'push'")
    text = run("explain", row["id"], status=1).output
    assert text.endswith("If this is the id of a message, its task is twice~0.\n")
    assert "cancelled; it was waiting" in run("cancel", "push", listed).output


def test_cancel_move_and_purge(run: Run, shop: Any, ids: list[str]) -> None:
    assert run("cancel", "push", ids[0]).output == f"{ids[0]}: cancelled; it was waiting\n"
    assert run("cancel", "push", ids[0]).output == f"{ids[0]}: cancelled or expired already\n"
    later = shop.tasks["notify"].apply_async(("a",), countdown=600).id
    assert "cancelled; it was waiting for its ETA" in run("cancel", "push", later).output
    assert data(run("cancel", "push", "--tenant", "a", "--json", "--yes")) == {"cancelled": 1}
    assert data(run("cancel", "push", "--task-name", "notify", "--json", "-y")) == {"cancelled": 1}
    ids[2] = shop.tasks["notify"].delay("b").id
    assert run("move", "push", "other", "--task-id", ids[2], "--create").output == "Moved 1.\n"
    assert data(run("purge", "other", "--yes", "--json")) == {"purged": 1}


def test_a_dead_letter_is_not_cancelled(run: Run, shop: Any) -> None:
    task_id = dead_letter(shop)
    assert "it is a dead letter; 'celery dq dead purge'" in run("cancel", "push", task_id, status=1).output
    assert data(run("cancel", "push", task_id, "--json", status=1)) == {task_id: "dead"}
    assert len(shop.dq.dead_letters["push"]) == 1
    with shop.dq._broker.open_home("push") as (partition, client):
        assert client.zcard(partition.keys.tombstones) == 0


def test_a_name_that_is_given_twice_has_the_outcome_of_its_change(run: Run, ids: list[str]) -> None:
    assert data(run("cancel", "push", ids[0], ids[0], "--json")) == {ids[0]: "waiting"}


def test_quotas(run: Run, ids: list[str]) -> None:
    assert "rate=50/s" in run("quotas", "set", "push", "a", "--rate", "50/s", "--concurrency", "2").output
    assert data(run("quotas", "get", "push", "a", "--json"))["concurrency"] == 2
    assert "concurrency=unlimited" in run("quotas", "set", "push", "a", "--concurrency", "unlimited").output
    assert "weight=3" in run("quotas", "set", "push", "--weight", "3").output
    assert list(data(run("quotas", "get", "push", "--json"))["tenants"]) == ["a"]
    assert "is paused until it is resumed." in run("pause", "push", "--tenant", "b").output
    assert "b: paused since 2" in run("quotas", "get", "push").output
    assert list(data(run("quotas", "get", "push", "--json"))["paused"]) == ["b"]
    assert run("resume", "push", "--tenant", "b").output == "Tenant 'b' of 'push' is resumed.\n"
    assert "rate=unlimited" in run("quotas", "rm", "push", "a").output
    assert "weight=1" in run("quotas", "rm", "push").output
    assert "whole number" in run("quotas", "set", "push", "a", "--concurrency", "x", status=2).output


def test_a_bound_of_the_backlog_is_set_shown_and_removed(run: Run, shop: Any, ids: list[str]) -> None:
    quotas_set = ("quotas", "set", "push", "a")
    assert run(*quotas_set, "--max-waiting", "1").output.endswith(" max_waiting=1 when_full=refuse\n")
    shown = data(run("quotas", "get", "push", "a", "--json"))
    assert (shown["max_waiting"], shown["when_full"]) == (1, "refuse")
    explained = run("explain", "--tenant", "a", "--queue", "push").output
    assert "as many wait as its max_waiting of 1 allows, so new calls are refused" in explained
    for command in (("tenants", "push"), ("quotas", "get", "push")):
        assert "max_waiting=1 when_full=refuse" in run(*command).output
    (row,) = (each for each in data(run("tenants", "push", "--json")) if each["tenant"] == "a")
    assert (row["waiting"] >= 1, row["quota"]["max_waiting"], row["quota"]["when_full"]) == (
        True,
        1,
        "refuse",
    )
    with pytest.raises(QueueFull, match=r"1 messages? of tenant 'a' waits? in queue 'push'"):
        send(shop, "a")
    (push,) = (each for each in data(run("queues", "push", "--json")) if each["name"] == "push")
    assert (push["counters"]["full"], push["counters"]["overflowed"]) == (1, 0)
    # One part changes, and the other one stays.
    assert "max_waiting=1 when_full=wait" in run(*quotas_set, "--when-full", "wait").output
    assert "max_waiting=5 when_full=wait" in run(*quotas_set, "--max-waiting", "5").output
    assert "max_waiting=unlimited when_full=wait" in run(*quotas_set, "--max-waiting", "unlimited").output
    assert "max_waiting" not in run(*quotas_set, "--when-full", "refuse").output
    assert "so new calls" not in run("explain", "--tenant", "a", "--queue", "push").output


def test_doctor(run: Run, shop: Any) -> None:
    assert "OK" in run("doctor").output
    levels = {each["code"]: each["level"] for each in data(run("doctor", "--json"))}
    assert levels["I001"] == levels["I002"] == levels["I010"] == "ok"
    shop.task(shared=False, name="wrong", tenant="{x}")(broken)
    assert "{x}" in run("doctor", status=1).output


def broken(merchant: int) -> None:
    """A task whose tenant template names no argument of it."""


def test_a_hostile_name_does_not_reach_the_terminal(run: Run, shop: Any) -> None:
    shop.send_task("evil\x1b[31m\nname", ("a",))
    output = run("peek", "push").output
    assert "\x1b" not in output
    assert len(output.splitlines()) == 2


def test_wide_characters_take_two_columns_of_a_table(run: Run, shop: Any) -> None:
    send(shop, "\u6771\u4eac", "e\u0301t", "acme")
    lines = run("tenants", "push").stdout.splitlines()

    assert len(lines) == 4
    states = [
        line.replace("\u0301", "").replace("\u6771\u4eac", "wide").index("eligible") for line in lines[1:]
    ]
    assert len(set(states)) == 1, lines


def test_claims(run: Run, shop: Any, tmp_path: Path) -> None:
    call = shop.tasks["notify"].apply_async(("a",), dedup={"key": "{merchant}"})
    (row,) = data(run("dedup", "list", "push", "--json"))
    assert (row["tenant"], row["key"], row["head"]) == ("a", 'notify(merchant="a")', call.id)
    assert row["age_s"] is None  # no worker has the head
    assert call.id in run("dedup", "list", "push").output
    assert data(run("dedup", "verdicts", "push", "--json")) == {"accept": 1}
    plot = tmp_path / "repetition.png"
    assert "high: 1 of 1" in _twice(run, shop, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "no longer holds" in run("dedup", "release", "push", row["key"], "--tenant", "a", "--yes").output
    released = run("dedup", "release", "push", row["key"], "--tenant", "a", status=1)
    assert "No task holds" in released.output
    assert run("dedup", "list", "push").output == "No dedup lock is held in 'push'.\n"


def _twice(run: Run, shop: Any, plot: Path) -> str:
    for _ in range(2):
        shop.tasks["notify"].delay("b")
    return run("dedup", "repetition", "push", "--consumers", "2", "--plot", str(plot)).output


def test_a_log_of_calls_is_measured_without_a_queue(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "calls.txt"
    log.write_text("a\nb\n\na\nc\n", encoding="utf-8")
    found = data(run("dedup", "repetition", "--log", str(log), "--consumers", "2", "--json"))
    assert (found["kind"], found["calls"], found["distances"]) == ("high", 4, {"2": 1})
    log.write_bytes(b"\xff\n")
    assert (
        "is not UTF-8" in run("dedup", "repetition", "--log", str(log), "--consumers", "2", status=2).output
    )
    assert "either QUEUE or --log" in run("dedup", "repetition", "--consumers", "2", status=2).output


def test_a_quota_pauses_a_tenant_or_all(run: Run, shop: Any, ids: list[str]) -> None:
    run("quotas", "set", "push", "a", "--paused")
    assert [*shop.dq.quotas.paused("push")] == ["a"]
    assert "paused" not in run("quotas", "set", "push", "a", "--no-paused", "--rate", "5").output
    assert [*shop.dq.quotas.paused("push")] == []
    assert run("quotas", "set", "push", "--paused").output.endswith(" paused\n")
    assert [each.quota.paused for each in shop.dq.queues["push"].tenants()] == [False, True]
    # A document has the pause of a default.
    assert '"paused": true' in run("quotas", "export", "push").output
    run("quotas", "set", "push", "--no-paused")
    assert [each.quota.paused for each in shop.dq.queues["push"].tenants()] == [False, False]


def test_the_shell_completes_the_commands() -> None:
    completion = ShellComplete(celery, {}, "celery", "_CELERY_COMPLETE")
    assert [each.value for each in completion.get_completions(["dq"], "qu")] == ["queues", "quotas"]
    assert [each.value for each in completion.get_completions(["dq", "peek"], "--del")] == ["--delayed"]


def leaves(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *path, name)
        else:
            yield *path, name


@pytest.mark.parametrize(
    ("words", "kind", "status", "text"),
    [
        (("nothing",), "", 2, "nothing"),
        (("dead", "nothing"), "", 2, "nothing"),
        (("peek",), "MissingParameter", 2, "QUEUE"),
        (("queues", "pusch"), "InvalidRequest", 1, "pusch"),
        (("purge", "push"), "UsageError", 2, "--yes makes the change"),
        (("quotas", "set", "push", "acme", "--rate", "5/y"), "", 1, "5/y"),
        (("quotas", "import", "/nowhere/quotas.json"), "", 2, "/nowhere/quotas.json"),
        (("dead", "show", "push", "nothing"), "", 1, "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_an_error_is_an_object_of_json(
    shop: Any, words: tuple[str, ...], kind: str, status: int, text: str
) -> None:
    send(shop, "acme")
    done = run_dq(shop, *words, "--json", status=status)
    found = json.loads(done.stdout)
    assert found["type"] == (kind or found["type"])
    assert text in found["error"]
    assert "Error" not in done.stderr
    without = run_dq(shop, *words, status=status)
    assert without.stdout == ""
    assert f"Error: {found['error']}" in without.stderr


def test_a_wrong_option_of_any_command_is_an_object_of_json(shop: Any) -> None:
    for path in leaves(dq):
        done = run_dq(shop, *path, "--nonsense", "--json", status=2)
        assert json.loads(done.stdout)["type"] == "NoSuchOption", path


def test_a_broker_that_is_away_is_an_object_of_json(shop: Any) -> None:
    with dead_port() as port:
        shop.conf.broker_url = f"dq-redis://127.0.0.1:{port}/0"
        done = run_dq(shop, "queues --json", status=1)
    assert "The server cannot be reached" in json.loads(done.stdout)["error"]
