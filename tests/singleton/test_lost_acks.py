"""Messages that run again because the broker has not received their acks."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Queue

from celery_dq.clock import SystemClock
from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.options.resolve import resolve
from celery_dq.protocols import TermPermit
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.in_flight.pending_acks import InFlightMessage
from celery_dq.transport.redis.consuming import singleton_delivery
from celery_dq.wiring import register_transports
from tests.broker.proxy import Proxy as CuttingProxy
from tests.chaos.proxy import Proxy
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import DEADLINE_S, PostingWorkers

#: The last messages are sent after the leader was cut off, however long that takes.
MESSAGES, AFTER = 40, 5
#: Messages that begin one by one, each after the answer to the one before.
FEW = 10


@pytest.mark.parametrize(("task", "keeps"), [("post_late", False), ("refuse_late", True)])
def test_a_leader_cut_from_its_broker_starts_nothing_on_top_of_a_lost_ack(
    redis_posting: PostingWorkers, redis_server: RedisServer, task: str, keeps: bool
) -> None:
    """Its last finished message returns, and must not come after the messages that it has prefetched."""
    proxy = Proxy(redis_server.port).start()
    conf = {
        "dq_lease": 1.5,
        "dq_election_session": 2,
        "dq_claim_ahead": 0.5,
        "worker_prefetch_multiplier": 16,
        "dq_dead_letter_failures": keeps,
    }
    url = redis_posting.conf["broker_url"].replace(f":{redis_server.port}/", f":{proxy.port}/")
    try:
        with redis_posting.worker(concurrency=1, conf={**conf, "broker_url": url}) as cut:
            assert redis_posting.leader() == cut.name
            with redis_posting.worker(concurrency=1, conf=conf):
                redis_posting.post(range(MESSAGES), task=task, seconds=0.02)
                redis_posting.wait_started(20)
                proxy.black_hole()
                redis_posting.post(range(MESSAGES, MESSAGES + AFTER), task=task)
                everything = set(range(MESSAGES + AFTER))
                wait_until(lambda: set(redis_posting.book.numbers("finish")) == everything, DEADLINE_S)
                proxy.restore()
                proxy.sever()
    finally:
        proxy.stop()
    assert redis_posting.book.entries()[-1].worker != cut.name
    steps = {later - earlier for earlier, later in pairwise(redis_posting.book.numbers("start"))}
    assert steps <= {0, 1}, redis_posting.book.numbers("start")


@pytest.mark.parametrize(
    ("pool", "task", "most"),
    [("prefork", "post", 1), ("threads", "post", 1), ("solo", "post", 1), ("threads", "post_late", 3)],
)
def test_a_leader_cut_from_its_broker_starts_little_after_an_ack_that_is_not_confirmed(
    redis_posting: PostingWorkers, redis_server: RedisServer, pool: str, task: str, most: int
) -> None:
    """Only the messages after the last confirmed ack run again, in order."""
    proxy = Proxy(redis_server.port).start()
    conf = {
        "dq_lease": 1.5,
        "dq_election_session": 2,
        "dq_claim_ahead": 0.9,
        "worker_prefetch_multiplier": 64,
        "most_unconfirmed": most,
    }
    url = redis_posting.conf["broker_url"].replace(f":{redis_server.port}/", f":{proxy.port}/")
    try:
        with redis_posting.worker(pool, concurrency=1, conf={**conf, "broker_url": url}) as cut:
            assert redis_posting.leader() == cut.name
            with redis_posting.worker(pool, concurrency=1, conf=conf):
                redis_posting.post(range(MESSAGES), task=task, seconds=0.03)
                redis_posting.wait_started(20)
                proxy.black_hole()
                redis_posting.post(range(MESSAGES, MESSAGES + AFTER), task=task)
                everything = set(range(MESSAGES + AFTER))
                wait_until(lambda: set(redis_posting.book.numbers("start")) == everything, DEADLINE_S)
                proxy.restore()
                proxy.sever()
    finally:
        proxy.stop()
    assert redis_posting.book.entries()[-1].worker != cut.name
    starts = redis_posting.book.numbers("start")
    assert len(starts) - len(everything) <= most, starts
    back = [later - earlier for earlier, later in pairwise(starts) if later != earlier + 1]
    assert len(back) <= 1, starts
    assert all(step > -most for step in back), starts


class SlowProxy(Proxy):
    """A proxy that delays all data."""

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(0.03)
            writer.write(data)
        writer.close()


@pytest.mark.parametrize(
    ("pool", "task", "most"),
    [("prefork", "post", 1), ("prefork", "post_late", 3), ("threads", "post", 3), ("solo", "post_late", 1)],
)
def test_a_message_that_waits_for_a_late_confirmation_begins_when_it_comes(
    redis_posting: PostingWorkers, redis_server: RedisServer, pool: str, task: str, most: int
) -> None:
    """The last messages start although no message wakes the worker and its next heartbeat is minutes away."""
    proxy = SlowProxy(redis_server.port).start()
    url = redis_posting.conf["broker_url"].replace(f":{redis_server.port}/", f":{proxy.port}/")
    conf = {"worker_prefetch_multiplier": 64, "dq_claim_ahead": 2, "dq_lease": 600, "most_unconfirmed": most}
    try:
        with redis_posting.worker(pool, concurrency=1, conf={**conf, "broker_url": url}):
            redis_posting.post(range(FEW), task=task)
            assert redis_posting.finished(FEW) == list(range(FEW))
    finally:
        proxy.stop()
    assert redis_posting.book.numbers("start") == list(range(FEW))


class FirmTerm:
    """A term without an end, of a worker that does not exist."""

    is_firm = True

    def is_singleton(self, queue: str) -> bool:
        return True

    def term_token(self, queue: str) -> int:
        return 1

    def is_current(self, queue: str, token: int) -> bool:
        return True

    def permit(self, queue: str, token: int) -> TermPermit:
        return self

    def attach_consumer(self, *_: Any) -> None:
        """Do nothing: no leader resigns."""

    report_fenced = report_doubt = add_listener = remove_listener = attach_consumer


def test_an_ack_that_the_heartbeat_is_sending_is_not_confirmed(
    redis_server: RedisServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late ack is under way on another connection than the one on which the loop reads answers."""
    monkeypatch.setattr(singleton_delivery, "UNCONFIRMED_S", 0)  # on a machine of any speed
    register_transports()
    context = AppContext(QUEUE, lambda: resolve({}))
    context.leaderships = FirmTerm()  # type: ignore[assignment]  # as much of it as is asked for
    with (
        CuttingProxy(redis_server.port) as proxy,
        Connection(f"dq-{redis_url}", transport_options={APP_CONTEXT: context}) as connection,
    ):
        channel: Any = connection.default_channel
        got: list[Any] = []
        queue = Queue(QUEUE)(channel)
        queue.declare()
        producer = connection.Producer()
        for number in range(2):
            producer.publish(number, routing_key=QUEUE)
        assert channel.partition(QUEUE).fence(1).run(channel.client).accepted
        with Consumer(channel, [queue], on_message=got.append):
            while not got:
                connection.drain_events(timeout=DEADLINE_S)
            process, ledger = channel.process, channel.in_flight
            tag = got[0].delivery_tag
            key = ledger.get(tag).partition
            ledger.finish(tag)
            proxy.black_hole.set()
            far = redis.Redis.from_url(proxy.url(redis_url).removeprefix("dq-"))
            sending = threading.Thread(
                target=send_pending_acks, args=(process.heartbeat, process.heartbeat.queues[key], far)
            )
            sending.start()
            wait_until(lambda: not ledger.pending_acks(key), DEADLINE_S)
            with suppress(TimeoutError):
                while True:
                    connection.drain_events(timeout=0.5)
            assert [message.payload for message in got] == [0]
            proxy.cut_all()
            sending.join(DEADLINE_S)
            while len(got) < 2:
                connection.drain_events(timeout=DEADLINE_S)
            assert not ledger.pending_acks(key)
            got[1].ack()


def send_pending_acks(heartbeat: Any, queue: Any, client: Any) -> None:
    """Send the acks as the heartbeat thread does, which survives a lost connection."""
    with suppress(redis.RedisError):
        heartbeat.send_pending_acks(queue, client)


def test_a_message_that_is_seen_done_is_seen_pending() -> None:
    held: list[InFlightMessage] = []
    seen: list[bool] = []

    class Watch(SystemClock):
        def monotonic(self) -> float:
            seen.extend(each.done for each in held)
            return super().monotonic()

    ledger = InFlightMessages(Watch(), lease_s=15.0)
    claimed = ledger.add("p", "m", "1")
    assert claimed is not None
    held.append(claimed)
    ledger.finish(held[0].tag)
    assert seen == [False]
    assert held[0].done
