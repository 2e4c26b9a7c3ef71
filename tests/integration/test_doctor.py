"""``celery dq doctor`` on faulty set-ups: each fault is found, named, and has a remedy."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection

import celery_dq
from celery_dq.app.checks import server_checks
from celery_dq.app.checks.doctor import check_server, check_settings, read_status
from celery_dq.app.checks.finding import Finding
from celery_dq.clock import SystemClock
from celery_dq.compat.guard import READ_VERSIONS
from celery_dq.dedup import dedup
from celery_dq.errors import ConfigurationError
from celery_dq.options import Options
from celery_dq.testing.redis_cluster import ClusterNode
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.transport.redis.store.rights import ROLES, Role, denied_commands
from tests.apps import without_shared_tasks
from tests.dq_command import run_dq
from tests.integration.shop import claim
from tests.workers import WorkerProcess

MakeApp = Callable[..., Any]
#: An address on which no server listens.
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    """A function that returns an app with a task. Its arguments are the settings."""
    made = []

    def make_app(broker: str, **conf: Any) -> Any:
        app = Celery("ill", broker=broker, set_as_current=False)
        app.conf.update(task_publish_retry_policy={"max_retries": 0}, **conf)
        celery_dq.setup(app)
        without_shared_tasks(app)
        made.append(app)
        return app

    yield make_app
    for app in made:
        with suppress(ConfigurationError):
            producers: Any = app.pool
            producers.force_close_all()
        app.close()


def work(merchant: str) -> None:
    """A task."""


def notify(merchant: str) -> None:
    """A task that no test gives a dedup key."""


def faults(found: list[Finding]) -> dict[str, str]:
    """The problems by code. Checks that every error and warning has a remedy."""
    assert [each for each in found if each.level != "ok" and not (each.remedy or each.code == "W013")] == []
    return {each.code: f"{each.problem} {each.remedy}" for each in found if each.level != "ok"}


ZOOKEEPER = f"dq-zookeeper://{NOWHERE}/shop"


#: A wrong URL, and a part of the finding E002.
WRONG_URLS = [
    ("dq_redis://localhost/0", "did you mean dq-redis://?"),
    ("dq-redsi://localhost/0", "did you mean dq-redis://?"),
    ("redis://localhost;dq_redis://localhost/0", "underscore"),
    (
        "dq-redis://localhost/0?socket_timeout=3",
        "option 'socket_timeout': set broker_transport_options = {'socket_timeout': …}",
    ),
    ("dq-redis://localhost?heartbeat=10", "option 'heartbeat': it has no effect on Redis"),
    ("dq-redis://localhost?connect_timeout=3", "= {'socket_connect_timeout': …}"),
    (
        "dq-redis://localhost?socket_timout=3",
        "did you mean socket_timeout? Then set broker_transport_options = {'socket_timeout': …}",
    ),
    ("dq-redis://localhost?visibility_timeout=30", "leases of dq_lease instead; remove it"),
    ("dq-redis://localhost;dq-redis://other/0?foo=1", "option 'foo': known are credential_"),
    ("dq-rediss://localhost/0?ssl_ca_cert=/x.pem", "option 'ssl_ca_cert': did you mean ssl_ca_certs"),
    ("dq-rediss://localhost?ssl_cert_reqs=all", "ssl_cert_reqs = 'all': give required,"),
    ("dq-redis+socket:///tmp/x?database=3", "option 'database': known are credential_provider, db,"),
]


@pytest.mark.parametrize(
    ("broker", "conf", "code", "words"),
    [
        *((broker, {}, "E002", words) for broker, words in WRONG_URLS),
        ("redis://localhost/0", {}, "W002", "dq-redis://host"),
        (
            "redis://localhost/0",
            {"dq_default_quota": {"rate": 5}},
            "W005",
            "dq_default_quota is not enforced",
        ),
        ("amqp://localhost", {"dq_queues": {"push": {"rate": 5}}}, "W005", "quota of queue 'push'"),
        ("redis://localhost/0", {"dq_singleton_queues": ["ledger"]}, "E006", "'ledger'"),
        (ZOOKEEPER, {"dq_singleton_queues": ["ledger"]}, "E006", "Set dq_election"),
        ("dq-redis://localhost/0", {"dq_buffer_folder": "/proc/here"}, "E008", "/proc/here"),
        ("dq-redis://localhost/0", {"dq_buffer_folder": "/dev/null/x"}, "E008", "/dev/null"),
        ("dq-redis://localhost/0", {"dq_leese": 5}, "E001", "dq_lease"),
        ("memory://", {"dq_dedup_url": "redis://localhost:port/0"}, "E001", "dq_dedup_url cannot be read"),
        *(
            (broker, {"broker_transport_options": {"global_keyprefix": "shop"}}, "E033", "dq_key_prefix")
            for broker in ("dq-redis://localhost/0", ZOOKEEPER)
        ),
    ],
)
def test_settings(make_app: MakeApp, broker: str, conf: dict[str, Any], code: str, words: str) -> None:
    found = faults(check_settings(make_app(broker, **conf)))
    assert words in found[code]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("import missing_pandas", "ModuleNotFoundError: No module named 'missing_pandas'."),
        ("import os; os.environ['MISSING_URL']", "KeyError: 'MISSING_URL'."),
        ("def", "SyntaxError: invalid syntax (ill_tasks.py, line 1)."),
    ],
)
def test_tasks_that_cannot_be_imported(
    make_app: MakeApp,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    words: str,
) -> None:
    (tmp_path / "ill_tasks.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    app = make_app(redis_url.replace("redis://", "dq-redis://", 1), imports=["ill_tasks"])
    error = f"ERROR   The tasks of the app cannot be imported: {words} No worker can start: "
    doctor = run_dq(app, "doctor", status=1).output
    assert error in doctor
    assert doctor.count("ERROR") == doctor.count("(E040)") == 1
    assert "OK      " in doctor, "the other checks follow"
    status = run_dq(app, "status", status=2).output
    assert error in status
    assert status.startswith("Broker dq-redis://")


@pytest.mark.parametrize("broker", ["dq-redis://localhost/0", ZOOKEEPER, "dq-rediss://localhost/0"])
def test_our_own_schemes_are_well(make_app: MakeApp, broker: str) -> None:
    assert faults(check_settings(make_app(broker))) == {}


@pytest.mark.parametrize(
    ("broker", "conf", "library", "extra"),
    [
        (ZOOKEEPER, {}, "kazoo", "zookeeper"),
        ("redis://", {"dq_election": "zookeeper://zk"}, "kazoo", "zookeeper"),
        ("dq-redis://localhost/0", {"dq_otel": True}, "opentelemetry.trace", "otel"),
        ("dq-redis://localhost/0", {"dq_metrics_port": 9000}, "prometheus_client", "metrics"),
    ],
)
def test_a_missing_library(
    make_app: MakeApp,
    broker: str,
    conf: dict[str, Any],
    library: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert f"celery-dq[{extra}]" in faults(check_settings(make_app(broker, **conf)))["E004"]
    assert "E004" not in faults(check_settings(make_app("dq-redis://localhost/0")))


def test_a_release_that_was_not_read(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app("redis://localhost/0")
    assert "W017" not in faults(check_settings(app))
    monkeypatch.setitem(READ_VERSIONS, "kombu", ((4, 0), (4, 6)))
    text = faults(check_settings(app))["W017"]
    assert f"kombu {version('kombu')}" in text
    assert "4.0 to 4.6" in text


@pytest.mark.parametrize(
    "wrong", [lambda args: "a", lambda: "a", lambda args, kwargs, more: "a", lambda *, tenant: tenant]
)
def test_a_tenant_callable_of_the_wrong_arity(make_app: MakeApp, wrong: Any) -> None:
    app = make_app("dq-redis://localhost/0")
    app.task(shared=False, name="notify", tenant=wrong)(work)
    text = faults(check_settings(app))["E003"]
    assert "task notify" in text
    assert "(args, kwargs)" in text


def test_a_dedup_key_that_names_no_argument(make_app: MakeApp) -> None:
    app = make_app("dq-redis://localhost/0")
    app.task(shared=False, name="refresh")(dedup(key="{nope}")(work))
    text = faults(check_settings(app))["E018"]
    assert "refresh" in text
    assert "nope" in text


def test_the_tenants_of_tasks_on_a_broker_without(make_app: MakeApp) -> None:
    app = make_app("redis://localhost/0")
    app.task(shared=False, name="notify", tenant="{merchant}")(work)
    assert "the tenant of task 'notify' is ignored" in faults(check_settings(app))["W005"]


@pytest.mark.parametrize(
    ("option", "meant"),
    [("tenat", "tenant"), ("tenent", "tenant"), ("dedupe", "dedup"), ("bufferd", "buffered")],
)
def test_a_misspelt_option_of_a_task(make_app: MakeApp, option: str, meant: str) -> None:
    app = make_app("dq-redis://localhost/0")
    app.task(shared=False, name="notify", **{option: True})(notify)
    found = faults(check_settings(app))
    assert found.keys() == {"W034"}
    assert f"Task 'notify' has the option {option!r}, which" in found["W034"]
    assert f"did you mean {meant!r}?" in found["W034"]


def test_other_attributes_of_a_task(make_app: MakeApp) -> None:
    app = make_app("dq-redis://localhost/0")
    options = {"tenant_id": 1, "debug": True, "setup": True, "dedup": True, "buffered": True, "tenant": "a"}
    app.task(shared=False, name="notify", **options)(notify)
    assert faults(check_settings(app)) == {}


def test_dedup_without_a_redis(make_app: MakeApp) -> None:
    app = make_app("amqp://localhost")
    app.task(shared=False, name="refresh")(dedup(key="{merchant}")(work))
    assert "dq_dedup_url" in faults(check_settings(app))["E007"]


@pytest.mark.parametrize(
    ("broker", "conf", "code", "words"),
    [
        (f"dq-redis://{NOWHERE}/0", {}, "E011", "Start it"),
        (f"redis://{NOWHERE}/0", {}, "E011", "Start it"),
        (ZOOKEEPER, {}, "E011", "127.0.0.1:1"),
        ("memory://", {"dq_dedup_url": f"redis://{NOWHERE}/0"}, "E016", "dq_dedup_url"),
        ("memory://", {"dq_election": f"redis://{NOWHERE}/0"}, "E017", "dq_election"),
        ("memory://", {"dq_election": f"zookeeper://{NOWHERE}"}, "E017", "dq_election"),
    ],
)
def test_servers_that_do_not_answer(
    make_app: MakeApp, broker: str, conf: dict[str, Any], code: str, words: str
) -> None:
    app = make_app(broker, **conf)
    found = faults(check_server(app))
    assert words in found[code]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("database", "words"), [("banana", "broker_url cannot be used"), ("99", "The database in broker_url")]
)
def test_a_database_that_does_not_exist(
    make_app: MakeApp, broker_url: str, database: str, words: str
) -> None:
    app = make_app(f"{broker_url.rpartition('/')[0]}/{database}")
    assert words in faults(check_server(app))["E002"]
    assert words in faults(list(read_status(app).findings))["E002"]
    assert run_dq(app, "doctor", status=1).output.count(words) == 1


@pytest.mark.parametrize(
    ("broker", "conf"),
    [
        ("dq_redis://localhost/0", {}),
        ("dq-redis://localhost?heartbeat=10", {}),
        ("dq-redis://", {"dq_leese": 5}),
    ],
)
def test_the_checks_of_the_server_repeat_no_fault_of_the_settings(
    make_app: MakeApp, broker: str, conf: dict[str, Any]
) -> None:
    assert check_server(make_app(broker, **conf)) == []


def test_a_server_that_does_not_answer_in_tls(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_checks, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        app = make_app(f"dq-rediss://127.0.0.1:{hung.getsockname()[1]}/0")
        began = time.monotonic()
        found = faults(check_server(app))
    assert "must serve TLS, for which dq-rediss:// asks" in found["E011"]
    assert time.monotonic() - began < 10  # the timeout of a connection is longer


@pytest.mark.parametrize(("session", "words"), [("3s", "after 4 s, not after the 3 s"), ("9s", "")])
def test_a_session_outside_of_the_bounds_of_zookeeper(make_app: MakeApp, session: str, words: str) -> None:
    with ZooKeeperServer(tick_ms=2_000) as server:  # no session is shorter than two ticks
        app = make_app("memory://", dq_election=f"zookeeper://{server.hosts}", dq_election_session=session)
        found = faults(check_server(app))
    assert words in found.get("W033", "")
    assert bool(words) == ("W033" in found)


def test_messages_of_the_stock_transport(make_app: MakeApp, redis_url: str, broker_url: str) -> None:
    app = make_app(broker_url, task_default_queue="push")
    assert "W015" not in faults(check_server(app))
    with Connection(redis_url) as stock:
        for priority in (0, 9):
            stock.SimpleQueue("push").put("x", priority=priority)
    assert "2 in queue 'push'" in faults(check_server(app))["W015"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A server with one user per role, and users that lack a right."""
    with RedisServer() as server:
        with redis.Redis(port=server.port) as client:
            for role in ROLES:
                client.execute_command("ACL", "SETUSER", role.name, "on", ">pw", *role.acl().split())
            for name, base, lacks in (
                ("no-info", "worker", "-info"),
                ("no-hscan", "worker", "-hscan"),
                ("no-hset", "worker", "-hset"),
                ("no-scripts", "worker", "-eval -evalsha"),
                ("other-keys", "worker", "resetkeys ~other:* ~_kombu.*"),
            ):
                rules = next(role.acl() for role in ROLES if role.name == base)
                client.execute_command("ACL", "SETUSER", name, "on", ">pw", *rules.split(), *lacks.split())
        yield server


@pytest.mark.parametrize(
    ("user", "code", "words"),
    [
        ("worker", "", ""),
        ("publisher", "W014", "a worker sends"),
        ("no-info", "W013", "Grant +info"),
        ("no-hscan", "W014", "Grant +hscan on"),
        ("no-hset", "E014", "a publisher sends: hset ("),
        ("no-scripts", "E014", "Grant +eval +evalsha on"),
        ("other-keys", "E014", "the keys"),
    ],
)
def test_rights_of_the_redis_user(
    make_app: MakeApp, guarded: RedisServer, user: str, code: str, words: str
) -> None:
    found = faults(check_server(make_app(f"dq-redis://{user}:pw@127.0.0.1:{guarded.port}/0")))
    assert words in found.pop(code, "")
    assert set(found) == ({"W012"} if code != "W013" else set())


EVICTING = {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}


@pytest.mark.parametrize(
    ("login", "database", "kind", "words"),
    [
        ("", 0, partial(RedisServer, config=EVICTING), "maxmemory-policy 'allkeys-lru'"),
        ("", 0, partial(ClusterNode, {}), "write dq-rediscluster://host:port"),
        ("", 99, RedisServer, "The database in broker_url does not exist"),
        ("no-scripts:pw@", 0, None, "user of broker_url lacks a right: grant it"),
    ],
    ids=["evicts", "cluster", "database", "rights"],
)
@pytest.mark.logged_error("The worker ends:")
def test_a_worker_that_refuses_its_broker_ends_with_the_sentence(
    guarded: RedisServer, login: str, database: int, kind: Callable[[], RedisServer] | None, words: str
) -> None:
    with contextlib.ExitStack() as stack:
        server = guarded if kind is None else stack.enter_context(kind())
        conf = {"broker_url": f"dq-redis://{login}127.0.0.1:{server.port}/{database}"}
        worker = WorkerProcess("tests.migration.worker_app", broker=None, conf=conf, preloaded=True).start()
        stack.callback(worker.discard)
        assert worker.wait() == 1
        assert words in worker.log
        assert "Traceback" not in worker.log
        assert len([line for line in worker.log.splitlines() if "CRITICAL" in line]) == 1


@pytest.mark.parametrize("login", ["", ":wrong@", "worker:wrong@"])
def test_a_wrong_password_is_named(make_app: MakeApp, login: str) -> None:
    with RedisServer(config={"requirepass": "secret"}) as server:
        place = f"{login}127.0.0.1:{server.port}/0"
        app = make_app(f"dq-redis://{place}", dq_election=f"redis://{place}", dq_dedup_url=f"redis://{place}")
        found = faults(check_server(app))
        printed = run_dq(app, "queues", status=None).output
    assert "Redis refuses the user or the password of broker_url (" in found["E011"]
    assert "the user and the password in dq_election" in found["E017"]
    assert printed.startswith("Error: Redis refuses the user or the password of broker_url (")
    assert not any("Start it" in each for each in (*found.values(), printed))


@pytest.mark.parametrize("role", [role for role in ROLES if role.name in ("publisher", "worker")])
def test_every_missing_right_is_found(guarded: RedisServer, role: Role) -> None:
    with redis.Redis(port=guarded.port) as client:
        client.execute_command("ACL", "SETUSER", "nothing", "on", ">pw", "allkeys", "allchannels", "+multi")
    with redis.Redis(port=guarded.port, username="nothing", password="pw") as client:
        denied = denied_commands(client.connection_pool, role, Options())
    assert {each.upper() for each in denied} == {*role.commands} - {"EXEC", "INFO", "MULTI"}


def test_the_clock_of_this_machine(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "W027" not in faults(check_server(shop))
    for ahead_s, words in ((5.0, "5.0 s ahead of"), (-5.0, "5.0 s behind")):
        monkeypatch.setattr(SystemClock, "wall", staticmethod(lambda: time.time() + ahead_s))  # noqa: B023
        assert (
            f"The clock of this machine is {words} the clock of the server"
            in faults(check_server(shop))["W027"]
        )


def test_fields_that_another_program_has_written(shop: Any) -> None:
    with shop.dq._broker.open_home("push") as (partition, client):
        for task_id in ("a", "b"):
            shop.send_task("shop.tasks.notify", queue="push", task_id=task_id, tenant=task_id)
        assert not {"W038", "E039"} & set(faults(check_server(shop)))
        client.hset(partition.keys.state, "seq", "rubbish")
        client.hset(partition.keys.single, "a", "rubbish")
        assert claim(shop, 2)[0].id == "b"
        shop.send_task("shop.tasks.notify", queue="push", task_id="c")
        found = faults(check_server(shop))["W038"]
        assert "2 fields of queue 'push' could not be read" in found
        assert "set aside: state|seq, waiting|a." in found
        letters = shop.dq.dead_letters["push"]
        assert letters.recover(dry_run=True) == 1
        assert "W038" in faults(check_server(shop))
        assert letters.recover() == 1
        assert "W038" not in faults(check_server(shop))
        assert [(each.id, each.reason, each.tenant) for each in letters.list()] == [("a", "recovered", "a")]
        assert letters.replay("a") == 1
        assert {each.id for each in claim(shop, 5)} == {"a", "c"}
        client.hset(partition.keys.state, "epoch", "rubbish")
        assert "The fencing token of queue 'push' is 'rubbish'" in faults(check_server(shop))["E039"]


def test_too_few_replicas(broker_url: str, make_app: MakeApp) -> None:
    app = make_app(broker_url, dq_confirm_replicas=1)
    assert "dq_confirm_replicas = 1, and 0 replicas are connected" in faults(check_server(app))["E028"]


def test_the_folder_of_the_buffer(make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = {"dq_buffer_folder": str(tmp_path), "dq_buffer_max_spill_bytes": 1 << 60}
    text = faults(check_settings(make_app("dq-redis://localhost/0", **conf)))["W029"]
    assert "dq_buffer_max_spill_bytes is 1,152,921,504,606,846,976" in text
    found = faults(check_settings(make_app("dq-redis://localhost/0", dq_buffer_folder="/dev/shm/shop")))
    assert "is on tmpfs, which is in memory" in found["W030"]


def test_watching_shows_new_and_solved_problems(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(("appear", "stay", "vanish", "end"))

    def act(seconds: float) -> None:
        step = next(steps)
        if step == "end":
            raise KeyboardInterrupt
        with shop.dq._broker.channel() as channel:
            if step == "appear":
                channel.queue_declare("pusch")
            elif step == "vanish":
                shop.dq.queues["pusch"].forget()

    monkeypatch.setattr(time, "sleep", act)
    result = run_dq(shop, "doctor --watch")
    changes = [line.split(" ", 2)[1:] for line in result.output.splitlines() if line[:2] == "20"]
    assert [(sign, "'pusch'" in text) for sign, text in changes] == [("+", True), ("-", True)]


def test_watching_goes_on_through_an_outage(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as server:
        steps = iter((server.kill, server.start))
        sleep = time.sleep

        def act(seconds: float) -> None:
            if seconds != 30:  # the start of the server waits, too
                sleep(seconds)
                return
            step = next(steps, None)
            if step is None:
                raise KeyboardInterrupt
            step()

        monkeypatch.setattr(time, "sleep", act)
        result = run_dq(make_app(server.url(scheme="dq-redis")), "doctor --watch")
    changes = [line.split(" ", 2)[1:] for line in result.output.splitlines() if line.endswith("(E011)")]
    assert [sign for sign, _ in changes] == ["+", "-"], result.output
