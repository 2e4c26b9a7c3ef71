"""URLs, errors, and the operators' views of a cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

import celery_dq
from celery_dq.app.checks.doctor import check_server
from celery_dq.clock import SystemClock
from celery_dq.errors import ConfigurationError, ServerError
from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis.store.address import addresses_of, identity
from celery_dq.transport.redis.store.rights import ROLES, denied_commands
from celery_dq.transport.redis.store.server_checks import is_cluster_node
from celery_dq.wiring import register_transports
from tests.dq_command import run_dq


@pytest.fixture(autouse=True)
def registered() -> None:
    register_transports()


@pytest.fixture
def app(redis_cluster: RedisCluster, queue_name: str) -> Any:
    app = Celery("cluster", broker=redis_cluster.url(), set_as_current=False)
    app.conf.update(task_default_queue=queue_name, dq_queues={queue_name: {"partitions": 4}})
    celery_dq.setup(app)

    @app.task(name="noop")
    def noop() -> None:
        pass

    yield app
    app.close()


@pytest.fixture
def opened() -> Iterator[Callable[[str], Connection]]:
    """A function that opens connections, which end with the test."""
    with ExitStack() as stack:

        def open_connection(url: str) -> Connection:
            connection = stack.enter_context(Connection(url))
            # Kombu closes a transport only if it was ever connected.
            stack.callback(connection.transport.close_connection, connection)
            return connection

        yield open_connection


def test_the_hosts_of_a_url(opened: Callable[[str], Connection]) -> None:
    connection = opened("dq-rediscluster://shop:s%40crt@h1:7001,h2,[::1]:7003")
    assert addresses_of(connection) == [("h1", 7001), ("h2", 6379), ("::1", 7003)]
    assert (connection.userid, connection.password) == ("shop", "s@crt")
    assert "s@crt" not in connection.as_uri()
    assert identity(connection) == identity(opened("dq-rediscluster://h2,h1:7001,[::1]:7003"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("dq-rediscluster://h1:port", "'port'"),
        ("dq-rediscluster://h1:70000", "65535"),
        ("dq-rediscluster://h1:6379?db=1", "broker_transport_options"),
    ],
)
def test_a_wrong_url(opened: Callable[[str], Connection], url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        opened(url)


def test_a_database_is_refused(redis_cluster: RedisCluster, opened: Callable[[str], Connection]) -> None:
    with pytest.raises(ConfigurationError, match="only database 0"):
        opened(f"{redis_cluster.url()}/3").channel()


def test_a_single_server_is_no_cluster(
    redis_server: RedisServer, opened: Callable[[str], Connection]
) -> None:
    with pytest.raises(ServerError, match=f"dq-redis://127.0.0.1:{redis_server.port}/0"):
        opened(f"dq-rediscluster://127.0.0.1:{redis_server.port}").channel()


def test_a_node_is_no_single_server(redis_cluster: RedisCluster, opened: Callable[[str], Connection]) -> None:
    with pytest.raises(ServerError, match="dq-rediscluster://"):
        opened(f"dq-redis://127.0.0.1:{redis_cluster.nodes[0].port}/0").channel()


@pytest.mark.parametrize("field", ["redis_mode", "server_mode"])
def test_a_node_names_its_mode_in_redis_or_in_valkey(field: str) -> None:
    assert is_cluster_node({field: "cluster"})
    assert not is_cluster_node({field: "standalone"})


def test_an_old_redis_py_is_refused_by_name_of_the_extra() -> None:
    program = (
        "import redis; redis.VERSION = (7, 4, 0)\n"
        "from celery_dq.wiring import register_transports; register_transports()\n"
        "from kombu import Connection; Connection('dq-rediscluster://h1').transport"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: dq-rediscluster:// needs redis-py 8" in done.stderr
    assert "pip install 'celery-dq[cluster]'" in done.stderr


def test_operators_see_partition_slot_and_node(
    app: Any, redis_cluster: RedisCluster, queue_name: str
) -> None:
    task_id = app.tasks["noop"].apply_async(tenant="acme").id
    queue = app.dq.queues[queue_name]
    partitions = queue.snapshot().partitions
    assert len(partitions) == 4
    for each in partitions:
        assert each.node == f"127.0.0.1:{redis_cluster.master_of(each.slot).port}"
    (home,) = [each for each in partitions if each.waiting]
    for explained in (app.dq.explain(task_id=task_id), queue.explain("acme")):
        assert (explained.slot, explained.node) == (home.slot, home.node)
        assert f"slot {home.slot} on {home.node}" in str(explained)
    texts = {finding.code: finding.problem for finding in check_server(app)}
    assert "E032" not in texts
    assert all(f"127.0.0.1:{node.port} " in texts["I032"] for node in redis_cluster.masters())


def test_operators_learn_that_a_slot_moves(app: Any, redis_cluster: RedisCluster, queue_name: str) -> None:
    app.tasks["noop"].apply_async(tenant="acme")
    (home,) = [each for each in app.dq.queues[queue_name].snapshot().partitions if each.waiting]
    target = next(each for each in redis_cluster.masters() if each is not redis_cluster.master_of(home.slot))
    source = redis_cluster.begin_move(home.slot, target)
    redis_cluster.move_keys(home.slot, source, target, 1)
    impatient = Celery("cluster", broker=redis_cluster.url(), set_as_current=False)
    impatient.conf.broker_transport_options = {"socket_timeout": 0.5}
    celery_dq.setup(impatient)
    try:
        shown = run_dq(impatient, "partitions", queue_name, status=1).output
        assert f"slot {home.slot} of the Redis Cluster moves to another node" in shown
        assert "Wait for the end of the move" in shown
        (unusable,) = [each for each in check_server(impatient) if each.code == "E011"]
        assert "moves to another node" in unusable.problem
        assert unusable.remedy.startswith("Wait for the end of the move")
    finally:
        redis_cluster.move_keys(home.slot, source, target)
        redis_cluster.end_move(home.slot, target)
        impatient.close()


def test_the_doctor_asks_each_master(
    redis_cluster: RedisCluster, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.conf.dq_confirm_replicas = 2  # each master has one
    monkeypatch.setattr(SystemClock, "wall", staticmethod(lambda: time.time() + 5.0))
    found = check_server(app)
    for code in ("W027", "E028"):
        problems = [each.problem for each in found if each.code == code]
        assert len(problems) == len(redis_cluster.masters()) == 3
        for node in redis_cluster.masters():
            assert any(f"the master 127.0.0.1:{node.port} of" in each for each in problems)


@pytest.mark.parametrize("name", ["publisher", "worker"])
def test_the_rights_of_a_role_suffice_on_a_cluster(redis_cluster: RedisCluster, name: str) -> None:
    role = next(each for each in ROLES if each.name == name)
    for node in redis_cluster.nodes:
        node.ask("ACL", "SETUSER", "limited", "reset", "on", ">pw", *role.acl(on_cluster=True).split())
    try:
        url = redis_cluster.url().replace("://", "://limited:pw@")
        with Connection(url) as connection:
            channel: Any = connection.default_channel
            assert denied_commands(channel.pool, role, channel.context.options) == {}
            channel.queue_declare("of-limited-rights")
            channel.basic_publish(channel.prepare_message("x"), "", "of-limited-rights")
    finally:
        for node in redis_cluster.nodes:
            node.ask("ACL", "DELUSER", "limited")


def test_a_right_that_one_node_denies_is_found(redis_cluster: RedisCluster) -> None:
    role = next(each for each in ROLES if each.name == "publisher")
    last = max(redis_cluster.masters(), key=lambda node: node.port)
    for node in redis_cluster.nodes:
        rights = role.acl(on_cluster=True).split() + (["-evalsha"] if node.port == last.port else [])
        node.ask("ACL", "SETUSER", "limited", "reset", "on", ">pw", *rights)
    try:
        url = redis_cluster.url().replace("://", "://limited:pw@")
        with Connection(url) as connection:
            channel: Any = connection.default_channel
            assert {*denied_commands(channel.pool, role, channel.context.options)} == {"evalsha"}
    finally:
        for node in redis_cluster.nodes:
            node.ask("ACL", "DELUSER", "limited")
