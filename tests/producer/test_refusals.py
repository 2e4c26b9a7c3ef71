"""A Redis that answers with an error: all paths of a publish raise kombu's error, with the remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Producer, Queue, pools
from kombu.exceptions import OperationalError

from celery_dq.keys import PartitionKeys
from celery_dq.lost_attempts import MOST_LOSSES
from celery_dq.producer import spill_log
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.aliases import register_transports
from celery_dq.transport.redis.store.server_errors import BrokerRefused
from tests.apps import run_task, task
from tests.broker.proxy import Proxy
from tests.producer.conftest import MakeApp

Trouble = Callable[[Any], AbstractContextManager[Any]]


@contextmanager
def configured(admin: Any, name: str, value: str) -> Iterator[None]:
    before = admin.config_get(name)[name]
    admin.config_set(name, value)
    try:
        yield
    finally:
        admin.config_set(name, before)


def full(admin: Any) -> AbstractContextManager[Any]:
    return configured(admin, "maxmemory", "1")


def short_of_replicas(admin: Any) -> AbstractContextManager[Any]:
    return configured(admin, "min-replicas-to-write", "1")


@contextmanager
def unable_to_save(admin: Any) -> Iterator[None]:
    in_the_way = Path(admin.config_get("dir")["dir"], admin.config_get("dbfilename")["dbfilename"])
    in_the_way.unlink(missing_ok=True)
    in_the_way.mkdir()
    with configured(admin, "save", "3600 1"):
        admin.bgsave()
        wait_until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", 30)
        yield
        in_the_way.rmdir()
        admin.bgsave()
        wait_until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "ok", 30)


@contextmanager
def without_rights(admin: Any) -> Iterator[None]:
    admin.execute_command("ACL SETUSER default -evalsha -eval -sadd -get")
    try:
        yield
    finally:
        admin.execute_command("ACL SETUSER default +@all")


@contextmanager
def foreign_key(admin: Any) -> Iterator[None]:
    key = PartitionKeys("online", "celery").state
    held = admin.dump(key)
    admin.delete(key)
    admin.set(key, "of another program")
    yield
    admin.delete(key)
    if held:
        admin.restore(key, 0, held)


@contextmanager
def busy(admin: Any) -> Iterator[None]:
    with configured(admin, "busy-reply-threshold", "1"):
        port = admin.connection_pool.connection_kwargs["port"]

        def run() -> None:
            with redis.Redis(port=port, socket_timeout=60) as client, pytest.raises(redis.ResponseError):
                client.eval("while true do end", 0)

        thread = threading.Thread(target=run)
        thread.start()

        def answers_busy() -> bool:
            try:
                admin.ping()
            except redis.ResponseError:
                return True
            return False

        wait_until(answers_busy, 30)
        try:
            yield
        finally:
            admin.script_kill()
            thread.join(30)


@contextmanager
def replica(admin: Any) -> Iterator[None]:
    admin.config_set("replica-serve-stale-data", "yes")
    admin.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        admin.replicaof("NO", "ONE")


TROUBLES: dict[str, tuple[Trouble, str]] = {
    "full": (full, "Redis is full: let workers empty its queues, or raise maxmemory"),
    "unable to save": (unable_to_save, "free its disk"),
    "short of replicas": (short_of_replicas, "min-replicas-to-write"),
    "without rights": (without_rights, "ACL SETUSER"),
    "a foreign key": (foreign_key, "dq_key_prefix"),
    "busy": (busy, "SCRIPT KILL"),
    "a replica": (replica, "name the master"),
}


@pytest.fixture
def app(make_app: MakeApp, server: RedisServer, admin: Any) -> Iterator[Any]:
    policy = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    app: Any = make_app(
        server.url(scheme="dq-redis"),
        dq_buffer=False,
        dq_buffer_folder="",
        dq_breaker_failures=0,
        task_publish_retry_policy=policy,
        task_queues=[Queue("celery"), Queue("topic", Exchange("topic", type="topic"), routing_key="#")],
    )

    def work(a: int = 0) -> None: ...

    app.task(name="plain", shared=False)(work)
    app.task(name="keyed", shared=False, dedup=True)(work)
    yield app
    pools.reset()


@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_way_of_a_call_raises_kombus_error_with_a_remedy(app: Any, admin: Any, trouble: str) -> None:
    begin, remedy = TROUBLES[trouble]
    plain, keyed = app.tasks["plain"], app.tasks["keyed"]
    ways: dict[str, Callable[[], Any]] = {
        "a template": lambda: plain.delay(1),
        "Celery's way": lambda: plain.apply_async((1,), countdown=1),
        "without retries": lambda: plain.apply_async((1,), retry=False),
        "a dedup key": lambda: keyed.delay(5),
        "a dedup key, Celery's way": lambda: keyed.apply_async((6,), countdown=1),
        "by name": lambda: app.send_task("elsewhere"),
        "another queue": lambda: plain.apply_async((1,), queue="new"),
    }
    for number in range(3):  # makes the templates
        plain.delay(1), keyed.delay(number), app.send_task("elsewhere")
    if trouble == "a foreign key":
        del ways["another queue"]
    with begin(admin):
        for way, call in ways.items():
            with pytest.raises(OperationalError, match=remedy) as caught:
                call()
            assert "Redis" in str(caught.value), way
    for call in ways.values():
        call()


def test_a_message_that_the_server_never_takes_is_an_error_in_a_task_too(app: Any, admin: Any) -> None:
    app.conf.dq_breaker_failures = 1
    plain, large = app.tasks["plain"], "x" * 3_000_000

    def parent(**options: Any) -> None:
        plain.apply_async((large,), **options)

    in_task = app.task(name="parent", shared=False)(parent)
    ways: dict[str, Callable[[], Any]] = {
        "a template": lambda: plain.delay(large),
        "Celery's way": lambda: plain.apply_async((large,), countdown=1),
        "without retries": lambda: plain.apply_async((large,), retry=False),
        "in a task": lambda: in_task.apply(throw=True),
        "in a task, without retries": lambda: in_task.apply(kwargs={"retry": False}, throw=True),
    }
    for _ in range(3):
        plain.delay(1)
    # The server closes the connection without an answer, and with one.
    for setting in ("client-query-buffer-limit", "proto-max-bulk-len"):
        with configured(admin, setting, "1mb"):
            for way, call in ways.items():
                with pytest.raises(OperationalError) as caught:
                    call()
                assert setting in str(caught.value), way
                plain.delay(1)  # the broker takes other messages, and the breaker stays closed
    assert app.dq.queues["celery"].depth == 3 + 2 * len(ways)
    for call in ways.values():
        call()


def test_a_buffered_message_waits_until_the_server_takes_it(app: Any, admin: Any) -> None:
    app.tasks["plain"].delay(1)
    for begin, remedy in TROUBLES.values():
        with begin(admin):
            for queue in ("celery", "topic"):
                app.tasks["plain"].apply_async((1,), buffered=True, queue=queue)
            wait_until(lambda: app.dq.buffer.inspect().last_error != "", 30)
            if begin is not replica:
                wait_until(lambda: remedy in app.dq.buffer.inspect().last_error, 30)  # noqa: B023
        assert app.dq.buffer.flush(30) == 0
    assert app.dq.buffer.inspect().counters["rejected"] == 0
    assert app.dq.queues["celery"].depth == 1 + len(TROUBLES)


def large_for_redis(setting: str) -> Iterator[tuple[str, int]]:
    with RedisServer() as server, redis.Redis(port=server.port) as client:
        client.config_set(setting, "1mb")
        yield server.url(), 3_000_000


def cut_by_a_proxy(answer: bytes) -> Iterator[tuple[str, int]]:
    with RedisServer() as server, Proxy(server.port) as proxy:
        proxy.cut_requests, proxy.cuts_left, proxy.last_words = b"poison", 1_000_000, answer
        yield f"redis://127.0.0.1:{proxy.port}/0", 10


LIMITS: dict[str, Callable[[], Iterator[tuple[str, int]]]] = {
    "Redis closes the connection": lambda: large_for_redis("client-query-buffer-limit"),
    "Redis answers and closes": lambda: large_for_redis("proto-max-bulk-len"),
    "a proxy closes the connection": lambda: cut_by_a_proxy(b""),
    "a proxy answers and closes": lambda: cut_by_a_proxy(b"-ERR request too large\r\n"),
}


@pytest.mark.parametrize("scheme", ["dq-redis", "redis"])
@pytest.mark.parametrize("limit", LIMITS)
def test_one_message_that_is_never_taken_stops_no_other(make_app: MakeApp, scheme: str, limit: str) -> None:
    with contextmanager(LIMITS[limit])() as (url, size):
        app: Any = make_app(
            url.replace("redis", scheme, 1),
            dq_buffer_linger="50ms",
            broker_transport_options={"socket_timeout": 5},
        )
        refused: list[tuple[str, str]] = []
        app.dq.buffer.on_error(lambda error, message, state: refused.append((message.task_id, state)))
        with app.dq.buffer.buffered(timeout=40):
            for number in range(30):
                app.send_task("job", task_id=f"a{number}", queue="a")
                if number == 17:
                    app.send_task("job", ("x" * size,), task_id="poison", queue="a")
                app.send_task("job", task_id=f"b{number}", queue="b")
        assert len(app.dq.buffer) == 0
        assert refused == [("poison", "rejected")]
        (kept,) = app.dq.buffer.quarantine()
        assert [message.id for message in kept.messages] == ["poison"]
        assert app.dq.buffer.inspect().counters["delivered"] == 60
        if scheme == "dq-redis":
            found = [message.id for message in app.dq.queues["a"].peek(100)]
            assert found == [f"a{number}" for number in range(30)]


def test_a_small_call_of_a_task_outlives_a_storm_that_closes_its_connections(make_app: MakeApp) -> None:
    with RedisServer() as server, Proxy(server.port) as proxy:
        app: Any = make_app(server.url(scheme="dq-redis").replace(str(server.port), str(proxy.port)))

        def parent() -> None:
            app.send_task("job", ("storm",), queue="a")

        proxy.cut_requests, proxy.cuts_left = b"storm", MOST_LOSSES
        run_task(task(app, name="parent")(parent))
        assert proxy.cut == MOST_LOSSES
        assert app.dq.queues["a"].depth == 1


def test_the_folder_of_a_dead_process_with_such_a_message_is_sent_by_a_neighbour(make_app: MakeApp) -> None:
    with contextmanager(LIMITS["a proxy closes the connection"])() as (url, _):
        app: Any = make_app(url.replace("redis", "dq-redis"))
        dead = app.dq.buffer.producer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spill_log, "process_name", lambda: "1.1.0")
            dead.start()
            dead._own.flusher.stop(30)
            for task_id in ("a0", "poison", "a1"):
                app.send_task("job", task_id=task_id, queue="a")
        dead.close(0)
        neighbour: Any = make_app(url.replace("redis", "dq-redis"))
        neighbour.send_task("job", task_id="b0", queue="b")
        neighbour.dq.buffer.replay()
        assert neighbour.dq.buffer.flush(40) == 0
        assert [message.id for message in neighbour.dq.queues["a"].peek()] == ["a0", "a1"]
        assert neighbour.dq.queues["b"].depth == 1
        assert len(neighbour.dq.buffer.quarantine()) == 1


def test_kombus_producer_raises_kombus_error(server: RedisServer, admin: Any) -> None:
    register_transports()
    with Connection(server.url(scheme="dq-redis")) as connection:
        channel: Any = connection.channel()
        producer = Producer(channel)
        producer.publish({}, routing_key="plain", declare=[Queue("plain")])
        with full(admin):
            for retry in (False, True):
                with pytest.raises(OperationalError, match="Redis is full"):
                    producer.publish({}, routing_key="plain", retry=retry, retry_policy={"max_retries": 1})
            # A worker can still declare its queues, because it has to empty the server.
            Queue("news", Exchange("news", type="fanout"))(channel).declare()
        assert channel._size("plain") == 1


if hasattr(Producer, "batch"):  # since kombu 5.7

    def test_a_batch_that_is_refused_or_finds_no_server_raises_kombus_error() -> None:
        register_transports()
        with RedisServer() as server, Connection(server.url(scheme="dq-redis")) as connection:
            channel: Any = connection.channel()
            producer: Any = Producer(channel)
            producer.publish({}, routing_key="plain")
            batch = producer.batch()
            with batch:
                producer.publish({}, routing_key="plain")
                with (
                    redis.Redis(port=server.port) as client,
                    full(client),
                    pytest.raises(OperationalError, match="Redis is full"),
                ):
                    batch.flush()
                server.stop()
                with pytest.raises(OperationalError):
                    batch.flush()
                server.start()
            # The server has lost the first message. A message that a flush did not store stays in the batch.
            assert channel._size("plain") == 1


def test_operators_get_kombus_error(app: Any, admin: Any) -> None:
    app.tasks["plain"].delay(1)
    with full(admin):
        # An operator can still limit a tenant.
        app.dq.quotas.set("celery", "42", rate="5/s")
    begin, remedy = TROUBLES["unable to save"]
    with begin(admin), pytest.raises(BrokerRefused, match=remedy):
        app.dq.quotas.set("celery", "42", rate="5/s")
