"""Workers with a singleton queue under load, an ensemble of three servers, and faults between them.

Every worker reaches every server through its own proxies. The ZooKeeper servers also reach each other through
proxies. So any two processes can be cut off from each other. The book checks the result: it is in a Redis
that no fault affects, and it refuses stale tokens.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import psutil

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import Member, ZooKeeperEnsemble, ZooKeeperServer
from tests.chaos.proxy import Proxy
from tests.singleton.posting_app import Entry
from tests.singleton.posting_workers import PostingWorkers
from tests.singleton.session_takeover import EavesdroppingProxy, end_sessions
from tests.singleton.verdict import Verdict
from tests.workers import WorkerProcess

SESSION_S = 2.0
#: Seconds between two messages, and seconds of work for one message.
PACE_S, WORK_S = 0.05, 0.02
#: Number of messages that must be finished before and after every fault.
STEADY = 8


@dataclass
class SiegeWorker:
    """One worker and the proxies of its connections."""

    process: WorkerProcess
    zookeepers: list[EavesdroppingProxy]
    broker: Proxy

    @property
    def name(self) -> str:
        return self.process.name

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *self.process.children()]


class Siege:
    """A context manager that starts and stops all servers and workers."""

    def __init__(
        self,
        *,
        tick_ms: int = 500,
        session_s: float = SESSION_S,
        workers: int = 2,
        pool: str = "prefork",
        pace_s: float = PACE_S,
    ) -> None:
        self._links: dict[tuple[int, int], Proxy] = {}
        self._session_s = session_s
        self._hands = workers
        self._pool = pool
        self._pace_s = pace_s
        self.ensemble = ZooKeeperEnsemble(tick_ms=tick_ms, route=self._route)
        self.redis, self.book_server = RedisServer(), RedisServer()
        self.siege_workers: list[SiegeWorker] = []
        self.verdict = Verdict()
        self._stop = threading.Event()
        self._load = threading.Thread(target=self._publish, name="siege-load", daemon=True)

    def _route(self, number: int, member: Member) -> Member:
        proxy = self._links[number, member.number] = Proxy(member.quorum).start()
        return member._replace(quorum=proxy.port)

    def __enter__(self) -> Siege:
        self.redis.start()
        self.book_server.start()
        self.ensemble.start()
        self.posting = PostingWorkers(self.redis, self.book_server, 1, election="zookeeper://set-per-worker")
        for _ in range(self._hands):
            self.hire()
        self._load.start()
        self.progress("the start", STEADY)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._load.is_alive():
            self._load.join(10)
        for siege_worker in self.siege_workers:
            self._dismiss(siege_worker)
        self.posting.close()
        for proxy in self._links.values():
            proxy.stop()
        self.ensemble.stop()
        self.redis.stop()
        self.book_server.stop()

    def hire(self) -> SiegeWorker:
        zookeepers = [EavesdroppingProxy(server.port) for server in self.ensemble.servers]
        for proxy in zookeepers:
            proxy.start()
        broker = Proxy(self.redis.port).start()
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in zookeepers)
        worker = self.posting.worker(
            self._pool,
            concurrency=1,
            conf={
                "broker_url": f"dq-redis://127.0.0.1:{broker.port}/1",
                "dq_election": f"zookeeper://{hosts}/posting",
                "dq_election_session": self._session_s,
                # With this setting, some messages are prefetched even on a slow machine.
                "dq_claim_ahead": 1,
                "worker_prefetch_multiplier": 16,
                "broker_transport_options": {"socket_timeout": 3},
            },
        )
        worker.start().wait_ready()
        siege_worker = SiegeWorker(worker, zookeepers, broker)
        self.siege_workers.append(siege_worker)
        return siege_worker

    def _dismiss(self, siege_worker: SiegeWorker) -> None:
        siege_worker.process.discard()
        for proxy in (*siege_worker.zookeepers, siege_worker.broker):
            proxy.stop()

    def _publish(self) -> None:
        with self.posting.app.connection_for_write() as connection:
            while not self._stop.wait(self._pace_s):
                self.posting.send(
                    "post_late", self.verdict.sent, WORK_S, connection=connection, ignore_result=True
                )
                self.verdict.sent += 1

    # -- state

    def last(self) -> Entry:
        return self.posting.book.entries()[-1]

    def leader(self) -> SiegeWorker:
        """Return the worker that wrote the last entry."""
        worker = self.last().worker
        return next(siege_worker for siege_worker in self.siege_workers if siege_worker.name == worker)

    def progress(self, after: str, count: int = STEADY, deadline: float = 40.0) -> None:
        before = len(self.posting.book.numbers("finish"))
        wait_until(
            lambda: len(self.posting.book.numbers("finish")) >= before + count,
            deadline,
            what=lambda: f"progress after {after}; last was {self.last()}\n" + self.logs(),
            interval_s=0.05,
        )

    def replaced(self, token: int, after: str, deadline: float = 40.0) -> None:
        """Wait until a later term has finished a message."""
        wait_until(
            lambda: any(entry.token > token for entry in self.posting.book.entries("finish")),
            deadline,
            what=lambda: f"a term after {token} after {after}\n" + self.logs(),
            interval_s=0.05,
        )

    def logs(self) -> str:
        return "\n".join(
            f"--- {siege_worker.name}\n{siege_worker.process.log[-3000:]}"
            for siege_worker in self.siege_workers
        )

    def server_of(self, siege_worker: SiegeWorker) -> ZooKeeperServer:
        return self.ensemble.servers[self.server_index(siege_worker)]

    def server_index(self, siege_worker: SiegeWorker) -> int:
        """Return the index of the proxy that a worker uses; the worker may be about to change it."""
        return wait_until(lambda: self._server_indexes(siege_worker), 40, what="a connection to ZooKeeper")[0]

    def _server_indexes(self, siege_worker: SiegeWorker) -> list[int]:
        remote = {
            connection.raddr.port
            for connection in psutil.Process(siege_worker.process.pid).net_connections("tcp")
            if connection.raddr and connection.status == psutil.CONN_ESTABLISHED
        }
        return [number for number, proxy in enumerate(siege_worker.zookeepers) if proxy.port in remote]

    # -- faults: each method returns a function that ends the fault

    def kill_leader(self) -> Callable[[], None]:
        siege_worker = self.leader()
        siege_worker.process.process.kill()  # type: ignore[union-attr]
        siege_worker.process.wait(30)

        def heal() -> None:
            self.siege_workers.remove(siege_worker)
            self._dismiss(siege_worker)
            self.hire()

        return heal

    def pause_leader(self) -> Callable[[], None]:
        """Stop all processes of the leader for longer than the session."""
        return self._pause(self.leader().processes())

    def pause_leaders_head(self) -> Callable[[], None]:
        """Stop only the leader's main process; the pool's child continues until its alarm."""
        return self._pause(self.leader().processes()[:1])

    def _pause(self, processes: list[psutil.Process]) -> Callable[[], None]:
        for process in processes:
            process.suspend()

        def heal() -> None:
            for process in processes:
                # The process may die, because its parent continues.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

        return heal

    def pause_its_zookeeper(self) -> Callable[[], None]:
        server = self.server_of(self.leader())
        server.pause()
        return server.resume

    def swallow_its_zookeeper(self) -> Callable[[], None]:
        """Keep the leader's connection to ZooKeeper open, and pass no data."""
        siege_worker = self.leader()
        proxy = siege_worker.zookeepers[self.server_index(siege_worker)]
        proxy.black_hole()
        return proxy.restore

    def cut_its_follower(self) -> Callable[[], None]:
        """Cut the leader's ZooKeeper server off from the ensemble, but not from the leader."""
        leader = self.ensemble.leader().number
        siege_worker = self.leader()
        number = self.server_index(siege_worker) + 1
        if number == leader:
            number = next(server.number for server in self.ensemble.servers if server.number != leader)
        others = [proxy for at, proxy in enumerate(siege_worker.zookeepers) if at != number - 1]
        for proxy in others:
            proxy.black_hole()
            proxy.sever()
        wait_until(
            lambda: self._server_indexes(siege_worker)[:1] == [number - 1],
            40,
            what="the worker at the follower",
        )
        self.progress("moving to the follower", 2)
        link = self._links[number, leader]
        link.black_hole()

        def heal() -> None:
            link.restore()
            link.sever()
            for proxy in others:
                proxy.restore()

        return heal

    def cut_from_zookeeper(self) -> Callable[[], None]:
        return self._swallow(list(self.leader().zookeepers))

    def expire_session(self) -> Callable[[], None]:
        """End the leader's session; the leader gets to know it when a successor may lead already."""
        siege_worker = self.leader()
        self.verdict.ended_early.add(self.last().token)
        end_sessions(siege_worker.zookeepers[self.server_index(siege_worker)], self.ensemble.hosts)
        return lambda: None

    def cut_from_redis(self) -> Callable[[], None]:
        return self._swallow([self.leader().broker])

    def _swallow(self, proxies: list[Proxy]) -> Callable[[], None]:
        for proxy in proxies:
            proxy.black_hole()

        def heal() -> None:
            for proxy in proxies:
                proxy.restore()
                proxy.sever()

        return heal

    def kill_ensemble_leader(self) -> Callable[[], None]:
        server = self.ensemble.leader()
        server.kill()
        return server.restart

    def lose_quorum(self) -> Callable[[], None]:
        servers = self.ensemble.servers[:2]
        for server in servers:
            server.kill()

        def heal() -> None:
            for server in servers:
                server.launch()
            for server in servers:
                server.await_service()

        return heal

    def roll(self) -> Callable[[], None]:
        """Restart every worker with a warm shutdown, under load."""
        for siege_worker in list(self.siege_workers):
            self.hire()
            siege_worker.process.stop(deadline=60)
            self.siege_workers.remove(siege_worker)
            self._dismiss(siege_worker)
        return lambda: None

    # -- verdict

    def suffer(self, fault: str) -> None:
        """Inject one fault, and require steady progress before and after it."""
        self.progress(f"before {fault}")
        token, began = self.last().token, time.monotonic()
        heal = getattr(self, fault)()
        try:
            if fault == "lose_quorum":
                self._nothing_runs()
            elif fault in MUST_REPLACE:
                self.replaced(token, fault)
            if fault in MUST_LAST:
                time.sleep(2 * self._session_s)  # duration of the fault
            if fault != "lose_quorum":
                self.progress(fault)
        finally:
            heal()
        self.progress(f"healing {fault}")
        # A worker that was stopped for too long has died by now, a moment after it was continued.
        self._replace_the_dead()
        self.verdict.outages.append((fault, self._silence(began)))

    def _replace_the_dead(self) -> None:
        """Replace dead workers, as a supervisor would. Without pool processes, the guard kills the worker."""
        for siege_worker in [
            siege_worker for siege_worker in self.siege_workers if not siege_worker.process.alive
        ]:
            self.siege_workers.remove(siege_worker)
            self._dismiss(siege_worker)
            self.hire()

    def _nothing_runs(self) -> None:
        """Check that no worker leads without a quorum after the last term has expired."""
        # No event shows that nothing happens, so the test must wait.
        time.sleep(self._session_s + 1)
        before = self.last()
        time.sleep(1.0)
        assert self.last() == before

    def _silence(self, since: float) -> float:
        """Return the longest time without a finished message."""
        times = [
            since,
            *(entry.monotonic for entry in self.posting.book.entries("finish") if entry.monotonic > since),
        ]
        return max(later - earlier for earlier, later in pairwise(times))

    def judge(self) -> Verdict:
        """Stop the load, let all messages finish, and check the book."""
        self._stop.set()
        self._load.join(10)
        verdict = self.verdict
        wait_until(
            lambda: set(range(verdict.sent)) <= set(self.posting.book.numbers("finish")),
            60,
            what=lambda: (
                f"{sorted(set(range(verdict.sent)) - set(self.posting.book.numbers('finish')))[:20]} open"
                f"\n{self.logs()}"
            ),
        )
        verdict.read(self.posting.book)
        return verdict


#: Faults after which another worker must lead.
MUST_REPLACE = (
    "kill_leader",
    "pause_leader",
    "pause_leaders_head",
    "cut_its_follower",
    "cut_from_zookeeper",
    "expire_session",
)
#: Faults that a session may survive; their duration matters.
MUST_LAST = ("pause_its_zookeeper", "swallow_its_zookeeper", "kill_ensemble_leader")
FAULTS = (
    *MUST_REPLACE,
    "pause_its_zookeeper",
    "swallow_its_zookeeper",
    "cut_from_redis",
    "kill_ensemble_leader",
    "lose_quorum",
    "roll",
)
