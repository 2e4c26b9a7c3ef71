"""Log lines for operators: they name the worker, the queue, the messages and the consequence."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, cast

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient, consumer_of
from tests.broker.worker_app import WorkerApp


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if part in record.getMessage()]


def test_a_lost_worker_is_named_with_its_messages_and_their_fates(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    kombu_client.publish(1, 2, 3)
    entries = kombu_client.partition.claim("w7", lease_ms=60_000, want=3).run(kombu_client.client).entries
    kombu_client.partition.ack("w7", settle=[entries[0].tag]).run(kombu_client.client)
    kombu_client.client.zadd(kombu_client.keys.leases, {"w7": 1})
    with kombu_client.connect(lease="1s", watchdog=0) as connection, kombu_client.consuming(connection, 1):
        (record,) = wait_until(lambda: lines(caplog, "lost its lease"))
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith(f"Worker w7 lost its lease on queue {kombu_client.queue}")
    back, gone = message.split("Acknowledged early")
    assert all(each.id in back and each.id not in gone for each in entries[1:])
    assert entries[0].id in gone
    assert entries[0].id not in back


@pytest.mark.logged_error("could not be read and were set aside")
def test_entries_of_another_program_are_named_once(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    kombu_client.publish("unnamed", tenant="a")
    kombu_client.client.hset(kombu_client.keys.single, "a", "rubbish")
    with kombu_client.connect(lease="1s") as connection, kombu_client.consuming(connection, 1) as got:
        rounds: list[float] = []
        connection.transport.context.identity.threads.add_check(rounds.append)
        (record,) = wait_until(lambda: lines(caplog, "set aside"))
        kombu_client.publish("named", tenant="a")
        kombu_client.drain(connection, got, 1)[0].ack()
        wait_until(lambda: len(rounds) > 3)
    assert record.getMessage().startswith(f"1 entries of {kombu_client.queue} could not be read")
    assert f"celery dq dead recover {kombu_client.queue}" in record.getMessage()
    assert len(lines(caplog, "set aside")) == 1


def test_an_outage_is_logged_once_with_its_consequence_and_its_end(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kombu_client = KombuClient(server.url())
    with kombu_client.connect(lease="2s", watchdog=0) as connection, kombu_client.consuming(connection, 1):
        me = consumer_of(connection)
        rounds: list[float] = []
        connection.transport.context.identity.threads.add_check(rounds.append)
        wait_until(lambda: rounds)
        server.kill()
        (record,) = wait_until(lambda: lines(caplog, "could not be renewed"))
        message = record.getMessage()
        assert message.startswith(f"The leases of worker {me} could not be renewed (")
        assert ".." not in message
        assert "after 2 s other workers get the messages" in message
        server.start()
        wait_until(lambda: lines(caplog, f"The leases of worker {me} are renewed again"))
    assert len([each for each in lines(caplog, me) if each.levelno == logging.WARNING]) == 1
    kombu_client.close()
    wait_until(lambda: not server.ask("EXISTS", kombu_client.keys.leases), what="the end of the leases")


def test_a_leader_that_has_handed_over_warns_of_nothing(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with kombu_client.connect() as connection:
        channel: Any = connection.default_channel
        singleton_queue = dataclasses.replace(channel.home(kombu_client.queue, ""), token=1)
        process = channel.identity
        process.record_fenced(singleton_queue, 0)
        assert lines(caplog, kombu_client.queue) == []
        # A leader that was cut off still has a message in flight.
        process.in_flight.add(singleton_queue.key, "a", "5")
        process.record_fenced(singleton_queue, 5)
        (record,) = lines(caplog, kombu_client.queue)
        assert record.levelno == logging.WARNING
        assert "1 messages that had not begun are dropped here" in record.getMessage()
        caplog.clear()
        # A worker without the setting logs once that it needs the setting.
        for _ in range(2):
            process.record_fenced(channel.home(kombu_client.queue, ""), 5)
        (record,) = lines(caplog, kombu_client.queue)
        assert "dq_singleton_queues" in record.getMessage()


def test_a_hostile_name_stays_in_its_line_of_a_worker(worker_app: WorkerApp) -> None:
    """A name of a message may move the cursor of a terminal, or forge a line."""
    hostile, app = "w7\x1b[2J\r\nFORGED: all is well", cast("Any", worker_app.app)
    worker_app.conf["dq_lease"] = 1
    with worker_app.worker("threads", 1) as worker:
        with app.dq._broker.open_home(worker_app.queue) as (partition, client):
            app.control.cancel_consumer(worker_app.queue, reply=True, limit=1, timeout=20)
            worker_app.send("note", "back", task_id=hostile)
            assert partition.claim(hostile, lease_ms=60_000, want=1).run(client).entries
            client.zadd(partition.keys.leases, {hostile: 1})
            app.control.add_consumer(worker_app.queue, reply=True, limit=1, timeout=20)
        assert worker_app.ran(1) == ["back"]
        wait_until(lambda: "lost its lease" in worker.log)
        (line,) = [each for each in worker.log.split("\n") if "lost its lease" in each]
    assert line.count("FORGED") == 2
    assert "\x1b[2J" not in line
