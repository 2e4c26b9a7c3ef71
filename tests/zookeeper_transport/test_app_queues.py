"""``app.dq.queues`` and ``celery dq`` on the ZooKeeper broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from kombu import pools

import celery_dq
from celery_dq.errors import ConfigurationError, InvalidRequest
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session
from tests.conformance.kombu_queue import KombuQueue
from tests.dq_command import run_dq
from tests.zookeeper_transport.kinds import Connect

NODES = BrokerNodes("online").queue("q")
LATER = datetime(2099, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def app(hosts: str) -> Iterator[Any]:
    plain = Celery("t", broker=f"dq-zookeeper://{hosts}", set_as_current=False)
    plain.conf.update(broker_transport_options={"session_timeout": 15}, task_default_queue="q")
    app: Any = celery_dq.setup(plain)
    yield app
    app.close()
    pools.reset()


@pytest.fixture
def ids(app: Any) -> dict[str, str]:
    """The ids of the tasks of the queue, and of one that is in flight when a consumer has taken one."""
    return {
        "usual": app.send_task("post", ("a",)).id,
        "urgent": app.send_task("post", ("b",), priority=9, expires=LATER).id,
        "later": app.send_task("post", ("c",), eta=LATER).id,
        "other": app.send_task("mail", ("d",)).id,
    }


@pytest.fixture
def run(app: Any) -> Callable[..., str]:
    return lambda *words, **options: run_dq(app, *words, **options).output


def test_counts_and_messages(app: Any, ids: dict[str, str], connect: Connect, looker: Session) -> None:
    queue = app.dq.queues["q"]
    assert [each.id for each in queue.peek()] == [ids["urgent"], ids["usual"], ids["other"]]
    assert [each.id for each in queue.peek(1)] == [ids["urgent"]]
    taker = KombuQueue(connect(), "q")
    taker.consume(prefetch_count=1)
    taker.drain(1)
    counts = queue.snapshot()
    assert (counts.waiting, counts.delayed, counts.held, counts.dead, queue.depth) == (2, 1, 1, 0, 3)
    urgent = queue.find(ids["urgent"])
    assert (urgent.state, urgent.task, urgent.priority, urgent.expires) == ("claimed", "post", 9, LATER)
    assert (urgent.args, urgent.deliveries) == ("('b',)", 0)
    assert queue.details(ids["urgent"]).message == urgent
    assert [each.id for each in queue.peek()] == [ids["usual"], ids["other"]]
    (later,) = queue.peek(delayed=True)
    assert (later.id, later.state, later.due) == (ids["later"], "delayed", LATER)
    looker.open().create(NODES.item("queue-10000000A0000000999"), b"nonsense")
    assert queue.peek()[-1].args.startswith("unreadable: ")
    assert queue.find("nowhere") is None
    with pytest.raises(InvalidRequest, match="no tenants"):
        queue.peek(tenant="a")


def test_an_expiry_without_a_zone_is_utc(app: Any, run: Callable[..., str]) -> None:
    for expires in (LATER, LATER.replace(tzinfo=None)):
        task_id = app.send_task("post", expires=expires).id
        assert app.dq.queues["q"].find(task_id).expires == LATER
        assert json.loads(run("find", task_id, "--json"))[0]["expires"] == LATER.isoformat()


def test_cancelled_messages_are_gone_and_claimed_ones_stay(
    app: Any, ids: dict[str, str], connect: Connect, looker: Session
) -> None:
    queue = app.dq.queues["q"]
    taker = KombuQueue(connect(), "q")
    taker.consume(prefetch_count=1)
    taker.drain(1)
    assert queue.cancel(ids["urgent"]) == "claimed"
    assert queue.cancel(ids["usual"]) == "waiting"
    assert queue.cancel(ids["usual"]) == "none"
    assert queue.cancel(ids["later"]) == "delayed"
    app.send_task("post", ("e",))
    app.send_task("post", ("f",), eta=LATER)
    assert queue.cancel_task_name("post") == 2
    assert [each.id for each in queue.peek()] == [ids["other"]]
    client = looker.open()
    assert [len(client.get_children(path)) for path in (NODES.ready, NODES.delayed, NODES.locks)] == [2, 0, 1]
    assert queue.purge() == 1
    assert queue.find(ids["urgent"]).state == "claimed"


def test_a_dead_letter_is_found(app: Any, run: Callable[..., str], connect: Connect, looker: Session) -> None:
    from celery_dq.curator.framing import frame, unframe

    task_id = app.send_task("post", ("x",)).id
    client = looker.open()
    (name,) = client.get_children(NODES.ready)
    data = frame([*unframe(client.get(NODES.item(name))[0]), b'{"reason": "max_deliveries"}'])
    client.create(NODES.dead_letter(task_id), data, makepath=True)
    client.delete(NODES.item(name))
    found = app.dq.queues["q"].find(task_id)
    assert (found.id, found.state, found.task) == (task_id, "dead", "post")
    assert app.dq.queues["q"].cancel(task_id) == "none"
    text = run("status", status=1)
    assert "'q' has dead letters (1)" in text
    assert "living consumers" not in text


def test_the_commands(run: Callable[..., str], ids: dict[str, str]) -> None:
    assert run("queues", "q").split()[:7] == [
        *("name", "waiting", "delayed", "held", "dead", "suspects", "unreadable"),
    ]  # fmt: skip
    assert json.loads(run("queues", "q", "--json"))[0]["waiting"] == 3
    assert run("peek", "q", "--limit", "1").splitlines()[1].split()[0] == ids["urgent"]
    assert json.loads(run("find", ids["later"], "--json"))[0]["state"] == "delayed"
    assert run("find", "nowhere", status=1).startswith("Task nowhere is in no queue.\nLooked in ")
    assert run("cancel", "q", ids["usual"]) == f"{ids['usual']}: cancelled; it was waiting\n"
    assert "unknown: it is not in the queue\n" in run("cancel", "q", ids["usual"], status=1)
    assert "this broker does not have" in run("cancel", "q", "x", "--in-advance", status=1)
    assert "this broker does not have" in run("partitions", "q", "--set", "2", status=1)
    assert run("partitions", "q").splitlines()[1].split()[0] == "q"
    assert run("purge", "q", "--dry-run") == "3 messages would be purged; none was.\n"
    assert run("cancel", "q", "--task-name", "post", "--yes") == "Cancelled 2.\n"
    assert run("purge", "q", "--yes") == "Purged 1.\n"
    assert "OK " in run("status")
    assert "it has no tenants and quotas" in run("doctor")


@pytest.mark.parametrize(
    "words", ["tenants q", "quotas get q", "move q q2 --task-id x --create", "cancel q --tenant a"]
)
def test_the_error_of_an_operation_without_a_meaning(run: Callable[..., str], words: str) -> None:
    text = run("peek", "q")
    text = run(*words.split(), status=1)
    assert "on ZooKeeper there are no tenants, quotas, pauses, moves, tombstones" in text
    assert "needs broker_url = dq-redis://" in text


def test_the_error_of_the_api(app: Any) -> None:
    with pytest.raises(ConfigurationError, match="no tenants, quotas, pauses, moves"):
        app.dq.queues["q"].explain("a")
