"""The messages that are taken over, and those that stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu import Connection

from celery_dq.app.api.migration import CHUNK, MigrationOptions
from celery_dq.errors import ConfigurationError, InvalidRequest
from tests.migration.conftest import Migrate


def send(app: Any, *merchants: str, **options: Any) -> list[str]:
    notify = app.tasks["notify"]
    return [notify.apply_async((name, place), **options).id for place, name in enumerate(merchants)]


def hold(url: str, count: int, queue: str = "push") -> Any:
    """Receive messages, as a stock worker does, and return its connection, which was killed."""
    connection: Any = Connection(url)
    channel = connection.default_channel
    channel.qos.prefetch_count = 0
    for _ in range(count):
        assert channel.basic_get(queue) is not None
    connection.transport.cycle.close()
    channel.qos.restore_at_shutdown = False
    channel.qos._delivered.clear()
    return connection


@contextmanager
def waiting_worker(raw: Any) -> Iterator[None]:
    """A connection that waits for messages, as that of a living worker does."""
    waiting = raw.connection_pool.get_connection()
    waiting.send_command("BRPOP", "other", 30)
    while not is_waiting(raw):
        pass
    yield
    waiting.disconnect()
    while is_waiting(raw):
        pass


def is_waiting(raw: Any) -> bool:
    return any(client["cmd"] == "brpop" for client in raw.client_list())


def waiting_ids(shop: Any, queue: str = "push") -> list[str]:
    return [message.id for message in shop.dq.queues[queue].peek(1000)]


def test_all_messages_are_taken_in_order_with_their_tenants(stock: Any, shop: Any, migrate: Migrate) -> None:
    ids = send(stock, *"abab", "a")
    due = datetime.now(timezone.utc) + timedelta(hours=1)
    (delayed,) = send(stock, "a", eta=due, expires=due + timedelta(hours=1))
    report = migrate()
    assert (report["migrated"], report["left"], report["held_by"]) == (6, [], [])
    push = shop.dq.queues["push"]
    assert [message.id for message in push.peek(10, tenant="a")] == [ids[0], ids[2], ids[4]]
    assert [message.id for message in push.peek(10, tenant="b")] == [ids[1], ids[3]]
    found = push.find(delayed)
    assert (found.state, found.tenant, abs(found.due - due) < timedelta(seconds=1)) == ("delayed", "a", True)
    assert migrate()["queues"] == []


def test_nothing_of_the_migration_stays_in_redis(stock: Any, migrate: Migrate, raw: Any) -> None:
    send(stock, "a")
    migrate()
    assert [key for key in raw.scan_iter() if not key.startswith(b"_kombu.binding")] == []


def test_a_dry_run_reads_all_and_takes_none(stock: Any, shop: Any, migrate: Migrate, raw: Any) -> None:
    send(stock, "a", "b")
    raw.rpush("push", b"rubbish \xff")
    report = migrate("--dry-run", status=1)
    assert (report["found"], report["migrated"], raw.llen("push")) == (2, 0, 3)
    assert [(left["place"], left["reason"][:14]) for left in report["left"]] == [("push", "it is not JSON")]


def edited(raw: Any, change: Any) -> None:
    """Change the newest message of the list."""
    message = json.loads(raw.lpop("push"))
    change(message)
    raw.lpush("push", json.dumps(message))


DEDUP = {"key": "k", "timeout": 1, "policy": "reject", "waiting": False}
BROKEN: list[tuple[Any, str]] = [
    (lambda message: message.pop("headers"), "not a message of kombu"),
    (lambda message: message.update(body="%"), "not base64"),
    (lambda message: message.update(body="bm90IGpzb24="), "cannot be decoded"),
    (lambda message: message.update({"content-type": "application/x-python-serialize"}), "accept_content"),
    (lambda message: message["headers"].update(eta="soon"), "eta = 'soon' is not a time"),
    (lambda message: message["headers"].update(dq_claim=5), "dedup header"),
    (lambda message: message["headers"].update(id="x" * 201), "at most 200 bytes"),
    (lambda message: message["properties"].update(tenant="\n"), "tenant"),
    (lambda message: message["properties"].update(x={"__type__": "decimal", "__value__": "x"}), "not JSON"),
    (lambda message: message["properties"].update(x={"__type__": "bytes", "__value__": 5}), "not JSON"),
    (lambda message: message["headers"].update(dq_claim=DEDUP | {"timeout": 1e400}), "dedup header"),
    (lambda message: message["headers"].update(dq_claim=DEDUP | {"key": "\ud800"}), "dedup header"),
]


def test_a_message_that_is_not_understood_stays_in_its_place(
    stock: Any, shop: Any, migrate: Migrate, raw: Any
) -> None:
    expected = []
    for change, _ in BROKEN:
        send(stock, "a")
        edited(raw, change)
        expected.append(raw.lindex("push", 0))
        send(stock, "a")
    report = migrate(status=1)
    assert (report["migrated"], report["queues"][0]["left"]) == (len(BROKEN), len(BROKEN))
    for (_, words), left in zip(BROKEN, report["left"], strict=True):
        assert words in left["reason"]
    assert raw.lrange("push", 0, -1) == expected[::-1]
    assert migrate("--dry-run", status=1)["found"] == 0


def test_equal_messages_that_are_not_understood_hide_no_other(
    stock: Any, shop: Any, migrate: Migrate, raw: Any
) -> None:
    send(stock, "a")
    raw.rpush("push", *[b"rubbish"] * (CHUNK + 1))
    report = migrate(status=1)
    assert (report["migrated"], len(report["left"]), raw.llen("push")) == (1, CHUNK + 1, CHUNK + 1)


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_a_priority_that_is_no_finite_number(
    stock: Any, shop: Any, migrate: Migrate, raw: Any, number: str
) -> None:
    send(stock, "a")
    edited(raw, lambda message: message["properties"].update(priority=float(number)))
    assert migrate()["migrated"] == 1


def test_a_queue_whose_name_is_not_utf8_stays(stock: Any, migrate: Migrate, raw: Any) -> None:
    send(stock, "a")
    raw.sadd("_kombu.binding.other", b"other\x06\x16\x06\x16\xff")
    raw.lpush(b"\xff", raw.lindex("push", 0))
    report = migrate(status=1)
    assert [each["place"] for each in report["left"]] == [r"\xff"]
    assert (report["migrated"], raw.llen(b"\xff")) == (1, 1)


def test_messages_of_dead_workers_are_taken(stock: Any, shop: Any, migrate: Migrate, raw: Any) -> None:
    ids = send(stock, "a", "b", "c")
    held = hold(stock.conf.broker_url, 2)
    raw.hset("unacked", "foreign", "[]")
    report = migrate(status=1)
    assert (report["migrated"], [left["place"] for left in report["left"]]) == (3, ["unacked foreign"])
    assert sorted(waiting_ids(shop)) == sorted(ids)
    assert (raw.hkeys("unacked"), raw.zcard("unacked_index")) == ([b"foreign"], 0)
    held.release()


def test_messages_of_a_live_worker_stay_unless_they_are_asked_for(
    stock: Any, shop: Any, migrate: Migrate, raw: Any
) -> None:
    send(stock, "a", "b", "c")
    held = hold(stock.conf.broker_url, 2)
    with waiting_worker(raw):
        report = migrate(status=1)
        assert (report["migrated"], raw.hlen("unacked"), len(report["held_by"])) == (1, 2, 1)
        assert migrate("--take-unacked")["migrated"] == 2
    held.release()


def test_priorities_are_asked_for_and_inverted(
    stock: Any, shop: Any, redis_url: str, migrate: Migrate
) -> None:
    low, urgent, middle = (send(stock, "a", priority=priority)[0] for priority in (9, 0, 6))
    assert "--priorities inverted" in migrate(status=1)["error"]
    report = migrate("--dry-run")
    assert (report["found"], report["undecided"], report["migrated"]) == (3, ["push"], 0)
    assert migrate("--dry-run", "--priorities", "same")["undecided"] == []
    with shop.dq.migration(redis_url, None, MigrationOptions()) as migration:
        migration.survey(read=True)
        with pytest.raises(InvalidRequest, match="--priorities inverted"):
            migration.run()
    assert migrate("--priorities", "inverted")["migrated"] == 3
    assert waiting_ids(shop) == [urgent, middle, low]
    assert [message.priority for message in shop.dq.queues["push"].peek(3)] == [9, 3, 0]


PLACES = ["the list of priority 0", "unacked", "staged"]


@pytest.mark.parametrize("place", PLACES)
def test_priorities_are_asked_for_wherever_their_messages_are(
    stock: Any, shop: Any, redis_url: str, migrate: Migrate, place: str
) -> None:
    # With kombu's steps, the list of priority 0 has those of 1 and 2, too.
    priority = 2 if place == PLACES[0] else 9
    urgent, low = send(stock, "a") + send(stock, "a", priority=priority)
    if place == "unacked":
        hold(redis_url, 2).release()
    elif place == "staged":
        with shop.dq.migration(redis_url, None, MigrationOptions(priorities="inverted")) as migration:
            migration.survey(read=False)
            migration._send_staged = lambda *_: None  # the process is killed here
            migration.run()
    assert "--priorities inverted" in migrate(status=1)["error"]
    report = migrate("--dry-run")
    assert (report["found"], report["undecided"]) == (2, ["push"])
    assert migrate("--priorities", "inverted")["migrated"] == 2
    assert waiting_ids(shop) == [urgent, low]


def test_a_priority_that_comes_during_a_run_ends_the_run(
    stock: Any, shop: Any, redis_url: str, migrate: Migrate
) -> None:
    ids = send(stock, "a")
    with shop.dq.migration(redis_url) as migration:
        migration.survey(read=False)
        ids += send(stock, "a", priority=9)
        with pytest.raises(InvalidRequest, match="--priorities inverted"):
            migration.run()
    assert migrate("--priorities", "same")["migrated"] == 1
    assert sorted(waiting_ids(shop)) == sorted(ids)


def test_only_the_priorities_of_the_named_queues_are_asked_for(
    stock: Any, shop: Any, redis_url: str, migrate: Migrate
) -> None:
    send(stock, "a", queue="mail")
    send(stock, "a", priority=9)
    hold(redis_url, 1).release()
    send(stock, "a", priority=9)
    assert migrate("--queues", "mail")["migrated"] == 1


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_run_reports_the_messages_that_a_worker_has_taken_since_the_survey(
    stock: Any, shop: Any, redis_url: str, raw: Any, migrate: Migrate, is_alive: bool
) -> None:
    send(stock, "a", "b")
    dead = hold(redis_url, 1)
    with shop.dq.migration(redis_url) as migration, ExitStack() as stack:
        migration.survey(read=False)
        held = hold(redis_url, 1)
        if is_alive:
            stack.enter_context(waiting_worker(raw))
        report = migration.run()
    reasons = [each.reason for each in report.left]
    assert (report.migrated, report.is_complete, len(report.held_by)) == (1, False, int(is_alive))
    assert reasons == ([] if is_alive else ["1 have come since: run it again"])
    assert migrate()["migrated"] == 1
    held.release()
    dead.release()


def test_a_run_reports_a_queue_that_was_empty_at_the_survey(
    stock: Any, shop: Any, redis_url: str, migrate: Migrate
) -> None:
    send(stock, "a")
    with shop.dq.migration(redis_url) as migration:
        migration.survey(read=False)
        send(stock, "b", queue="mail")
        report = migration.run()
    left = [(each.queue, each.reason) for each in report.left]
    assert (report.migrated, left) == (1, [("mail", "1 have come since: run it again")])
    assert migrate()["migrated"] == 1


def test_the_report_of_a_run_after_a_survey_names_each_message_that_stays_once(
    stock: Any, shop: Any, redis_url: str, raw: Any
) -> None:
    send(stock, "a")
    raw.lpush("push", "noise")
    raw.sadd("_kombu.binding.other", b"other\x06\x16\x06\x16\xff")
    raw.lpush(b"\xff", "noise")
    raw.hset("unacked", "foreign", "[]")
    with shop.dq.migration(redis_url) as migration:
        assert len(migration.survey(read=True).left) == 3
        report = migration.run()
    assert sorted(each.place for each in report.left) == ["\\xff", "push", "unacked foreign"]
    assert (report.migrated, report.queues[0].left) == (1, 1)


def test_other_queues_other_names(stock: Any, shop: Any, migrate: Migrate, raw: Any) -> None:
    stock.conf.broker_transport_options = {
        "global_keyprefix": "shop:",
        "sep": ":",
        "priority_steps": [0, 5],
        "unacked_key": "taken",
    }
    send(stock, "a", queue="mail", priority=7)
    send(stock, "a", queue="cache")
    options = ("--stock-options", json.dumps(stock.conf.broker_transport_options), "--priorities", "same")
    assert raw.llen("shop:mail:5") == 1
    assert migrate("--queues", "mail", *options)["migrated"] == 1
    assert shop.dq.queues["mail"].peek(1)[0].priority == 7
    assert raw.llen("shop:cache") == 1
    assert "'mial'" in migrate("--queues", "mial", *options, status=1)["error"]
    assert migrate(*options)["migrated"] == 1


def test_a_dedup_key_goes_along(stock: Any, shop: Any, migrate: Migrate) -> None:
    asked = {"key": "k", "timeout": 60.0, "policy": "decline", "waiting": 0}
    first, second = send(stock, "a", "a", headers={"dq_claim": asked})
    assert migrate()["migrated"] == 2
    (lock,) = shop.dq.dedup["push"].list()
    assert lock.key == "k"
    # The second call gets the result of the first.
    assert [shop.dq.queues["push"].find(each).state for each in (first, second)] == ["waiting", "following"]


def test_an_interrupted_migration_has_one_target(
    stock: Any, shop: Any, migrate: Migrate, raw: Any, redis_url: str
) -> None:
    send(stock, "a")
    with shop.dq.migration(redis_url) as migration:
        migration.survey(read=False)
        producer = migration._stock.begin("another")
        assert migration._stock.stage("push", "push", raw.lrange("push", 0, -1)) == 1
        assert producer.startswith("migration:")
        with pytest.raises(ConfigurationError, match="A migration to another was interrupted"):
            migration.run()


def test_a_migration_that_another_one_has_overtaken_takes_nothing_more(
    stock: Any, shop: Any, migrate: Migrate, redis_url: str
) -> None:
    ids = send(stock, "a", "b")
    with shop.dq.migration(redis_url) as migration, shop.dq.migration(redis_url) as other:
        migration.survey(read=False)
        other.survey(read=False)

        def overtaken(done: int) -> None:
            other.run()
            if len(ids) < 4:  # a migration that goes on would never see an empty list
                ids.extend(send(stock, "c", "d"))

        with pytest.raises(InvalidRequest, match="Another process has completed this migration"):
            migration.run(overtaken)
    assert migrate()["migrated"] == 2
    assert sorted(waiting_ids(shop)) == sorted(ids)


def test_an_interrupt_leaves_a_migration_that_the_next_run_completes(
    stock: Any, shop: Any, migrate: Migrate, redis_url: str
) -> None:
    send(stock, "a", "b")
    send(stock, "c", queue="mail")

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with shop.dq.migration(redis_url) as migration:
        migration.survey(read=False)
        with pytest.raises(KeyboardInterrupt):
            migration.run(interrupt)
    (entry,) = shop.dq.audit()
    assert (entry.count, "interrupted; at least 1" in entry.details) == (1, True)
    assert migrate()["migrated"] == 2
    assert len(waiting_ids(shop)) + len(waiting_ids(shop, "mail")) == 3


def test_the_audit_names_the_source_without_its_password(stock: Any, shop: Any, migrate: Migrate) -> None:
    send(stock, "a", "b")
    migrate()
    (entry,) = shop.dq.audit()
    assert (entry.action, entry.queue, entry.count, entry.door) == ("migrated", "push", 2, "celery dq")
    assert entry.details.startswith("redis://")


@pytest.mark.parametrize(("source", "words"), [("memory://", "leads from"), ("dq-redis://x", "leads from")])
def test_other_brokers_are_refused(shop: Any, source: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words), shop.dq.migration(source):
        pass


def test_an_unacknowledged_message_that_leads_to_two_queues_stays(
    stock: Any, shop: Any, migrate: Migrate, raw: Any
) -> None:
    """Its worker had it from one of them, and nothing tells from which."""
    send(stock, "a")
    held = hold(stock.conf.broker_url, 1)
    ((tag, value),) = raw.hgetall("unacked").items()
    message, exchange, routing_key = json.loads(value)
    for queue in ("push", "copies"):
        raw.sadd("_kombu.binding.fan", f"{routing_key}\x06\x16\x06\x16{queue}")
    raw.hset("unacked", tag, json.dumps([message, "fan", routing_key]))
    report = migrate(status=1)
    assert [report["migrated"], *(left["reason"] for left in report["left"])] == [
        0, f"exchange 'fan' with routing key {routing_key!r} leads to 2 queues",
    ]  # fmt: skip
    assert (exchange, raw.hkeys("unacked"), waiting_ids(shop)) == ("", [tag], [])
    held.release()
