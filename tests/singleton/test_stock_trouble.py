"""Led queues on other brokers, when a message comes to nothing, waits, or loses its connection."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from celery_dq.testing.rabbitmq import RabbitMQServer
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.wire import ask
from tests.broker.proxy import Proxy
from tests.singleton.bank import QUEUE
from tests.singleton.office import DEADLINE_S, Bank
from tests.workers import WorkerProcess

LEADS = "This worker leads the queue"
#: A queue that everybody consumes.
OTHER = "errands"


@pytest.fixture
def plain(open_bank: Callable[..., Bank], redis_server: RedisServer) -> Bank:
    """A bank on Celery's own Redis transport; the same server holds an election of its own."""
    prefix = f"t{uuid.uuid4().hex[:8]}"
    return open_bank(broker="stock", election=redis_server.url(0), dq_key_prefix=prefix)


@pytest.fixture(params=["redis", "amqp"])
def stock(request: pytest.FixtureRequest, open_bank: Callable[..., Bank], redis_server: RedisServer) -> Bank:
    """A bank on a broker of Celery's own; only on Redis it has a place for dedup keys, too."""
    if request.param == "redis":
        plain: Bank = request.getfixturevalue("plain")
        return plain
    server: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
    queue = f"ledger-{uuid.uuid4().hex[:8]}"
    return open_bank(
        broker="stock",
        election=redis_server.url(0),
        broker_url=server.url(),
        task_default_queue=queue,
        dq_singleton_queues=[queue],
        # With a Redis, even this one, the place for dedup keys sees to some of this as well.
        result_backend=None,
    )


def received(worker: WorkerProcess, task_id: str, times: int = 1) -> None:
    worker.wait_for_log(f"[{task_id}] received", DEADLINE_S, times)


def port_of(bank: Bank) -> int:
    return int(
        bank.conf["broker_url"].rpartition("@")[2].removeprefix("redis://").split(":")[1].split("/")[0]
    )


def test_what_comes_to_no_task_and_what_loses_its_connection_stop_nothing(stock: Bank) -> None:
    queue = stock.conf["task_default_queue"]
    port = port_of(stock)
    with Proxy(port) as proxy:
        conf = {"broker_url": stock.conf["broker_url"].replace(f":{port}/", f":{proxy.port}/")}
        with stock.worker(concurrency=1, queues=[queue, OTHER], conf=conf) as worker:
            # The pool is full when the connection is lost: the message waits for its slot.
            stock.send("hold", 10, queue=OTHER)
            stock.wait_started(10)
            received(worker, stock.send("post", 0).id)
            proxy.cut_all()
            worker.wait_for_log("Connection to broker lost")
            stock.book.release("10")
            assert stock.finished(2) == [10, 0]

            # The connection is lost while its task runs.
            stock.send("hold", 1)
            stock.wait_started(1)
            proxy.cut_all()
            worker.wait_for_log("Connection to broker lost", occurrences=2)
            stock.book.release("1")
            assert stock.finished(3) == [10, 0, 1]

            # Expired, and revoked.
            stock.send("hold", 2)
            stock.wait_started(2)
            stock.send("post", 3, expires=0.01)
            revoked = stock.send("post", 4).id
            assert stock.app.control.revoke(revoked, reply=True, timeout=5.0, limit=1)
            stock.post(range(5, 6))
            stock.book.release("2")
            assert stock.finished(5) == [10, 0, 1, 2, 5]

            # The connection is lost while a message waits for its time.
            received(worker, stock.send("post", 6, countdown=1.0).id)
            proxy.cut_all()
            stock.post(range(7, 8))
            assert sorted(stock.finished(7)[5:]) == [6, 7]
    assert stock.overlaps() == 0
    assert stock.book.refused() == []


def test_what_is_declined_for_its_key_does_not_stop_the_queue(plain: Bank) -> None:
    plain.send("retry", 0, 0.5, dedup={"key": "k"})
    # The retry has the place of the key until it comes, from the end of the queue.
    plain.send("retry", 1, dedup={"key": "k"}, ignore_result=True)
    plain.post(range(2, 3))
    with plain.worker():
        assert plain.finished(2) == [2, 0]
    assert plain.book.numbers("start") == [0, 2, 0]


def test_who_hands_over_does_not_wait_for_an_eta(plain: Bank) -> None:
    with plain.worker() as first:
        late = plain.send("post", 0, countdown=600).id
        received(first, late)
        with plain.worker() as second:
            plain.app.control.broadcast("resign", {"queue": QUEUE}, destination=[first.name])
            received(second, late)
            assert second.stop() == 0
            received(first, late, 2)
            assert "was not handed over in time" not in second.log
    assert plain.book.entries() == []


@pytest.mark.parametrize("pool", ["gevent", "solo"])
def test_a_broker_that_takes_no_orders_for_a_while_is_asked_again(
    open_bank: Callable[..., Bank], redis_server: RedisServer, pool: str
) -> None:
    with RedisServer() as server:
        address = ("127.0.0.1", server.port)
        prefix = f"t{uuid.uuid4().hex[:8]}"
        election = redis_server.url(0)
        bank = open_bank(broker="stock", broker_url=server.url(0), election=election, dq_key_prefix=prefix)
        with bank.worker(pool) as worker:
            worker.wait_for_log(LEADS)
            ask(address, "CONFIG", "SET", "min-replicas-to-write", "1")
            worker.wait_for_log("NOREPLICAS")
            ask(address, "CONFIG", "SET", "min-replicas-to-write", "0")
            bank.post(range(2))
            assert bank.finished(2) == [0, 1]


def test_a_leader_that_is_cut_from_its_broker_only_is_replaced(plain: Bank) -> None:
    port = port_of(plain)
    with Proxy(port) as proxy:
        conf = {
            "broker_url": plain.conf["broker_url"].replace(f":{port}/", f":{proxy.port}/"),
            "dq_lease": 1.5,
        }
        with plain.worker(conf=conf) as cut:
            cut.wait_for_log(LEADS)
            plain.post(range(1))
            plain.finished(1)
            with plain.worker() as other:
                proxy.black_hole.set()
                plain.post(range(1, 2))
                assert plain.finished(2) == [0, 1]
                assert plain.book.entries("finish")[-1].worker == other.name
                proxy.black_hole.clear()
                proxy.cut_all()
                cut.wait_for_log("Connection to broker lost")
    assert plain.book.refused() == []
