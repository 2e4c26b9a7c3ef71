"""What a prefork pool has when the connection is lost, and when it is lost before the pool has anything."""

from __future__ import annotations

from celery_dq.testing.servers import RedisServer
from tests.broker.proxy import Proxy
from tests.broker.yard import Yard

DEADLINE_S = 30.0


def test_a_full_pool_is_full_after_a_lost_connection(
    yard: Yard, proxy: Proxy, redis_server: RedisServer
) -> None:
    far = Yard(redis_server, proxy.port, task_default_queue=yard.queue)
    with far.worker("prefork", 2) as full:
        for key in "ab":
            yard.send("hold", key)
        yard.ran(2, DEADLINE_S, subject="began")
        proxy.cut_all()
        full.wait_for_log("Connected to", DEADLINE_S, occurrences=2)
        with yard.worker("threads", 1):
            for n in range(4):
                yard.send("note", n)
            assert sorted(yard.ran(4, DEADLINE_S)) == [*"0123"]
            # They waited for nobody: what is held for long goes on by itself.
            assert yard.witness.told("ended") == []
        for key in "ab":
            yard.witness.release(key)
        yard.ran(2, DEADLINE_S, subject="ended")
    far.close()


def test_a_connection_that_is_lost_before_the_loop_turns_ends_no_worker(yard: Yard) -> None:
    yard.conf["stumbles"] = True
    with yard.worker("prefork", 1) as worker:
        yard.send("note", "up again")
        assert yard.ran(1, DEADLINE_S) == ["up again"]
        assert "stumbled" in worker.log
