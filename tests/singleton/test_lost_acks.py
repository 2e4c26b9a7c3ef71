"""What runs again where the broker has not heard that it ran."""

from __future__ import annotations

from itertools import pairwise

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.chaos.proxy import Proxy
from tests.singleton.office import DEADLINE_S, Bank

#: The last are sent when it has been cut off, however long that took.
MESSAGES, AFTER = 40, 5


def test_a_leader_cut_from_its_broker_starts_nothing_on_top_of_a_lost_ack(
    till: Bank, redis_server: RedisServer
) -> None:
    """It has more messages at hand. The one it finished last comes back, and must not come after others."""
    proxy = Proxy(redis_server.port).start()
    conf = {
        "dq_lease": 1.5,
        "dq_election_session": 2,
        "dq_claim_ahead": 0.5,
        "worker_prefetch_multiplier": 16,
    }
    url = till.conf["broker_url"].replace(f":{redis_server.port}/", f":{proxy.port}/")
    try:
        with till.worker(concurrency=1, conf={**conf, "broker_url": url}) as cut:
            assert till.leader() == cut.name
            with till.worker(concurrency=1, conf=conf):
                till.post(range(MESSAGES), task="post_late", seconds=0.02)
                till.wait_started(20)
                proxy.black_hole()
                till.post(range(MESSAGES, MESSAGES + AFTER), task="post_late")
                everything = set(range(MESSAGES + AFTER))
                wait_until(lambda: set(till.book.numbers("finish")) == everything, DEADLINE_S)
                proxy.restore()
                proxy.sever()
    finally:
        proxy.stop()
    assert till.book.entries()[-1].worker != cut.name
    steps = {later - earlier for earlier, later in pairwise(till.book.numbers("start"))}
    assert steps <= {0, 1}, till.book.numbers("start")
