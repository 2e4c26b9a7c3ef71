"""Messages that run again because the broker has not received their acks."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from celery_dq.clock import SystemClock
from celery_dq.protocols import TermPermit
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.in_flight import InFlightMessage, InFlightMessages
from tests.chaos.proxy import Proxy
from tests.singleton.posting_workers import DEADLINE_S, PostingWorkers

#: The last messages are sent after the leader was cut off, however long that takes.
MESSAGES, AFTER = 40, 5
#: Messages that begin one by one, each after the answer to the one before.
FEW = 10


def cut_leader_off(
    posting: PostingWorkers, server: RedisServer, pool: str, task: str, event: str, **conf: Any
) -> None:
    """Cut the leader off from its broker, and wait until each message has this event in the book."""
    proxy = Proxy(server.port).start()
    conf |= {"dq_lease": 1.5, "dq_election_session": 2}
    url = posting.conf["broker_url"].replace(f":{server.port}/", f":{proxy.port}/")
    try:
        with posting.worker(pool, concurrency=1, conf={**conf, "broker_url": url}) as cut:
            assert posting.leader() == cut.name
            with posting.worker(pool, concurrency=1, conf=conf):
                posting.post(range(MESSAGES), task=task, seconds=0.03)
                posting.wait_started(20)
                proxy.black_hole()
                posting.post(range(MESSAGES, MESSAGES + AFTER), task=task)
                everything = set(range(MESSAGES + AFTER))
                wait_until(lambda: set(posting.book.numbers(event)) == everything, DEADLINE_S)
                proxy.restore()
                proxy.sever()
    finally:
        proxy.stop()
    assert posting.book.entries()[-1].worker != cut.name


@pytest.mark.parametrize(("task", "keeps"), [("post_late", False), ("refuse_late", True)])
def test_a_leader_cut_from_its_broker_starts_nothing_on_top_of_a_lost_ack(
    redis_posting: PostingWorkers, redis_server: RedisServer, task: str, keeps: bool
) -> None:
    """Its last finished message returns, and must not come after the messages that it has prefetched."""
    conf = {"dq_claim_ahead": 0.5, "worker_prefetch_multiplier": 16, "dq_dead_letter_failures": keeps}
    cut_leader_off(redis_posting, redis_server, "prefork", task, "finish", **conf)
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
    conf = {"dq_claim_ahead": 0.9, "worker_prefetch_multiplier": 64, "most_unconfirmed": most}
    cut_leader_off(redis_posting, redis_server, pool, task, "start", **conf)
    starts = redis_posting.book.numbers("start")
    assert len(starts) - len(set(starts)) <= most, starts
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
