"""A Redis that restarts without its data, or with older data: the log names the loss and its consequence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consumer_identity import DataLoss
from tests.broker.kombu_client import KombuClient, bodies, consumer_of, heartbeat
from tests.broker.worker_app import OpenApp

#: No other test has this queue. Heartbeats of earlier tests may log, too, that their servers were flushed.
QUEUE = "data-loss"


@pytest.fixture
def keeps_data() -> bool:
    return False


@pytest.fixture
def kombu_client(keeps_data: bool) -> Iterator[KombuClient]:
    with RedisServer(appendonly=keeps_data) as server:
        kombu_client = KombuClient(server.url(), QUEUE)
        kombu_client.server = server  # type: ignore[attr-defined]
        yield kombu_client
        kombu_client.close()
        wait_until(lambda: not server.ask("EXISTS", kombu_client.keys.leases), what="the end of the leases")


def restart(kombu_client: Any, connection: Any) -> None:
    """Restart Redis, and wait until the consumer has its lease again."""
    kombu_client.server.kill()
    kombu_client.server.restart()
    me = consumer_of(connection)
    rounds: list[float] = []
    process = connection.transport.context.identity
    process.threads.add_check(rounds.append)
    wait_until(lambda: rounds and kombu_client.client.zscore(kombu_client.keys.leases, me), what="a renewal")


def events(records: list[logging.LogRecord]) -> list[str]:
    return [str(getattr(record, "event", "")) for record in records]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [record for record in caplog.records if getattr(record, "queue", "") == QUEUE]
    return [event for event in events(own) if event in ("data_lost", "writes_lost")]


@pytest.mark.parametrize("claimed", [True, False])
def test_a_restart_without_data_is_logged_once(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture, claimed: bool
) -> None:
    with (
        kombu_client.connect(lease="2s", watchdog=0) as connection,
        kombu_client.consuming(connection, 1) as got,
    ):
        kombu_client.drain_until(connection, lambda: kombu_client.client.zcard(kombu_client.keys.leases))
        process = connection.transport.context.identity
        wait_until(lambda: process.in_flight.is_lease_trusted(kombu_client.keys.prefix))
        if claimed:
            kombu_client.publish(1, 2)
            kombu_client.drain(connection, got, 1)
        restart(kombu_client, connection)
        wait_until(lambda: errors(caplog))
        rounds: list[float] = []
        process.threads.add_check(rounds.append)
        wait_until(lambda: len(rounds) > 1)
        assert errors(caplog) == ["data_lost"]
        assert "appendonly yes" in caplog.text


@pytest.mark.parametrize("claimed", [True, False])
def test_a_worker_that_reconnects_logs_the_loss_of_an_idle_queue(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture, claimed: bool
) -> None:
    server: Any = kombu_client.server  # type: ignore[attr-defined]
    caplog.set_level("INFO")

    def own_records() -> list[logging.LogRecord]:
        return [record for record in caplog.records if process.consumer in record.getMessage()]

    with kombu_client.connect(lease="8s", watchdog=0) as connection:
        with suppress(redis.ConnectionError), kombu_client.consuming(connection, 1) as got:
            process = connection.transport.context.identity
            wait_until(lambda: process.in_flight.is_lease_trusted(kombu_client.keys.prefix))
            kombu_client.drain_until(connection, lambda: kombu_client.client.zcard(kombu_client.keys.leases))
            claims = connection.default_channel.consumer.claims
            kombu_client.drain_until(connection, lambda: claims.wakeups.is_waiting)
            if claimed:
                kombu_client.publish(1)
                (message,) = kombu_client.drain(connection, got, 1)
                message.ack()
                kombu_client.drain_until(
                    connection, lambda: not kombu_client.client.exists(kombu_client.keys.messages)
                )
            kombu_client.drain_until(connection, lambda: claims.wakeups.is_waiting)
            server.kill()
        connection.collect()  # as a worker does that has lost its connection
        wait_until(lambda: kombu_client.keys.prefix not in process.threads.queues, what="an abandoned queue")
        server.restart()
        with kombu_client.consuming(connection, 1):
            kombu_client.drain_until(connection, lambda: errors(caplog))
    assert errors(caplog) == ["data_lost"]
    # The record of the outage gets its counterpart, if there was a lease to renew.
    outage = events(own_records())
    assert outage.count("lease_not_renewed") == outage.count("lease_renewed_again") <= 1


def test_a_flush_between_two_consumers_is_no_loss(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    with kombu_client.connect(lease="8s", watchdog=0) as connection:
        with ExitStack() as stack:
            got = stack.enter_context(kombu_client.consuming(connection, 1))
            kombu_client.publish(1)
            (message,) = kombu_client.drain(connection, got, 1)
            message.ack()
            process = connection.transport.context.identity
            wait_until(lambda: process.in_flight.is_lease_trusted(kombu_client.keys.prefix))
            with process.threads.main.leases.lock:
                # The heartbeat waits for this lock. Users empty the server between two tests.
                stack.close()
                kombu_client.client.flushall()
        wait_until(lambda: kombu_client.keys.prefix not in process.threads.queues)
    assert errors(caplog) == []


@pytest.mark.parametrize("keeps_data", [True])
def test_a_restart_with_all_data_logs_no_loss(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        kombu_client.connect(lease="2s", watchdog=0) as connection,
        kombu_client.consuming(connection, 1) as got,
    ):
        kombu_client.publish(1, 2)
        kombu_client.drain(connection, got, 1)
        restart(kombu_client, connection)
        assert errors(caplog) == []


def test_a_redis_with_older_data_is_logged_to_have_lost_its_latest_writes(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        kombu_client.connect(lease="2s", watchdog=0) as connection,
        kombu_client.consuming(connection) as got,
    ):
        kombu_client.publish(1)
        kombu_client.drain(connection, got, 1)
        kombu_client.publish(2)
        kombu_client.drain(connection, got, 2)
        assert bodies(got) == [1, 2]
        process = connection.transport.context.identity
        wait_until(lambda: process.data_loss._known[kombu_client.keys.prefix].number == 2)
        # The state of a replica that has not received the second claim.
        kombu_client.client.hset(kombu_client.keys.state, "claim", 1)
        wait_until(lambda: errors(caplog))
        assert errors(caplog) == ["writes_lost"]
        for message in got:
            message.ack()


def test_an_answer_that_a_later_one_has_overtaken_reports_of_no_loss() -> None:
    loss = DataLoss(lease_s=10.0)
    assert loss.check("p", 7, lease_lost=False, sent_at=2.0, now=3.0) is None
    assert loss.check("p", 6, lease_lost=False, sent_at=1.0, now=4.0) is None
    assert loss.check("p", 6, lease_lost=False, sent_at=5.0, now=6.0) == (7, 6)


# -- what the broker and the process have


@pytest.fixture
def restored_server() -> Iterator[RedisServer]:
    """A server that keeps what it has saved by hand, as a restored backup does."""
    with RedisServer(config={"save": "", "dbfilename": "backup.rdb"}) as server:
        yield server


@pytest.mark.parametrize(
    ("task", "runs", "outage"), [("hold", 1, ""), ("hold_late", 2, "could not be renewed")]
)
def test_an_ack_that_redis_loses_keeps_no_slot(
    open_app: OpenApp, restored_server: RedisServer, task: str, runs: int, outage: str
) -> None:
    """Redis restarts at once, while no call is under way, or when its `outage` was noticed."""
    # Longer than a reconnect: a lease that ends before it is renewed ends the claim in another way. The
    # comparison that is made every three leases in any case comes after the deadline of this test.
    worker_app = open_app(port=restored_server.port, dq_lease=12.0, dq_default_quota={"concurrency": 1})
    worker_app.client = redis.Redis(port=restored_server.port, db=1)

    def is_stored() -> bool:
        records = worker_app.client.hvals(worker_app.keys.messages)
        return task == "hold_late" or all(record.startswith(b"\0") for record in records)  # the early ack

    def is_over() -> bool:
        return not worker_app.client.hexists(worker_app.keys.messages, message)

    with worker_app.worker("threads", 2) as worker:
        # The worker keeps its lease over the reconnect while it has a message. Else the end of the lease
        # may be what frees the slot.
        worker_app.send("hold", "kept", tenant="another")
        worker_app.ran(1, subject="began")
        message = worker_app.send(task, task).id
        worker_app.ran(2, subject="began")
        wait_until(is_stored)
        worker_app.client.save()
        worker_app.witness.release(task, 2)
        wait_until(is_over)
        # Redis loses all that was written since its last ``SAVE``.
        restored_server.kill()
        worker.wait_for_log(outage)
        restored_server.restart()
        # The other one waits for the slot of the first one.
        worker_app.send("note", "second")
        assert worker_app.ran(1) == ["second"]
        wait_until(is_over)
        assert len(worker_app.witness.reports("began")) == 1 + runs
        assert worker.log.count("lost acknowledgements") == 1
        worker_app.witness.release("kept", 1)
        worker_app.settled()


@pytest.mark.parametrize("claims_by", ["basic_get", "a consumer"])
def test_a_claim_without_a_fencing_token_is_no_loss(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture, claims_by: str
) -> None:
    """The leader of a singleton queue has claimed nothing yet, so that its claims have no number."""
    assert kombu_client.partition.fence(1).run(kombu_client.client).accepted
    with kombu_client.connect(lease="60s", watchdog=0) as connection:
        channel = connection.default_channel
        identity = channel.identity
        if claims_by == "basic_get":
            for _ in range(3):
                assert channel.basic_get(QUEUE) is None
        else:
            with kombu_client.consuming(connection, 1):
                for _ in range(3):
                    kombu_client.look_again(connection)
                    heartbeat(identity)
        assert errors(caplog) == []
        assert not identity.in_flight.is_lease_trusted(kombu_client.keys.prefix)
        assert not identity.in_doubt.is_unsettled(kombu_client.keys.prefix)
    assert "without an election" in caplog.text
