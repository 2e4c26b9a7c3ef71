"""Redis users with exactly the rights of the guide: all functions work, and no listed right is unused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import pytest
import redis
from celery import chord
from kombu import Connection, Exchange, Producer, Queue

from celery_dq.beat import ElectedScheduler
from celery_dq.dedup.machine import HeldDedupLock, Verdict
from celery_dq.keys import PartitionKeys, every_evicted
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.metrics.collector import DQCollector
from celery_dq.options import Options
from celery_dq.other_brokers.redis_coordinator import OwnRedis
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.rights import ROLES, Role
from tests.broker_variants.conftest import OpenCeleryApp
from tests.conformance.celery_app import CeleryApp

ROLE = {role.name: role for role in ROLES}
PASSWORD = "secret"
DB = 1
KOMBU = tuple(int(number) for number in version("kombu").split(".")[:2])
#: Listed commands that the installed kombu does not send, because another version does.
OF_OTHER_VERSIONS = {"UNSUBSCRIBE"} if KOMBU >= (5, 7) else {"PUNSUBSCRIBE"}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server with one user per role."""
    with RedisServer() as server:
        with admin(server) as client:
            for role in ROLES:
                rules = role.acl(DB).split()
                client.execute_command("ACL", "SETUSER", role.name, "on", f">{PASSWORD}", *rules)
        yield server


@contextmanager
def admin(server: RedisServer) -> Iterator[Any]:
    with redis.Redis(port=server.port, decode_responses=True) as client:
        yield client


@contextmanager
def only(server: RedisServer, role: Role) -> Iterator[None]:
    """Check that Redis denies nothing in the block, and has seen all commands of `role` at its end."""
    with admin(server) as client:
        client.acl_log_reset()
        client.script_flush()
        client.config_resetstat()
        yield
        denied = {(entry["username"], entry["context"], entry["object"]) for entry in client.acl_log()}
        assert denied == set()
        seen = {name.removeprefix("cmdstat_").upper() for name in client.info("commandstats")}
        # The commands of Celery's result backend depend on the version of Celery.
        assert role.name == "results" or set(role.sent) - seen == set(role.sent) & OF_OTHER_VERSIONS


def url(server: RedisServer, user: str, scheme: str = "dq-redis") -> str:
    return f"{scheme}://{user}:{PASSWORD}@127.0.0.1:{server.port}/{DB}"


@pytest.fixture
def place_of(server: RedisServer, open_celery_app: OpenCeleryApp) -> Callable[[str], CeleryApp]:
    """Return a function that makes an app with the user of a role; all these apps share a queue."""

    def place_of(user: str) -> CeleryApp:
        return open_celery_app(
            url(server, user),
            task_default_queue="rights",
            dq_lease=2,
            dq_buffer_folder="",
            dq_dead_letter_failures=True,
            dq_default_quota={"rate": "500/s", "concurrency": 20},
        )

    return place_of


def publish_one_of_each(place: CeleryApp) -> None:
    """Publish plain, delayed, deduplicated and buffered calls, and one through a topic exchange."""
    place.send("add", 1, 1)
    place.send("add", 1, 1, countdown=0.2, tenant="a")
    for _ in range(2):
        place.send("add", 2, 1, dedup={"key": "{x}"})
    with place.app.dq.buffer.buffered():  # type: ignore[attr-defined]  # after setup
        place.send("add", 3, 1)
    publish_letter(place)


def publish_letter(place: CeleryApp) -> None:
    """Publish through a topic exchange, whose bindings are in Redis."""
    with place.app.connection_for_write() as connection:
        exchange = Exchange("letters", "topic")
        channel: Any = connection.default_channel
        Queue("rights-letters", exchange, routing_key="letters.#")(channel).declare()
        Producer(channel).publish({}, exchange=exchange, routing_key="letters.a")


def test_a_publisher(server: RedisServer, place_of: Callable[[str], CeleryApp]) -> None:
    with only(server, ROLE["publisher"]):
        publish_one_of_each(place_of("publisher"))
    place_of("operator").purge()


def test_a_control(server: RedisServer, place_of: Callable[[str], CeleryApp]) -> None:
    place = place_of("control")
    with only(server, ROLE["control"]):
        publish_one_of_each(place)
        assert place.app.control.ping(timeout=0.1) == []
        place.app.control.revoke("never-published")
        with place.app.connection_for_read() as connection, pytest.raises(TimeoutError):
            place.app.events.Receiver(connection, handlers={}).capture(limit=1, timeout=0.1)
    place_of("operator").purge()


def test_a_worker(server: RedisServer, place_of: Callable[[str], CeleryApp]) -> None:
    caller = place_of("control")
    operator: Any = place_of("operator").app.dq  # type: ignore[attr-defined]  # after setup
    conf = {
        "broker_url": url(server, "worker"),
        "dq_singleton_queues": ["rights-single"],
        "dq_election_session": 2,
    }
    with only(server, ROLE["worker"]):
        publish_one_of_each(caller)
        with caller.worker(arguments=(), queues=["rights", "rights-single"], conf=conf) as worker:
            assert caller.send("retry", "retried", 2).get(timeout=30) == 2
            assert caller.send("add", 4, 1, queue="rights-single").get(timeout=30) == 5
            caller.send("reject", "rejected", False)
            assert caller.ask("ping") == {"ok": "pong"}
            assert "may not use" not in worker.log
            wait_until(lambda: len(operator.dead_letters["rights"]) == 1, 30)
        unsubscribe_on_an_open_connection(server)
        # The commands of a worker after a lost answer, after a change of quotas, and for dedup keys.
        with redis.Redis.from_url(url(server, "worker", "redis")) as client, client.pubsub() as evictions:
            list(client.hscan_iter("dq:{online/rights/0}:held:w"))
            list(client.zscan_iter("dq:{online/rights/0}:throttled"))
            evictions.psubscribe(every_evicted("online"))
            evictions.subscribe(every_evicted("online") + ":own")
            wait_until(lambda: evictions.get_message(timeout=1) and evictions.get_message(timeout=1), 30)


def unsubscribe_on_an_open_connection(server: RedisServer) -> None:
    """Cancel a consumer of broadcasts. A worker that ends closes the connection instead, mostly."""
    broadcasts = Queue("", Exchange("celery.pidbox", type="fanout"), auto_delete=True, exclusive=True)
    with Connection(url(server, "worker")) as connection, admin(server) as client:
        consumer = connection.Consumer(broadcasts, on_message=print)
        before = client.info("commandstats")["cmdstat_psubscribe"]["calls"]
        consumer.consume()
        wait_until(lambda: client.info("commandstats")["cmdstat_psubscribe"]["calls"] > before, 30)
        consumer.cancel()
        wait_until(lambda: "cmdstat_punsubscribe" in client.info("commandstats"), 30)


def test_an_operator(server: RedisServer, place_of: Callable[[str], CeleryApp]) -> None:
    place = place_of("operator")
    dq: Any = place.app.dq  # type: ignore[attr-defined]
    first, *_ = [place_of("publisher").send("add", 1, 1, tenant=tenant).id for tenant in "aabbcc"]
    place_of("publisher").send("add", 1, 1, countdown=100)
    with only(server, ROLE["operator"]):
        queue, quotas, dead, dedup = (
            dq.queues["rights"], dq.quotas, dq.dead_letters["rights"], dq.dedup["rights"]
        )  # fmt: skip
        assert "rights" in list(dq.queues)
        assert queue.depth == 7
        assert len(queue.tenants()) == 3
        assert len(queue.peek()) == 6
        assert len(queue.peek(delayed=True)) == 1
        assert dq.explain(task_id=first).reason == "no-worker"
        scrape = {family.name: family.samples for family in DQCollector(place.app).collect()}
        assert scrape["celery_dq_up"][0].value == scrape["celery_dq_elections_up"][0].value == 1
        assert queue.cancel(first) == "waiting"
        assert queue.cancel_tenant("a") == 1
        assert queue.cancel_task_name("add") == 5
        quotas.set("rights", "a", rate=5)
        quotas.pause("rights", "a")
        quotas.resume("rights", "a")
        quotas.set_default("rights", rate=9)
        quotas.remove_default("rights")
        quotas.remove("rights", "a")
        assert quotas.list("rights") == {}
        assert dead.replay() == 1
        assert dead.purge() == 0
        assert dedup.list() == []
        assert dedup.release("k") is None
        dedup.verdicts()
        assert [each.state for each in dq.leaders("rights")] == ["vacant"]
        dedup.repetition(2)
        assert dq.audit(queue="rights")[0].action == "dead_replayed"
        with dq._broker.open_home("rights") as (_, client):
            entry_id = ""
            for is_unfinished in (True, False):  # the steps of a replay, as the dashboard makes them
                with dq.audit.change(client, "dead_replayed", "rights", continues=entry_id) as change:
                    change.count, change.is_unfinished = 1, is_unfinished
                entry_id = change.entry_id
        assert dq.audit(queue="rights")[0].count == 2
        assert queue.move("rights-other", tenant="") == 1
        assert dq.queues["rights-other"].purge() == 1
        assert place.waiting() == 0
        assert "OK" in place.command("amqp", "queue.delete", "rights-other")


def test_a_beat(server: RedisServer, place_of: Callable[[str], CeleryApp]) -> None:
    place = place_of("beat")
    with only(server, ROLE["beat"]):
        run_beats(place, place_of("operator").app.dq.queues["rights"])  # type: ignore[attr-defined]  # after setup
        publish_letter(place)
        stand_by(server, "beat")
        place.close()


def test_an_election_elsewhere(server: RedisServer, place_of: Callable[[str], CeleryApp]) -> None:
    place = place_of("beat")
    place.app.conf.dq_election = url(server, "election", "redis")
    with only(server, ROLE["election"]):
        run_beats(place, place_of("operator").app.dq.queues["rights"])  # type: ignore[attr-defined]  # after setup
        assert stand_by(server, "election").candidates() == []


def stand_by(server: RedisServer, user: str) -> RedisElection:
    """Wait for a vacancy, as each candidate does except the leader."""
    client = redis.Redis.from_url(url(server, user, "redis"))
    candidate = RedisElection(client, PartitionKeys("online", "q"), "w")
    candidate.wait(0.1)
    return candidate


def run_beats(place: CeleryApp, queue: Any) -> None:
    """Let one of two elected beats send a tick, and close both."""
    app: Any = place.app
    app.conf.beat_schedule = {"tick": {"task": "add", "args": (1, 1), "schedule": 0.05}}
    beats = [ElectedScheduler(app), ElectedScheduler(app)]
    try:
        wait_until(lambda: [beat.tick() for beat in beats] and queue.depth > 0, 30)
    finally:
        for beat in beats:
            beat.close()
        queue.purge()


def test_a_dedup_coordinator(server: RedisServer) -> None:
    coordinator = OwnRedis(url(server, "dedup", "redis"), Options(), "w1")
    with only(server, ROLE["dedup"]):
        assert coordinator.enqueue("q|k", "one").verdict is Verdict.ACCEPT
        token = coordinator.start("q|k", "one")
        assert token is not None
        coordinator.renew([HeldDedupLock("q|k", "one", token)])
        assert coordinator.inspect("q|k") is not None
        assert coordinator.keys("q|") == ["q|k"]
        coordinator.wake()
        assert coordinator.finish("q|k", "one", token)
        assert coordinator.free("q|k") is None
        assert coordinator.verdicts("q") == {"accept": 1}
        with coordinator.new_client().pubsub() as reported:
            reported.subscribe(coordinator.channel)
            wait_until(lambda: reported.get_message(timeout=1), 30)
    coordinator.close()


def test_a_worker_without_the_right_to_info_warns_and_works(
    server: RedisServer, place_of: Callable[[str], CeleryApp]
) -> None:
    with admin(server) as client:
        rules = f"{ROLE['worker'].acl(DB)} -info".split()
        client.execute_command("ACL", "SETUSER", "uninformed", "on", f">{PASSWORD}", *rules)
    place = place_of("uninformed")
    with place.worker("solo") as worker:
        assert place.send("add", 1, 1).get(timeout=30) == 2
        assert worker.log.count("has no right to INFO") == 1


def test_results(server: RedisServer, place_of: Callable[[str], CeleryApp]) -> None:
    place = place_of("worker")
    results = f"redis://results:{PASSWORD}@127.0.0.1:{server.port}/2"
    place.app.conf.update(result_backend=results)
    sums = [place.signature("add", number, 1) for number in range(3)]
    with only(server, ROLE["results"]), place.worker("solo", conf={"result_backend": results}):
        assert chord(sums, place.signature("total"))().get(timeout=30) == 6
        single = place.send("add", 1, 1)
        assert single.get(timeout=30) == 2
        single.forget()


@pytest.mark.logged_error("may not use hdel")
def test_a_worker_whose_scripts_would_be_refused_ends_at_once(
    server: RedisServer, place_of: Callable[[str], CeleryApp]
) -> None:
    with admin(server) as client:
        rules = f"{ROLE['worker'].acl(DB)} -hdel -hscan".split()
        client.execute_command("ACL", "SETUSER", "crippled", "on", f">{PASSWORD}", *rules)
    worker = place_of("crippled").worker("solo").start()
    try:
        assert worker.wait(30) == 1
        assert "may not use hdel (" in worker.log
        assert "rights of role 'worker'" in worker.log
    finally:
        worker.discard()
