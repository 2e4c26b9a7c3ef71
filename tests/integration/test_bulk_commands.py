"""Commands that change many messages: the count, the question, the dry run, and an interruption."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_dq.app.api.queues import QueueApi
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.redis_election import RedisElection
from tests.dq_command import Run
from tests.integration.partitioned_shop import killed
from tests.integration.shop import claim, dead_letter, send


@pytest.fixture
def full(shop: Any) -> Any:
    """An app: three waiting, a delayed and a claimed message of the tenant a, one of b, two dead letters."""
    for _ in range(2):
        dead_letter(shop, "z")
    send(shop, "a", "a", "a", "a", "b")
    send(shop, "a", countdown=600)
    claim(shop)
    shop.dq.queues["push"].cancel("not-yet")
    shop.dq.queues["other"].cancel("not-yet")
    return shop


#: The commands with their question, the word for the change, and how many messages they change.
CHANGES = [
    ("purge push", "Remove 5 messages from 'push' for good?", "purged", 5),
    ("cancel push --tenant a", "Cancel 4 messages of tenant 'a' in 'push'?", "cancelled", 4),
    ("cancel push --task-name notify", "Cancel 5 messages of task 'notify' in 'push'?", "cancelled", 5),
    ("move push new --create --tenant a", "Move 3 messages from 'push' to the end of 'new'?", "moved", 3),
    ("dead replay push --all", "Send 2 dead letters of 'push' again?", "replayed", 2),
    ("dead purge push --all", "Delete 2 dead letters of 'push' for good?", "purged", 2),
]


@pytest.mark.parametrize(("words", "question", "word", "count"), CHANGES, ids=[each[0] for each in CHANGES])
def test_a_change_is_counted_and_confirmed(
    run: Run, full: Any, words: str, question: str, word: str, count: int
) -> None:
    def counts() -> tuple[int, ...]:
        now = full.dq.queues["push"].snapshot()
        return now.waiting, now.delayed, now.held, now.discards, now.dead

    before = counts()
    assert json.loads(run(f"{words} --dry-run --json")) == {"found": count, word: 0}
    assert f"would be {word}; none was." in run(f"{words} --dry-run")
    assert question in run(words, answer="n\n", status=1)
    assert "--yes makes the change without a question" in run(words, answer="", status=2)
    assert counts() == before
    assert run(words, answer="y\n").endswith(f"{word.capitalize()} {count}.\n")
    assert counts() != before
    assert counts()[2] == 1
    nothing_is_an_error = "move" in words or "--task-name" in words
    run(f"{words} --yes", status=int(nothing_is_an_error))


def test_a_single_message_needs_no_answer(run: Run, full: Any) -> None:
    (message,) = full.dq.queues["push"].peek(1)
    (first, second) = full.dq.dead_letters["push"].list()
    assert run(f"move push new --create --task-id {message.id}") == "Moved 1.\n"
    assert "rejected" in run("dead list push")
    assert json.loads(run(f"dead replay push {first.id} --json")) == {"replayed": 1}
    assert run(f"dead purge push {second.id} --dry-run") == "1 dead letter would be purged; none was.\n"
    assert run(f"dead purge push {second.id}") == "Purged 1.\n"
    assert "no dead letters" in run("dead list push")


def test_a_dedup_lock_is_released_after_a_question(run: Run, shop: Any) -> None:
    head = shop.tasks["notify"].apply_async(("a",), dedup={"key": "k"}).id
    (lock,) = shop.dq.dedup["push"].list()
    words = f"dedup release push {lock.key} --tenant a"
    assert f"Task {head} would lose the dedup lock." in run(f"{words} --dry-run")
    assert "Release the lock?" in run(words, answer="n\n", status=1)
    assert [each.head for each in shop.dq.dedup["push"].list()] == [head]
    assert f"Task {head} no longer holds" in run(words, answer="y\n")
    assert shop.dq.dedup["push"].list() == []


@pytest.mark.parametrize(
    ("words", "done", "shown"),
    [
        ("queues pusch push --forget", {"forgotten": ["pusch"]}, "'pusch': forgotten\n"),
        ("leaders pusch push --forget", {"forgotten": ["pusch"]}, "'pusch': forgotten\n"),
        (("cancel", "push", "t", ""), {"t": "waiting"}, "t: cancelled; it was waiting\n"),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_after_some_names_comes_with_the_outcomes_before_it(
    run: Run, shop: Any, words: Any, done: Any, shown: str, as_json: bool
) -> None:
    with shop.dq._broker.channel() as channel:
        channel.queue_declare("pusch")
        RedisElection(channel.client, PartitionKeys("online", "push"), "w1").accept(0, 60.0)
        with shop.dq._broker.open_home("pusch") as (partition, client):
            partition.fence(1).run(client)
    shop.tasks["notify"].apply_async(("a",), task_id="t")
    line = words.split() if isinstance(words, str) else words
    text = run(*line, *(["--json"] if as_json else []), status=1)
    if as_json:
        found = json.loads(text)
        assert (found["type"], found["done"]) == ("InvalidRequest", done)
    else:
        assert text.startswith(f"{shown}Error: ")


def test_ctrl_c_after_some_names_comes_with_the_outcomes_before_it(
    run: Run, shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop.dq._broker.channel() as channel:
        channel.queue_declare("pusch")
    shop.tasks["notify"].apply_async(("a",), task_id="t")
    forget, cancel = QueueApi.forget, QueueApi.cancel
    monkeypatch.setattr(QueueApi, "forget", lambda api: forget(api) if api.name == "pusch" else killed())
    monkeypatch.setattr(QueueApi, "cancel", lambda api, each: cancel(api, each) if each == "t" else killed())
    for words, outcome, rest in (
        ("queues pusch push --forget", "'pusch': forgotten", "1 queue not forgotten"),
        ("cancel push t u --in-advance", "t: cancelled; it was waiting", "1 task not cancelled"),
    ):
        assert run(words, status=130) == f"{outcome}\nInterrupted: {rest}, or not known to be.\n"


@pytest.mark.parametrize(
    ("words", "method", "shown"),
    [
        ("cancel push --tenant a", "cancel_tenant", "200 messages cancelled."),
        ("move push new --create --tenant a", "move", "200 messages moved. Repeat the command: up to 200 "),
    ],
)
def test_an_interruption_reports_the_finished_chunks(
    run: Run, shop: Any, monkeypatch: pytest.MonkeyPatch, words: str, method: str, shown: str
) -> None:
    notify = shop.tasks["notify"]
    with shop.pool.acquire(block=True) as connection, connection.Producer() as producer:
        for place in range(201):
            notify.apply_async(("a", place), producer=producer)
    change = getattr(QueueApi, method)

    def interrupted(*args: Any, on_progress: Any, **options: Any) -> Any:
        def interrupt(count: int) -> None:
            on_progress(count)
            raise KeyboardInterrupt

        return change(*args, on_progress=interrupt, **options)

    monkeypatch.setattr(QueueApi, method, interrupted)
    assert run(f"{words} --yes", status=130).startswith(f"Interrupted: at least {shown}")
    assert shop.dq.queues["push"].snapshot().waiting == 1
    word = "cancelled" if method == "cancel_tenant" else "moved"
    assert json.loads(run(f"{words} --yes --json", status=130)) == {word: 1, "interrupted": True}
