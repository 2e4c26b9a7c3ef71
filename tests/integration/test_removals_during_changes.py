"""Messages that a call removes while a mover brings them to other partitions."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.app.api.tenant_moves import TenantMoves
from celery_dq.inspector import messages
from celery_dq.transport.redis.store import whole_queue
from celery_dq.transport.redis.store.move_calls import export_messages
from celery_dq.transport.redis.store.script_calls import run_all
from tests.integration.partitioned_shop import killed, opened
from tests.integration.shop import send
from tests.integration.test_moves_of_busy_tenants import NEW, OLD
from tests.integration.test_tenant_moves import MOVING


def move_last(app: Any, *, dies: bool) -> None:
    """Move the last message of the tenant back to its home of four partitions, or die on the way."""
    with opened(app) as (partitions, client):
        source = partitions[NEW]
        last = [each.decode() for each in client.zrange(source.keys.tenant(MOVING), -1, -1)]
        if last and dies:
            export_messages(source, MOVING, OLD, last).run(client)
        elif last:
            TenantMoves(client, partitions, app.dq._broker.options)._move(source, MOVING, OLD, last)


@pytest.mark.parametrize(
    ("call", "dies"),
    [("purge", False), ("purge", True), ("queue_purge", False), ("cancel_task_name", False)],
)
def test_messages_that_move_meanwhile_are_removed(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch, call: str, dies: bool
) -> None:
    queue.set_partitions(7)
    send(wide, *[MOVING] * 30)
    with monkeypatch.context() as patch:
        patch.setattr(TenantMoves, "_empty", killed)
        with pytest.raises(KeyboardInterrupt):
            queue.set_partitions(4)
    ids_of_task = messages.ids_of_task

    def run_late(calls: Any, client: Any) -> Any:
        move_last(wide, dies=dies)
        return run_all(calls, client)

    def find_late(partition: Any, client: Any, name: str) -> Any:
        if partition.keys.partition == NEW:
            move_last(wide, dies=dies)
        return ids_of_task(partition, client, name)

    monkeypatch.setattr(whole_queue, "MAX_CHUNK", 10)
    monkeypatch.setattr(whole_queue, "run_all", run_late)
    monkeypatch.setattr(messages, "ids_of_task", find_late)
    if call == "purge":
        removed = queue.purge()
    elif call == "queue_purge":
        with wide.connection_for_write() as connection:
            connection.default_channel.queues("push", refresh=True)
            removed = connection.default_channel.queue_purge("push")
    else:
        removed = queue.cancel_task_name("notify")
    assert removed == 30
    assert queue.snapshot().waiting == 0
    if call != "cancel_task_name":  # a worker has to take the discards first
        queue.set_partitions(4)
        assert queue.snapshot().waiting == 0
