"""Commands of an operator while replicas are missing and a killed change has left an outbox."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_dq.app.api import map_change, tenant_moves
from celery_dq.errors import TooFewReplicas
from celery_dq.keys import quota_field
from celery_dq.options import Quota
from celery_dq.transport.redis.store import move_calls
from celery_dq.transport.redis.store.move_calls import run_confirmed
from tests.integration.partitioned_shop import COUNT, A, D, claim_in, killed, opened
from tests.integration.shop import send


@pytest.fixture
def outbox(wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of the message in an outbox; another one of tenant A waits in partition 0."""
    task_id, _ = send(wide, D, A)

    with monkeypatch.context() as patch:
        patch.setattr(tenant_moves, "import_messages", killed)
        with pytest.raises(KeyboardInterrupt):
            queue.set_partitions(2)
    monkeypatch.setattr(move_calls, "CONFIRM_TIMEOUT_MS", 1)
    monkeypatch.setattr(tenant_moves, "run_confirmed", _confirmed_by_one)
    return task_id


def _confirmed_by_one(call: Any, partition: Any, client: Any, replicas: int) -> Any:
    return run_confirmed(call, partition, client, 1)


def _complete(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_moves, "run_confirmed", run_confirmed)
    queue.set_partitions(2, timeout=30)


def test_a_pause_and_a_cancellation_need_no_replicas(
    wide: Any,
    queue: Any,
    outbox: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert queue.pause().since
    assert queue.resume()
    assert queue.reprioritise(outbox, 9) == "other"
    with caplog.at_level(logging.WARNING, "celery_dq"):
        assert queue.cancel(outbox) == "claimed"
    assert {getattr(each, "event", "") for each in caplog.records} == {"outbox_not_delivered"}
    _complete(queue, monkeypatch)
    assert [(each.id, each.reason) for each in claim_in(wide, D)] == [(outbox, "cancelled")]


def test_a_purge_that_misses_an_outbox_reports_it(
    wide: Any, queue: Any, outbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OperationalError, match=r"done, except for some messages.* partitions push --set 2"):
        queue.purge()
    (entry, *_) = wide.dq.audit()
    assert (entry.action, entry.count, entry.details) == ("purged", 1, "interrupted; at least 1")
    _complete(queue, monkeypatch)
    assert [each.id for each in claim_in(wide, D, 9)] == [outbox]
    assert claim_in(wide, A) == []


def test_the_end_of_a_change_that_was_not_confirmed_is_completed_by_the_command_in_its_error(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(wide, *[D] * 3)

    def stored_but_not_confirmed(call: Any, first: Any, client: Any, replicas: int) -> Any:
        stored = call.run(client)
        if stored.before is None:
            raise TooFewReplicas
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(map_change, "run_confirmed", stored_but_not_confirmed)
        with pytest.raises(OperationalError):
            wide.dq.quotas.set("push", D, rate="10/s", burst=10, spread=2)
    with opened(wide) as (partitions, client):
        shares = partitions[0].homes.partitions(D)
        former = next(each for each in partitions if each.keys.partition not in shares)
        client.hset(former.keys.quotas, quota_field(D), Quota(rate=5).pack())
    queue.set_partitions(COUNT)
    with opened(wide) as (partitions, client):
        assert len({client.hget(each.keys.state, "partitions") for each in partitions}) == 1
        assert not client.hexists(former.keys.quotas, quota_field(D))
