"""What runs again where the broker has not heard that it ran."""

from __future__ import annotations

from itertools import pairwise

from celery_dq.testing.waiting import wait_until
from tests.chaos.proxy import Proxy
from tests.singleton.office import Bank

MESSAGES = 40


def test_a_leader_cut_from_its_broker_starts_nothing_on_top_of_a_lost_ack(till: Bank) -> None:
    """It has more messages at hand. The one that it finished last comes back, and must not come after others."""
    proxy = Proxy(int(till.conf["broker_url"].rpartition(":")[2].partition("/")[0])).start()
    database = till.conf["broker_url"].rpartition("/")[2]
    conf = {"dq_lease": 1.5, "dq_claim_ahead": 0.5, "worker_prefetch_multiplier": 16}
    through = {**conf, "broker_url": f"dq-redis://127.0.0.1:{proxy.port}/{database}"}
    try:
        with till.worker(concurrency=1, conf=through) as cut:
            assert till.leader() == cut.name
            with till.worker(concurrency=1, conf=conf):
                till.post(range(MESSAGES), task="post_late", seconds=0.02)
                till.wait_started(20)
                proxy.black_hole()
                wait_until(lambda: set(till.book.numbers("finish")) == set(range(MESSAGES)), 60)
                proxy.restore()
                proxy.sever()
    finally:
        proxy.stop()
    starts = till.book.numbers("start")
    assert [pair for pair in pairwise(starts) if pair[1] - pair[0] not in (0, 1)] == []
