"""Discards are recorded beside running messages, and delay none of them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consuming import channel_claims
from tests.broker.kombu_client import KombuClient
from tests.broker.worker_app import OpenApp, WorkerApp

LOUD = 200


@pytest.mark.parametrize("why", ["cancelled", "expired"])
def test_discards_rest_between_claims(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(channel_claims, "MIN_REST_S", 0.2)
    options: dict[str, Any] = {"expiration": 0.001} if why == "expired" else {}
    count = 4 * channel_claims.MOST_DISCARDS
    with kombu_client.connect(watchdog=0) as connection:
        kombu_client.publish(*range(count), connection=connection, tenant="loud", **options)
        if why == "cancelled":
            kombu_client.partition.cancel_tenant("loud").run(kombu_client.client)
        kombu_client.client.config_resetstat()
        began = time.monotonic()
        with kombu_client.consuming(connection) as got:
            kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0)
            rests = 1 + (time.monotonic() - began) / channel_claims.MIN_REST_S
            calls = kombu_client.client.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert got == []
    assert count <= channel_claims.MOST_DISCARDS * rests
    # A claim, an ack and a look for each, and no loop of claims in between.
    assert calls <= 4 * rests


def is_revoked(result: Any) -> bool:
    return bool(result.state == "REVOKED")


def cancel_tenant(worker_app: WorkerApp, tenant: str) -> int:
    app: Any = worker_app.app
    return int(app.dq.queues[worker_app.queue].cancel_tenant(tenant))


def test_an_id_that_was_cancelled_and_replayed_runs(open_app: OpenApp) -> None:
    """The worker that recorded the cancellation removes the id from its revoked ids."""
    worker_app = open_app(dq_dead_letter_failures=True)
    app: Any = worker_app.app
    task_id = "cancelled-and-replayed"
    with worker_app.worker("threads", 1):
        worker_app.send("outcome", "fail", task_id=task_id)
        wait_until(lambda: len(worker_app.dead()) == 1, 30, what=lambda: str(worker_app.dead()))
        app.dq.quotas.pause(worker_app.queue, "held")
        worker_app.send("note", "cancelled", task_id=task_id, tenant="held")
        assert app.dq.queues[worker_app.queue].cancel(task_id) == "waiting"
        wait_until(lambda: is_revoked(worker_app.app.AsyncResult(task_id)), 30, what="REVOKED")
        worker_app.settled()
        # The same worker receives the id again: as a replayed dead letter, and by a new call.
        assert app.dq.dead_letters[worker_app.queue].replay(task_id) == 1
        worker_app.ran(2, subject="began")
        worker_app.send("note", "again", task_id=task_id)
        assert worker_app.ran(1) == ["again"]
        worker_app.settled()


def test_a_discard_restores_no_revocation_that_the_worker_received(worker_app: WorkerApp) -> None:
    app: Any = worker_app.app
    task_id = "revoked-and-cancelled"
    with worker_app.worker("threads", 1) as worker:
        worker_app.wait_responsive()
        # The revocation goes to the worker only, not to the broker.
        assert app.control.revoke(task_id, destination=[worker.name], reply=True, timeout=30)
        app.dq.quotas.pause(worker_app.queue, "held")
        worker_app.send("note", "cancelled", task_id=task_id, tenant="held")
        assert app.dq.queues[worker_app.queue].cancel(task_id) == "waiting"
        wait_until(lambda: is_revoked(worker_app.app.AsyncResult(task_id)), 30, what="REVOKED")
        worker_app.settled()
        worker_app.send("note", "revoked", task_id=task_id)
        worker_app.send("note", "behind it")
        assert worker_app.ran(1) == ["behind it"]
        worker_app.settled()


@pytest.mark.parametrize("why", ["cancelled", "expired"])
def test_a_worker_runs_a_task_before_it_has_recorded_all_discards(worker_app: WorkerApp, why: str) -> None:
    options = {"expires": 0.001} if why == "expired" else {}
    sent = [worker_app.send("note", number, tenant="loud", **options) for number in range(LOUD)]
    if why == "cancelled":
        assert cancel_tenant(worker_app, "loud") == LOUD
    worker_app.send("hold", "quiet", tenant="quiet")
    # The task takes the worker's only slot, so the worker claims no more messages.
    with worker_app.worker("threads", 1):
        worker_app.ran(1, subject="began")
        assert worker_app.client.hlen(worker_app.keys.messages) > LOUD // 2
        worker_app.witness.release("quiet")
        for result in (sent[0], sent[-1]):
            wait_until(partial(is_revoked, result), 30, what=partial(str, result))
        worker_app.settled()
    assert worker_app.witness.reports("ran") == []
    assert all(map(is_revoked, sent))
