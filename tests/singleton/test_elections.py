"""Servers of elections: a server that loses its data, the broker with ZooKeeper, and no server."""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_dq.errors import ConfigurationError
from celery_dq.leadership.career import Term
from celery_dq.leadership.elector import LeaderElector
from celery_dq.options.resolve import resolve
from celery_dq.singleton.elections import Elections
from celery_dq.testing.waiting import wait_until
from celery_dq.worker.singleton import ARGUMENT
from tests.chaos.proxy import Proxy
from tests.rabbitmq import RabbitMQServer
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import PostingWorkers


def test_a_server_that_forgets_everything_hands_out_no_token_again(redis_posting: PostingWorkers) -> None:
    with redis_posting.worker("prefork", 1) as worker:
        redis_posting.post(range(3))
        redis_posting.finished(3)
        # The same worker is elected by a server that knows neither its terms nor the queue.
        redis_posting.forget_everything()
        worker.wait_for_log("was elected to lead", 30, occurrences=2)
        redis_posting.post(range(3, 6))
        assert redis_posting.finished(6, 30) == list(range(6))
    assert [entry.token for entry in redis_posting.book.entries("start")] == [1, 1, 1, 2, 2, 2]


def test_on_the_broker_in_zookeeper_a_queue_has_one_leader(
    open_posting: Callable[..., PostingWorkers], hosts: str
) -> None:
    url = f"dq-zookeeper://{hosts}"
    posting = open_posting(broker="zookeeper", broker_url=url, election=f"zookeeper://{hosts}")
    with posting.worker("threads", 2), posting.worker("threads", 2):
        posted = posting.post(range(6), seconds=0.1)
        assert posting.finished(6, 40) == posted
    assert posting.overlaps() == 0
    assert {entry.token for entry in posting.book.entries()} == {1}


def test_on_the_broker_in_zookeeper_a_successor_waits_for_the_message_of_a_killed_leader(
    open_posting: Callable[..., PostingWorkers], hosts: str
) -> None:
    """The session of the broker may be longer than that of the election, and keeps the dead leader's lock."""
    posting = open_posting(
        broker="zookeeper",
        broker_url=f"dq-zookeeper://{hosts}",
        broker_transport_options={"session_timeout": 3},
        election=f"zookeeper://{hosts}",
        dq_election_session=1,
    )
    first = posting.worker("threads", 1)
    with first, posting.worker("threads", 1):
        posting.send("hold_late", 0)
        posting.post(range(1, 6), task="post_late")
        posting.wait_started(0)
        first.stop(signal.SIGKILL)
        posting.wait_started(0, times=2)
        posting.book.release("0")
        assert posting.finished(6, 20) == list(range(6))
    assert posting.book.numbers("start") == [0, *range(6)]


def test_a_standby_worker_has_nothing_to_hand_over(redis_posting: PostingWorkers) -> None:
    with (
        redis_posting.worker("threads", 1),
        redis_posting.worker("threads", 1),
        redis_posting.worker("threads", 1, queues=["mail"]),
    ):
        # All candidates have answered: the third worker does not wait for the election.
        leader = redis_posting.leader(3)
        (stand_by,) = {"w1@proof", "w2@proof"} - {leader}

        def resign(node: str) -> Any:
            ((answer,),) = (
                each.values()
                for each in redis_posting.app.control.broadcast(
                    "resign", {"queue": QUEUE}, reply=True, timeout=20.0, limit=1, destination=[node]
                )
                or []
            )
            return answer

        # The leader comes last, because the stand-by is elected at once.
        assert resign("w3@proof") == {"error": f"this worker is not a candidate for queue {QUEUE!r}"}
        assert resign(stand_by) == {
            "ok": f"this worker does not lead {QUEUE!r}, and has nothing to hand over"
        }
        assert resign(leader) == {"ok": f"this worker hands over {QUEUE!r}"}
        wait_until(lambda: redis_posting.leader() != leader, 30)


def test_rabbitmq_keeps_its_own_argument_without_an_election(
    open_posting: Callable[..., PostingWorkers], rabbitmq_server: RabbitMQServer
) -> None:
    name = f"one-{uuid.uuid4().hex[:8]}"
    declared = {"exchange": name, "binding_key": name, "queue_arguments": {ARGUMENT: True}}
    posting = open_posting(
        broker="stock",
        broker_url=rabbitmq_server.url(),
        task_default_queue=name,
        task_queues={name: declared},
        dq_singleton_queues=[],
    )
    with posting.worker("solo", 1, queues=[name]):
        posted = posting.post(range(2))
        assert posting.finished(2, 40) == posted
    assert {entry.token for entry in posting.book.entries()} == {0}
    with posting.app.connection_for_write() as connection:
        channel: Any = connection.default_channel
        channel.queue_delete(name)


def test_a_missing_election_server_is_an_error_that_names_the_queues() -> None:
    with pytest.raises(ConfigurationError, match=r"'ledger' .* dq_election to zookeeper://"):
        Elections(resolve({}), "w1", None, "the queue 'ledger'")


def test_a_zookeeper_without_its_client_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kazoo", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'celery-dq\[zookeeper\]'"):
        Elections(resolve({"dq_election": "zookeeper://zoo1:2181"}), "w1", None, "the queue 'ledger'")


def test_wrong_credentials_are_reported_by_the_users_name_for_them() -> None:
    options = resolve({"dq_election": "zookeeper://zoo1", "dq_election_options": {"auth": [("digest", "a")]}})
    with pytest.raises(ConfigurationError, match=r"dq_election_options\['auth'\]"):
        Elections(options, "w1", None, "the queue 'ledger'").candidate("ledger")


@pytest.mark.parametrize("kind", ["redis", "zookeeper"])
def test_the_balance_of_many_queues_costs_few_requests(kind: str, request: pytest.FixtureRequest) -> None:
    """With several requests per queue and candidate, 500 queues of 20 workers cost 70,000 a second."""
    queues = [f"ledger-{number}" for number in range(40)]
    where = f"zookeeper://{request.getfixturevalue('hosts')}" if kind == "zookeeper" else None
    options = resolve({"dq_election": where or request.getfixturevalue("quiet_redis_url")})
    workers = [Elections(options, f"w{number}", None, "the test") for number in range(3)]
    candidates = [[worker.candidate(queue) for queue in queues] for worker in workers]
    try:
        for line in candidates:
            for candidate in line:
                candidate.become_candidate()
        candidates[0][0].accept(0, 0.0)
        lines = workers[2].read(queues)
        assert [who.partition(":")[0] for who in lines[queues[0]]] == ["w0", "w1", "w2"]
        assert all(len(line) == 3 for line in lines.values())
        before = requests(kind, request)
        assert workers[2].read(queues) == lines
        # Two commands per queue in Redis, and none in ZooKeeper, whose pings count.
        assert requests(kind, request) - before < (85 if kind == "redis" else 10)
        candidates[0][0].resign(clean=True)
        if kind == "zookeeper":
            wait_until(lambda: workers[2].changed, 30)
        assert [who.partition(":")[0] for who in workers[2].read(queues)[queues[0]]] == ["w1", "w2"]
        assert not workers[2].changed
    finally:
        for worker in workers:
            worker.close()


class Idle:
    """The work of a leader that does nothing."""

    def floor(self) -> int:
        return 0

    def serve(self, term: Term) -> None:
        term.inaugurated()
        term.wait()

    def trust(self, term: Term, until: float) -> None:
        pass

    def abort(self, term: Term) -> None:
        pass


@pytest.mark.parametrize("kind", ["redis", "zookeeper"])
def test_an_outage_is_one_warning_for_all_queues_of_a_worker(
    kind: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker of 50 queues logged 50 warnings."""
    server: Any = request.getfixturevalue("redis_server" if kind == "redis" else "zookeeper")
    proxy = Proxy(server.port).start()
    where = f"{kind}://127.0.0.1:{proxy.port}/{'0' if kind == 'redis' else uuid.uuid4().hex}"
    elections = Elections(resolve({"dq_election": where, "dq_election_session": 2}), "w", None, "the test")
    electors = [LeaderElector(elections.candidate(f"{kind}-{number}"), Idle()) for number in range(8)]
    try:
        for elector in electors:
            elector.open()
        wait_until(lambda: all(elector.term is not None for elector in electors), 30)
        caplog.clear()  # on a busy machine the first answers may come late, which is an outage of its own
        proxy.stop()
        wait_until(lambda: all(elector.term is None for elector in electors), 30)
        # Each candidate has tried again.
        wait_until(lambda: all(elector._failures > 1 for elector in electors), 30)
        outages = [each for each in caplog.records if "_outage_began" in getattr(each, "event", "")]
        assert len(outages) == 1
        if kind == "zookeeper":
            warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
            # After two sessions, another line says how the process connects from then on.
            assert [each for each in warnings if "has accepted no connection" not in each.msg] == outages
    finally:
        proxy.stop()
        closing = [threading.Thread(target=elector.close) for elector in electors]
        for each in closing:
            each.start()
        for each in closing:
            each.join(30)
        elections.close()


def requests(kind: str, request: pytest.FixtureRequest) -> int:
    """Return the number of requests that the server has received."""
    if kind == "redis":
        with redis.Redis.from_url(request.getfixturevalue("quiet_redis_url")) as client:
            return int(client.info("stats")["total_commands_processed"])
    mntr = request.getfixturevalue("zookeeper").ask("mntr")
    return int(re.search(r"zk_packets_received\t(\d+)", mntr)[1])  # type: ignore[index]
