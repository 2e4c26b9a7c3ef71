"""What runs again where the broker has not heard that it ran."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Queue

from celery_dq.clock import SystemClock
from celery_dq.hooks import WIRES, Permit, Wires
from celery_dq.options.resolve import resolve
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.ledger import Held, Ledger
from celery_dq.wiring import register_transports
from tests.broker.proxy import Proxy as CuttingProxy
from tests.chaos.proxy import Proxy
from tests.singleton.bank import QUEUE
from tests.singleton.office import DEADLINE_S, Bank

#: The last are sent when it has been cut off, however long that took.
MESSAGES, AFTER = 40, 5


@pytest.mark.parametrize(("task", "keeps"), [("post_late", False), ("refuse_late", True)])
def test_a_leader_cut_from_its_broker_starts_nothing_on_top_of_a_lost_ack(
    till: Bank, redis_server: RedisServer, task: str, keeps: bool
) -> None:
    """It has more messages at hand. The one it finished last comes back, and must not come after others."""
    proxy = Proxy(redis_server.port).start()
    conf = {
        "dq_lease": 1.5,
        "dq_election_session": 2,
        "dq_claim_ahead": 0.5,
        "worker_prefetch_multiplier": 16,
        "dq_dead_letter_failures": keeps,
    }
    url = till.conf["broker_url"].replace(f":{redis_server.port}/", f":{proxy.port}/")
    try:
        with till.worker(concurrency=1, conf={**conf, "broker_url": url}) as cut:
            assert till.leader() == cut.name
            with till.worker(concurrency=1, conf=conf):
                till.post(range(MESSAGES), task=task, seconds=0.02)
                till.wait_started(20)
                proxy.black_hole()
                till.post(range(MESSAGES, MESSAGES + AFTER), task=task)
                everything = set(range(MESSAGES + AFTER))
                wait_until(lambda: set(till.book.numbers("finish")) == everything, DEADLINE_S)
                proxy.restore()
                proxy.sever()
    finally:
        proxy.stop()
    assert till.book.entries()[-1].worker != cut.name
    steps = {later - earlier for earlier, later in pairwise(till.book.numbers("start"))}
    assert steps <= {0, 1}, till.book.numbers("start")


class Reign:
    """A term that does not end, of a worker that is not there."""

    firm = True

    def governs(self, queue: str) -> bool:
        return True

    def term(self, queue: str) -> int:
        return 1

    def stands(self, queue: str, token: int) -> bool:
        return True

    def permit(self, queue: str, token: int) -> Permit:
        return self

    def attach(self, *_: Any) -> None:
        """Nobody resigns."""

    refused = doubt = listen = unlisten = attach


def test_what_the_keeper_is_telling_is_not_told_yet(redis_server: RedisServer, redis_url: str) -> None:
    """A late ack is on its way on another connection than the one on which the loop hears answers."""
    register_transports()
    wires = Wires(QUEUE, lambda: resolve({}))
    wires.terms = Reign()  # type: ignore[assignment]  # as much of it as is asked for
    with (
        CuttingProxy(redis_server.port) as proxy,
        Connection(f"dq-{redis_url}", transport_options={WIRES: wires}) as connection,
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
            process, ledger = channel.process, channel.ledger
            tag = got[0].delivery_tag
            key = ledger.get(tag).partition
            ledger.get(tag).late = True
            ledger.finish(tag)
            proxy.black_hole.set()
            far = redis.Redis.from_url(proxy.url(redis_url).removeprefix("dq-"))
            tell = threading.Thread(target=_tell, args=(process.keeper, process.keeper.queue(key), far))
            tell.start()
            wait_until(lambda: not ledger.outbox(key), DEADLINE_S)
            with suppress(TimeoutError):
                while True:
                    connection.drain_events(timeout=0.5)
            assert [message.payload for message in got] == [0]
            proxy.cut_all()
            tell.join(DEADLINE_S)
            while len(got) < 2:
                connection.drain_events(timeout=DEADLINE_S)
            assert not ledger.outbox(key)
            got[1].ack()


def _tell(keeper: Any, queue: Any, client: Any) -> None:
    with suppress(redis.RedisError):
        keeper.tell(queue, client)


def test_who_sees_that_a_message_is_over_sees_that_it_is_to_be_told() -> None:
    held: list[Held] = []
    seen: list[bool] = []

    class Watch(SystemClock):
        def monotonic(self) -> float:
            seen.extend(each.gone for each in held)
            return super().monotonic()

    ledger = Ledger(Watch(), lease_s=15.0)
    held.append(ledger.hold("p", "m", "1"))
    ledger.finish(held[0].tag)
    assert seen == [False]
    assert held[0].gone
