"""Addresses of brokers: unix sockets, databases, users and passwords, lists of servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

import pytest
import redis
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker_variants.conftest import OpenCeleryApp, assert_refused, run_tasks
from tests.conformance.kombu_queue import KombuQueue

#: Contains the special characters of URLs.
PASSWORD = "s3cret/@:?#%+"


@pytest.fixture(scope="module")
def socket_server() -> Iterator[RedisServer]:
    with RedisServer(unix_socket=True) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A server with a password for the default user, and a named user."""
    with RedisServer() as server:
        with redis.Redis(port=server.port) as client:
            client.execute_command("ACL", "SETUSER", "shop", "on", f">{PASSWORD}", "~*", "&*", "+@all")
            client.config_set("requirepass", PASSWORD)
        yield server


def keys_of(server: RedisServer, db: int) -> list[str]:
    found = server.ask("EVAL", "redis.call('SELECT', ARGV[1]) return redis.call('KEYS', '*')", 0, db)
    assert isinstance(found, list)
    return [str(key) for key in found]


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_worker_runs_tasks_over_a_unix_socket(
    socket_server: RedisServer, open_celery_app: OpenCeleryApp, pool: str
) -> None:
    run_tasks(open_celery_app(f"dq-redis+socket://{socket_server.socket_path}"), pool)


@pytest.mark.parametrize("parameter", ["virtual_host", "db"])
def test_a_unix_socket_with_a_database(socket_server: RedisServer, parameter: str) -> None:
    db = {"virtual_host": 3, "db": 4}[parameter]
    url = f"dq-redis+socket://{socket_server.socket_path}?{parameter}={db}"
    with Connection(url) as connection:
        room = KombuQueue(connection, "by-socket")
        room.publish("x")
        assert any("by-socket" in key for key in keys_of(socket_server, db))
        room.consume(ack=True)
        assert room.drain(1) == ["x"]


def test_a_missing_socket_is_an_operational_error() -> None:
    assert_refused("dq-redis+socket:///nowhere/redis.sock", r"/nowhere/redis\.sock|No such file")


def test_databases_are_apart(redis_server: RedisServer) -> None:
    with (
        Connection(f"dq-redis://127.0.0.1:{redis_server.port}/8") as one,
        Connection(f"dq-redis://127.0.0.1:{redis_server.port}/9") as other,
    ):
        KombuQueue(one, "apart").publish("x")
        assert KombuQueue(other, "apart").count() == 0
        assert KombuQueue(one, "apart").count() == 1
        KombuQueue(one, "apart").bound.purge()


@pytest.mark.parametrize("who", ["", "shop"])
def test_a_worker_logs_in(guarded: RedisServer, open_celery_app: OpenCeleryApp, who: str) -> None:
    place = open_celery_app(f"dq-redis://{who}:{quote(PASSWORD, safe='')}@127.0.0.1:{guarded.port}/0")
    run_tasks(place, "prefork")


@pytest.mark.parametrize(("who", "complaint"), [("", "(?i)auth"), (":wrong@", "(?i)password|auth")])
def test_a_wrong_password_is_a_clear_error(guarded: RedisServer, who: str, complaint: str) -> None:
    assert_refused(f"dq-redis://{who}127.0.0.1:{guarded.port}/0", complaint)


def test_a_user_without_the_right_to_run_scripts_gets_a_clear_error(guarded: RedisServer) -> None:
    with redis.Redis(port=guarded.port, password=PASSWORD) as client:
        rights = ["~*", "&*", "+@all", "-@scripting"]
        client.execute_command("ACL", "SETUSER", "reader", "on", ">plain", *rights)
    with (
        Connection(f"dq-redis://reader:plain@127.0.0.1:{guarded.port}/0") as connection,
        pytest.raises((OperationalError, redis.ResponseError), match=r"(?i)permission"),
    ):
        KombuQueue(connection, "unscripted").publish("x")


def test_the_password_stays_out_of_the_log(guarded: RedisServer, open_celery_app: OpenCeleryApp) -> None:
    url = f"dq-redis://shop:{quote(PASSWORD, safe='')}@127.0.0.1:{guarded.port}/1"
    place = open_celery_app(url)
    with place.worker("solo", loglevel="DEBUG") as worker:
        assert place.send("add", 1, 1).get(timeout=30) == 2
        assert PASSWORD not in worker.log
        assert quote(PASSWORD, safe="") not in worker.log


def test_a_worker_goes_to_the_next_of_a_list_and_stays(
    redis_server: RedisServer, open_celery_app: OpenCeleryApp
) -> None:
    with RedisServer() as first, RedisServer() as second:
        urls = ";".join(f"dq-redis://127.0.0.1:{server.port}/0" for server in (first, second))
        place = open_celery_app(urls, dq_lease=1)
        with place.worker("prefork") as worker:
            held = place.send("hold_late", "held")
            place.witness.wait("started:held")
            first.kill()
            # kombu before 5.7 writes no mask where there is no password.
            connected = rf"Connected to dq-redis://(:\*\*@)?127\.0\.0\.1:{second.port}/0"
            wait_until(lambda: re.search(connected, worker.log), 60)
            # The publisher's list, which begins with the dead server, leads to the second one as well.
            assert place.send("add", 2, 2).get(timeout=30) == 4
            # The heartbeat thread abandons the in-flight messages of the first server after some leases.
            worker.wait_for_log("gives up", 60)
            assert worker.log.count("could not be renewed") < 3
            place.witness.release("held")
            assert held.get(timeout=30) == "held"


def test_a_list_that_begins_with_a_dead_server(
    redis_server: RedisServer, open_celery_app: OpenCeleryApp
) -> None:
    alive = f"dq-redis://127.0.0.1:{redis_server.port}/10"
    with dead_port() as port:
        place = open_celery_app(f"dq-redis://127.0.0.1:{port}/0;{alive}")
        run_tasks(place, "threads")
