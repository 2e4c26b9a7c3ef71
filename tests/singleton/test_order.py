"""Messages of an unanswered claim stay before the messages that come after them."""

from __future__ import annotations

from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.proxy import Proxy
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import PostingWorkers


def test_a_message_claimed_while_the_loop_is_blocked_keeps_its_place(redis_posting: PostingWorkers) -> None:
    # This is longer than a quarter of the lease. For another queue, the heartbeat thread would abandon the
    # claim.
    redis_posting.post(range(1), seconds=2.5)
    redis_posting.post(range(1, 30))
    with redis_posting.worker(pool="solo", queues=[QUEUE, "mail"]):
        assert redis_posting.finished(30) == list(range(30))
    assert {entry.token for entry in redis_posting.book.entries()} == {1}


def test_a_claim_whose_answer_is_lost_ends_the_term_and_changes_no_order(
    posting: PostingWorkers, redis_server: RedisServer
) -> None:
    with Proxy(redis_server.port) as proxy:
        with posting.worker(conf={"broker_url": proxy.url(posting.conf["broker_url"])}):
            posting.leader()
            proxy.drop_answers_to, proxy.drops_left = load_scripts()["claim"].sha1.encode(), 1
            posting.post(range(40), seconds=0.01)
            assert posting.finished(40) == list(range(40))
        assert proxy.dropped == 1
    assert posting.overlaps() == 0
    # No message was started twice.
    assert posting.book.numbers("start") == list(range(40))
