"""The producer's buffer on a cluster one of whose masters takes no messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import celery_dq
from celery_dq.producer import flusher, spill_log
from celery_dq.testing.redis_cluster import ClusterNode, RedisCluster
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.cluster_connection import BROADCAST_SLOT
from tests.cluster.test_cluster_consumers import keys_of, queue_on_each_master

Trouble = Callable[[RedisCluster, ClusterNode, str], AbstractContextManager[None]]


@contextmanager
def killed(cluster: RedisCluster, master: ClusterNode, queue: str) -> Iterator[None]:
    cluster.replica_of(master).kill()
    master.kill()
    try:
        yield
    finally:
        cluster.restore()


@contextmanager
def full(cluster: RedisCluster, master: ClusterNode, queue: str) -> Iterator[None]:
    master.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        yield
    finally:
        master.ask("CONFIG", "SET", "maxmemory", "0")


@contextmanager
def without_its_replica(cluster: RedisCluster, master: ClusterNode, queue: str) -> Iterator[None]:
    cluster.replica_of(master).kill()
    try:
        yield
    finally:
        cluster.restore()


@contextmanager
def with_a_slot_that_moves(cluster: RedisCluster, master: ClusterNode, queue: str) -> Iterator[None]:
    slot, target = keys_of(queue).slot, next(each for each in cluster.masters() if each is not master)
    cluster.begin_move(slot, target)
    cluster.move_keys(slot, master, target, most=1)
    try:
        yield
    finally:
        cluster.move_keys(slot, master, target)
        cluster.end_move(slot, target)


@pytest.fixture
def make_app(redis_cluster: RedisCluster, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    made: list[Any] = []

    def make() -> Any:
        app = Celery("shop", broker=redis_cluster.url(), set_as_current=False)
        app.conf.update(
            dq_buffer=True,
            dq_buffer_folder=str(tmp_path / "spill"),
            dq_confirm_replicas=1,
            dq_publish_timeout="1.5s",
        )
        made.append(celery_dq.setup(app))
        return app

    yield make
    for app in made:
        app.dq.buffer.close(timeout=0.2)
        app.close()


@pytest.mark.parametrize("trouble", [full, with_a_slot_that_moves, without_its_replica, killed])
def test_a_master_that_takes_no_messages_stops_its_own_queues_only(
    redis_cluster: RedisCluster,
    make_app: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: Trouble,
) -> None:
    monkeypatch.setattr(flusher, "ADOPT_S", 0.1)
    queues = queue_on_each_master(redis_cluster)
    # The master with kombu's bindings, which a declaration of any queue needs.
    waiting = queues.pop(master := redis_cluster.master_of(BROADCAST_SLOT))
    other = queues.popitem()[1]
    app, dead, ids = make_app(), make_app(), [f"waiting-{number}" for number in range(5)]
    for queue in (waiting, other):
        app.send_task("job", queue=queue)
    assert app.dq.buffer.flush(30) == 0
    with monkeypatch.context() as patch:
        patch.setattr(spill_log, "process_name", lambda: "1.1.0")
        dead.dq.buffer.replay()
        dead.dq.buffer.producer._own.flusher.stop(30)
        for task_id in ids:
            dead.send_task("job", task_id=task_id, queue=waiting)

    def logged() -> list[str]:
        return [each.__dict__.get("event", "") for each in caplog.records]

    with trouble(redis_cluster, master, waiting):
        dead.dq.buffer.close(0)
        wait_until(lambda: "buffer_lane_deferred" in logged(), 30)  # the app tries to send these messages
        for _ in range(5):
            app.send_task("job", queue=other)
        assert app.dq.buffer.flush(30) == 0
        assert "buffer_broker_unreachable" not in logged()
    app.dq.buffer.replay()
    assert app.dq.buffer.flush(30) == 0
    assert app.dq.queues[other].depth == 6
    assert [message.id for message in app.dq.queues[waiting].peek(10)][-5:] == ids


def test_without_any_node_the_broker_counts_as_unreachable(
    redis_cluster: RedisCluster, make_app: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    app, queues = make_app(), [*queue_on_each_master(redis_cluster).values()]
    for queue in queues:
        app.send_task("job", queue=queue)
    assert app.dq.buffer.flush(30) == 0
    for node in redis_cluster.nodes:
        node.kill()
    try:
        for queue in queues:
            app.send_task("job", queue=queue)
        wait_until(lambda: app.dq.buffer.inspect().last_error, 30)
        assert [each.__dict__.get("event") for each in caplog.records] == ["buffer_broker_unreachable"]
    finally:
        redis_cluster.restore()
    assert app.dq.buffer.flush(30) == 0
