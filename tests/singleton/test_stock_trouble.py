"""Singleton queues on other brokers: messages that do not run, wait, or lose their connection."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from celery_dq.testing.servers import RedisServer
from tests.broker.proxy import Proxy
from tests.dedup.dedup_workers import kill
from tests.rabbitmq import RabbitMQServer
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import DEADLINE_S, PostingWorkers
from tests.workers import WorkerProcess

LEADS = "This worker leads queue"
#: A queue that all workers consume.
OTHER = "errands"


@pytest.fixture(params=["redis", "amqp"])
def stock(request: pytest.FixtureRequest, open_plain: Callable[..., PostingWorkers]) -> PostingWorkers:
    """A posting app with one of Celery's own brokers; only the one on Redis also has dedup locks."""
    if request.param == "redis":
        return open_plain()
    server: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
    queue = f"ledger-{uuid.uuid4().hex[:8]}"
    return open_plain(
        broker_url=server.url(),
        task_default_queue=queue,
        dq_singleton_queues=[queue],
        # With any Redis, the dedup locks would handle a part of these cases as well.
        result_backend=None,
        without_keys=True,
    )


def received(worker: WorkerProcess, task_id: str, times: int = 1) -> None:
    worker.wait_for_log(f"[{task_id}] received", DEADLINE_S, times)


def port_of(posting: PostingWorkers) -> int:
    return int(
        posting.conf["broker_url"].rpartition("@")[2].removeprefix("redis://").split(":")[1].split("/")[0]
    )


#: Looks in the server until no message of a queue is unacknowledged. Each ``rabbitmqctl`` takes two seconds.
WAIT_FOR_ACKS = """
Wait = fun(Wait) ->
  Found = rabbit_amqqueue:info_all(<<"/">>, [name, messages_unacknowledged]),
  case [Count || [{{name, {{resource, _, queue, <<"{queue}">>}}}}, {{_, Count}}] <- Found] of
    [0] -> ok;
    _ -> timer:sleep(50), Wait(Wait)
  end
end,
Wait(Wait).
"""


def acknowledged(request: pytest.FixtureRequest, posting: PostingWorkers, queue: str) -> None:
    """Wait until RabbitMQ has read the early acks, because a cut connection loses those under way."""
    if posting.conf["broker_url"].startswith("amqp"):
        server: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
        assert server.control("eval", WAIT_FOR_ACKS.format(queue=queue)).strip() == "ok"


def test_a_message_without_a_task_and_a_lost_connection_stop_nothing(
    stock: PostingWorkers, request: pytest.FixtureRequest
) -> None:
    queue = stock.conf["task_default_queue"]
    port = port_of(stock)
    with Proxy(port) as proxy:
        conf = {"broker_url": stock.conf["broker_url"].replace(f":{port}/", f":{proxy.port}/")}
        with stock.worker(concurrency=1, queues=[queue, OTHER], conf=conf) as worker:
            # The pool is full when the connection is lost: the message waits for a slot.
            stock.send("hold", 10, queue=OTHER)
            stock.wait_started(10)
            acknowledged(request, stock, OTHER)
            received(worker, stock.send("post", 0).id)
            proxy.cut_all()
            worker.wait_for_log("Connection to broker lost")
            stock.book.release("10")
            assert stock.finished(2) == [10, 0]

            # The connection is lost while the task runs.
            stock.send("hold", 1)
            stock.wait_started(1)
            acknowledged(request, stock, queue)
            proxy.cut_all()
            worker.wait_for_log("Connection to broker lost", occurrences=2)
            stock.book.release("1")
            assert stock.finished(3) == [10, 0, 1]

            # One message has expired, and one was revoked.
            stock.send("hold", 2)
            stock.wait_started(2)
            stock.send("post", 3, expires=0.01)
            revoked = stock.send("post", 4).id
            assert stock.app.control.revoke(revoked, reply=True, timeout=30.0, limit=1)
            stock.post(range(5, 6))
            stock.book.release("2")
            assert stock.finished(5) == [10, 0, 1, 2, 5]

            # The connection is lost while a message waits for its ETA.
            received(worker, stock.send("post", 6, countdown=1.0).id)
            proxy.cut_all()
            stock.post(range(7, 8))
            assert sorted(stock.finished(7)[5:]) == [6, 7]
    assert stock.overlaps() == 0
    assert stock.book.refused() == []


def test_a_declined_call_does_not_stop_the_queue(plain: PostingWorkers) -> None:
    plain.send("retry", 0, 0.5, dedup={"key": "k"})
    # The retry holds the dedup lock until it runs, from the end of the queue.
    plain.send("retry", 1, dedup={"key": "k"}, ignore_result=True)
    plain.post(range(2, 3))
    with plain.worker():
        assert plain.finished(2) == [2, 0]
    assert plain.book.numbers("start") == [0, 2, 0]


def test_a_leader_that_hands_over_does_not_wait_for_an_eta(plain: PostingWorkers) -> None:
    with plain.worker() as first:
        late = plain.send("post", 0, countdown=600).id
        received(first, late)
        with plain.worker() as second:
            plain.app.control.broadcast("resign", {"queue": QUEUE}, destination=[first.name])
            received(second, late)
            assert second.stop() == 0
            received(first, late, 2)
            assert "was not handed over within" not in second.log
    assert plain.book.entries() == []


@pytest.mark.parametrize("pool", ["gevent", "solo"])
def test_a_broker_that_takes_no_orders_for_a_while_is_asked_again(
    open_plain: Callable[..., PostingWorkers], pool: str
) -> None:
    with RedisServer() as server:
        posting = open_plain(broker_url=server.url(0))
        with posting.worker(pool) as worker:
            worker.wait_for_log(LEADS)
            server.ask("CONFIG", "SET", "min-replicas-to-write", "1")
            worker.wait_for_log("NOREPLICAS")
            server.ask("CONFIG", "SET", "min-replicas-to-write", "0")
            posting.post(range(2))
            assert posting.finished(2) == [0, 1]


def test_a_leader_that_is_cut_from_its_broker_only_is_replaced(plain: PostingWorkers) -> None:
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


def test_the_message_of_a_killed_leader_comes_back_to_a_worker_without_other_queues(
    open_plain: Callable[..., PostingWorkers],
) -> None:
    """Kombu restores messages only where it consumes a queue. This worker gets one message at a time."""
    posting = open_plain(dq_lease=1.5, broker_transport_options={"visibility_timeout": 2})
    with posting.worker() as first:
        posting.send("hold_late", 0)
        posting.wait_started(0)
        kill(first)
        posting.post(range(1, 2))
        with posting.worker():
            posting.wait_started(0, times=2)
            posting.book.release("0")
            assert sorted(posting.finished(2)) == [0, 1]
    assert posting.book.refused() == []
