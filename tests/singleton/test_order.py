"""What was claimed and is not heard of stays before what comes after it."""

from __future__ import annotations

from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis.partition import load_scripts
from tests.broker.proxy import Proxy
from tests.singleton.bank import QUEUE
from tests.singleton.office import Bank


def test_what_was_claimed_while_the_loop_is_blocked_keeps_its_place(till: Bank) -> None:
    # Longer than a quarter of the lease: of another queue, the keeper would give up on the claim's answer.
    till.post(range(1), seconds=2.5)
    till.post(range(1, 30))
    with till.worker(pool="solo", queues=[QUEUE, "mail"]):
        assert till.finished(30) == list(range(30))
    assert {entry.token for entry in till.book.entries()} == {1}


def test_a_claim_whose_answer_is_lost_ends_the_term_and_changes_no_order(
    bank: Bank, redis_server: RedisServer
) -> None:
    with Proxy(redis_server.port) as proxy:
        with bank.worker(conf={"broker_url": proxy.url(bank.conf["broker_url"])}):
            bank.leader()
            proxy.drop_answers_to, proxy.drops_left = load_scripts()["claim"].sha1.encode(), 1
            bank.post(range(40), seconds=0.01)
            assert bank.finished(40) == list(range(40))
        assert proxy.dropped == 1
    assert bank.overlaps() == 0
    # Nothing was begun twice.
    assert bank.book.numbers("start") == list(range(40))
