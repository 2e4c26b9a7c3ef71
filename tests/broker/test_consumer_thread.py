"""The consumer thread does its work alone, and while the event loop of its worker is blocked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Consumer, Exchange, Queue

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consuming import consumer_thread
from tests.broker.kombu_client import KombuClient
from tests.broker.worker_app import OpenApp, WorkerApp

#: No heartbeat comes within a test, and messages claimed ahead are released long before its deadlines.
LEASE_S, DEADLINE_S = 60.0, 5.0


@pytest.fixture
def blocked_app(open_app: OpenApp) -> WorkerApp:
    """An app with a long lease."""
    return open_app(dq_lease=LEASE_S)


def test_an_early_ack_reaches_the_broker_while_its_task_blocks_the_solo_pool(blocked_app: WorkerApp) -> None:
    app: Any = blocked_app.app
    with blocked_app.worker("solo", 1):
        task = blocked_app.send("hold", "long")
        blocked_app.ran(1, subject="began")
        wait_until(lambda: "is not delivered again" in str(app.dq.explain(task_id=task.id)), DEADLINE_S)
        blocked_app.witness.release("long")
        blocked_app.settled()


def test_a_message_behind_a_blocked_solo_pool_goes_to_another_worker(blocked_app: WorkerApp) -> None:
    with blocked_app.worker("solo", 1):
        blocked_app.send("note", "short")
        blocked_app.ran(1)
        blocked_app.send("hold", "long")
        blocked_app.ran(1, subject="began")
        blocked_app.send("note", "behind")
        with blocked_app.worker("threads", 1, warm=True):
            wait_until(lambda: "behind" in blocked_app.witness.reports("ran"), DEADLINE_S)
        blocked_app.witness.release("long")
        blocked_app.settled()


def test_a_caller_with_the_id_of_an_ended_consumer_thread_is_not_taken_for_it(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives the ids of threads that have ended to new ones."""
    start: list[Callable[[], None]] = []
    ran_in: list[int] = []
    with kombu_client.connect() as connection:
        channel: Any = connection.default_channel
        thread = channel.identity.threads.main
        thread._thread_id = threading.get_ident()
        monkeypatch.setattr(consumer_thread, "start_thread", start.append)
        thread._start(channel.thread_clients)
        wait = thread.begin_between_trips(lambda: ran_in.append(threading.get_ident()))
        assert ran_in == []
        threading.Thread(target=start[0]).start()
        assert wait(DEADLINE_S)
    assert ran_in != [threading.get_ident()]


@pytest.mark.parametrize("kind", ["direct", "fanout"])
def test_a_consumer_without_messages_makes_no_turns(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    turns: list[float] = []
    turn = consumer_thread.ConsumerThread._turn

    def counted(thread: consumer_thread.ConsumerThread) -> None:
        turns.append(time.monotonic())
        turn(thread)

    monkeypatch.setattr(consumer_thread.ConsumerThread, "_turn", counted)
    with kombu_client.connect() as connection:
        queue = Queue("news" if kind == "fanout" else "push", Exchange("news", kind), "news")
        with Consumer(connection.default_channel, [queue], callbacks=[lambda body, message: None]):
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=0.5)
            before = len(turns)
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=1.0)
            assert len(turns) - before < 20
