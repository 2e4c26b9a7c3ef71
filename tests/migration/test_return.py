"""The way back: from the tenant broker to kombu's Redis transport."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dq.app.api.migration import MigrationOptions
from celery_dq.dedup.rule import dedup
from celery_dq.errors import InvalidRequest
from celery_dq.migration.tenant_source import TenantSource
from tests.dq_command import run_dq
from tests.integration.partitioned_shop import killed
from tests.migration.conftest import Migrate, migration_of
from tests.migration.test_migrate import send


@pytest.fixture
def migrate_back(shop: Any, redis_url: str) -> Migrate:
    """A migration to the stock broker."""
    return migration_of(shop, shop.conf.broker_url, redis_url)


def receive_all(stock: Any, queue: str = "push") -> list[Any]:
    """Receive all messages of a queue as kombu does, in order."""
    with stock.connection_for_read() as connection:
        channel = connection.default_channel
        found = []
        while (message := channel.basic_get(queue)) is not None:
            found.append(message)
            message.ack()
        return found


def ids_of(messages: list[Any]) -> list[str]:
    return [message.headers["id"] for message in messages]


def test_messages_come_back_in_order_in_the_form_of_kombu(
    stock: Any, shop: Any, migrate_back: Migrate, raw: Any
) -> None:
    ids = send(shop, *"aab", "a", priority=0)
    due = datetime.now(timezone.utc) + timedelta(hours=1)
    (delayed,) = send(shop, "a", eta=due, expires=due + timedelta(hours=1))
    report = migrate_back()
    assert (report["migrated"], report["left"], report["held_by"]) == (5, [], [])
    found = {message.headers["id"]: message for message in receive_all(stock)}
    assert [each for each in found if each in (ids[0], ids[1], ids[3])] == [ids[0], ids[1], ids[3]]
    assert {*found} == {*ids, delayed}
    assert found[ids[2]].payload[0] == ["b", 2]
    assert found[ids[2]].delivery_info["routing_key"] == "push"
    assert datetime.fromisoformat(found[delayed].headers["eta"]) == due
    assert found[delayed].headers["expires"] is not None
    assert shop.dq.queues["push"].snapshot().waiting == 0
    assert migrate_back()["queues"] == []


def test_a_message_survives_the_way_there_and_back_unchanged(
    stock: Any, shop: Any, migrate: Migrate, migrate_back: Migrate, raw: Any
) -> None:
    asked = {"key": "k", "timeout": 60.0, "policy": "decline", "waiting": 1}
    send(stock, "a", priority=3, headers={"dq_claim": asked, "own": [1, "x"]})
    (before,) = (json.loads(each) for each in raw.lrange("push\x06\x163", 0, -1))
    migrate("--priorities", "inverted")
    assert shop.dq.queues["push"].peek(1)[0].priority == 6
    migrate_back("--priorities", "inverted")
    (after,) = (json.loads(each) for each in raw.lrange("push\x06\x163", 0, -1))
    for message in (before, after):
        del message["properties"]["delivery_tag"]
    assert after["properties"].pop("tenant") == "a"
    assert after == before


def test_a_dry_run_moves_nothing_and_leaves_no_key(shop: Any, migrate_back: Migrate, raw: Any) -> None:
    send(shop, "a", "b")
    report = migrate_back("--dry-run")
    assert (report["found"], report["migrated"], raw.dbsize()) == (2, 0, 0)
    assert shop.dq.queues["push"].snapshot().waiting == 2


def test_priorities_are_asked_for(shop: Any, stock: Any, migrate_back: Migrate) -> None:
    low, urgent = (send(shop, "a", priority=priority)[0] for priority in (0, 9))
    assert "--priorities inverted" in migrate_back(status=1)["error"]
    report = migrate_back("--dry-run")
    assert (report["found"], report["undecided"], report["migrated"]) == (2, ["push"], 0)
    assert migrate_back("--priorities", "inverted")["migrated"] == 2
    assert ids_of(receive_all(stock)) == [urgent, low]


def test_a_priority_that_comes_during_a_run_ends_the_run(
    shop: Any, stock: Any, redis_url: str, migrate_back: Migrate
) -> None:
    (low,) = send(shop, "a")
    with shop.dq.migration(shop.conf.broker_url, redis_url) as migration:
        migration.survey(read=False)
        (urgent,) = send(shop, "a", priority=5)
        with pytest.raises(InvalidRequest, match="--priorities inverted"):
            migration.run()
    assert migrate_back("--priorities", "inverted")["migrated"] == 2
    assert ids_of(receive_all(stock)) == [urgent, low]


def test_a_worker_that_holds_messages_of_two_queues_is_named_once(shop: Any, migrate_back: Migrate) -> None:
    for queue in ("push", "mail"):
        send(shop, "a", queue=queue)
        with shop.dq.queues[queue]._broker.open(queue) as (partitions, client):
            partitions[0].claim("alive", lease_ms=60_000, want=1).run(client)
    assert migrate_back("--dry-run", status=1)["held_by"] == ["alive"]


def test_messages_of_a_living_worker_stay_and_those_of_a_lost_one_come(
    shop: Any, stock: Any, migrate_back: Migrate
) -> None:
    held, lost, *_ = ids = send(shop, *"aaa")
    with shop.dq.queues["push"]._broker.open("push") as (partitions, client):
        partitions[0].claim("alive", lease_ms=60_000, want=1).run(client)
        partitions[0].claim("dead", lease_ms=1, want=1).run(client)
        report = migrate_back(status=1)
        assert (report["migrated"], report["held_by"]) == (2, ["alive"])
        assert {*ids_of(receive_all(stock))} == {*ids} - {held}
        assert lost != held
        while partitions[0].resign("alive").run(client):
            pass
    assert migrate_back()["migrated"] == 1


def test_messages_that_will_not_run_wait_for_a_worker(
    shop: Any, redis_url: str, migrate_back: Migrate
) -> None:
    first, _ = send(shop, *"aa")
    shop.dq.queues["push"].cancel(first)
    text = run_dq(shop, "migrate", shop.conf.broker_url, redis_url, "--dry-run", status=1).output
    assert text.endswith("a worker of celery-dq records it\n")
    report = migrate_back(status=1)
    assert (report["migrated"], report["queues"][0]["left"]) == (1, 1)
    assert "will not run" in report["left"][0]["reason"]


def test_a_record_that_cannot_be_read_stays_and_hides_no_other(
    shop: Any, stock: Any, migrate_back: Migrate
) -> None:
    broken, *ids = send(shop, *"aaa")
    with shop.dq.queues["push"]._broker.open("push") as (partitions, client):
        key = partitions[0].keys.messages
        record = client.hget(key, broken)
        client.hset(key, broken, record.replace(b"[", b"(", 1))
    assert migrate_back("--dry-run", status=1)["found"] == 2
    report = migrate_back(status=1)
    assert (report["migrated"], [left["place"] for left in report["left"]]) == (2, [broken])
    assert ids_of(receive_all(stock)) == ids
    assert shop.dq.queues["push"].find(broken).state == "waiting"


def test_a_call_behind_a_dedup_lock_comes_after_the_one_that_has_it(
    shop: Any, stock: Any, migrate_back: Migrate
) -> None:
    def run(sku: str) -> None: ...

    refresh = shop.task(shared=False, name="refresh")(dedup(key="{sku}", timeout=60)(run))

    head = refresh.apply_async(("x",)).id
    with shop.dq.queues["push"]._broker.open("push") as (partitions, client):
        partitions[0].claim("alive", lease_ms=60_000, want=1).run(client)
        tail = refresh.apply_async(("x",)).id
        report = migrate_back("--dry-run", status=1)
        assert (report["found"], report["held_by"]) == (1, ["alive"])
        report = migrate_back(status=1)
        assert (report["migrated"], "a worker has" in report["left"][0]["reason"]) == (0, True)
        while partitions[0].resign("alive").run(client):
            pass
    assert migrate_back()["migrated"] == 2
    found = receive_all(stock)
    assert ids_of(found) == [head, tail]
    assert found[1].headers["dq_claim"]["timeout"] == 60.0
    assert shop.dq.dedup["push"].list() == []


def test_partitions_come_back_into_one_list(shop: Any, stock: Any, migrate_back: Migrate) -> None:
    shop.dq.queues["push"].set_partitions(4)
    ids = send(shop, *(f"t{place}" for place in range(20)))
    assert migrate_back()["migrated"] == 20
    assert {*ids_of(receive_all(stock))} == {*ids}


def test_only_the_named_queues(shop: Any, stock: Any, migrate_back: Migrate) -> None:
    send(shop, "a", queue="mail")
    send(shop, "a", queue="cache")
    assert migrate_back("--queues", "mail")["migrated"] == 1
    assert shop.dq.queues["cache"].snapshot().waiting == 1
    assert "'mial'" in migrate_back("--queues", "mial", status=1)["error"]


def test_taking_from_living_workers_is_refused(shop: Any, redis_url: str) -> None:
    options = MigrationOptions(take_unacked=True)
    opened = shop.dq.migration(shop.conf.broker_url, redis_url, options)
    with pytest.raises(InvalidRequest, match="take_unacked"), opened:
        pass


def test_a_key_that_is_no_list_gets_nothing_and_the_messages_stay(
    shop: Any, migrate_back: Migrate, raw: Any
) -> None:
    send(shop, "a")
    raw.set("push", "x")
    assert "not the list of a queue" in migrate_back(status=1)["error"]
    raw.delete("push")
    assert migrate_back()["migrated"] == 1
    assert raw.llen("push") == 1


def test_two_migrations_at_once_double_nothing(
    shop: Any, stock: Any, redis_url: str, migrate_back: Migrate
) -> None:
    ids = send(shop, *"aabb")
    options = MigrationOptions(priorities="same")
    urls = (shop.conf.broker_url, redis_url)
    with shop.dq.migration(*urls, options) as one, shop.dq.migration(*urls, options) as other:
        one.survey(read=False)
        has_overtaken = False

        def overtake(queue: str, batch: str, *args: Any) -> Any:
            nonlocal has_overtaken
            if not has_overtaken:
                # The other one finds the batch of the first, sends it and ends.
                has_overtaken = True
                assert other.run().migrated == 4
                ids.extend(send(shop, "c"))
            return receive(queue, batch, *args)

        receive: Any = one._stock.receive
        one._stock.receive = overtake
        assert one.run().migrated == 1
    assert {*ids_of(found := receive_all(stock))} == {*ids}
    assert len(found) == 5


def test_the_end_of_a_migration_leaves_another_one_its_batch(shop: Any) -> None:
    ids = send(shop, *"ab")
    with shop.dq.queues["push"]._broker.open("push") as (partitions, client):
        one, other = (TenantSource(partitions[0], client, "migration:x", 5) for _ in range(2))
        batch = one.take(ids)
        other.end()
        assert one.finish(batch) == 2
        one.end()
        assert client.zcard(partitions[0].keys.leases) == 0


def test_an_interruption_between_two_batches_leaves_no_lease(
    shop: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(shop, "a")
    with shop.dq.migration(shop.conf.broker_url, redis_url, MigrationOptions(priorities="same")) as migration:
        monkeypatch.setattr(TenantSource, "pages", killed)
        with pytest.raises(KeyboardInterrupt):
            migration.run()
    assert shop.dq.queues["push"].snapshot().consumers == ()


def test_an_interrupted_migration_there_is_completed_before_the_way_back(
    shop: Any, stock: Any, redis_url: str, migrate: Migrate, migrate_back: Migrate
) -> None:
    ids = send(stock, "a", "b")
    with shop.dq.migration(redis_url) as migration:
        migration.survey(read=False)
        migration._send_staged = lambda *_: None  # the process is killed here
        migration.run()
    assert "2 messages of queue 'push'" in migrate_back(status=1)["error"]
    assert migrate()["migrated"] == 2
    assert migrate_back()["migrated"] == 2
    assert {*ids_of(receive_all(stock))} == {*ids}


def test_an_interrupted_migration_back_is_completed_before_the_way_there(
    shop: Any, stock: Any, redis_url: str, migrate: Migrate, migrate_back: Migrate
) -> None:
    ids = send(shop, "a", "b")
    with shop.dq.migration(shop.conf.broker_url, redis_url, MigrationOptions(priorities="same")) as migration:
        migration._stock.receive = lambda *_: 1 / 0  # the process is killed here
        with pytest.raises(ZeroDivisionError):
            migration.run()
    assert "2 messages of queue 'push'" in migrate(status=1)["error"]
    assert migrate_back()["migrated"] == 2
    assert migrate()["migrated"] == 2
    assert {each.id for each in shop.dq.queues["push"].peek()} == {*ids}
