"""Workers that share a queue under load, while they are killed, stopped, cut off, drained and added.

A steady stream goes into every partition. The time from a message's publication to its start says for how
long no worker served its partition. An independent witness records each start.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.allocation.shared_queue import SESSION_S, SharedQueue, tenants
from tests.broker.worker_app import BROKER_DB
from tests.brokers import DQ
from tests.chaos.proxy import Proxy
from tests.workers import WorkerProcess

#: Seconds beyond the session after which a partition must be served again.
TOLERANCE_S = 2.0
#: Length of a fault that ends by itself, in sessions.
FAULT_SESSIONS = 3.0


class Start(NamedTuple):
    """A message that a worker began."""

    number: int
    partition: int
    sent_at: float
    began_at: float
    worker: str


class Verdict(NamedTuple):
    """The outcome of a fault run."""

    published: int
    lost: int
    repeated: int
    overlaps: int
    faults: list[tuple[str, float]]
    generations: int
    longest_wait_s: float

    @property
    def sound(self) -> bool:
        """Whether no message was lost, and no partition unserved for too long."""
        return self.lost == 0 and self.longest_wait_s <= SESSION_S + TOLERANCE_S

    def __str__(self) -> str:
        rows = "\n".join(f"  {name:14} longest wait {wait_s:5.2f} s" for name, wait_s in self.faults)
        return (
            f"{rows}\npublished {self.published}, lost {self.lost}, repeated {self.repeated}, started by two "
            f"workers in turn (overlaps) {self.overlaps}, generations {self.generations}, longest wait "
            f"{self.longest_wait_s:.2f} s"
        )


class Post:
    """One worker, behind a proxy to Redis and one to ZooKeeper."""

    def __init__(self, siege: Siege, name: str) -> None:
        self.redis: Proxy = Proxy(siege.redis.port).start()
        host, _, port = siege.zookeeper.hosts.partition(":")
        self.zookeeper: Proxy = Proxy(int(port), host).start()
        conf = {
            **siege.queue.conf,
            "broker_url": DQ.url(self.redis.port, BROKER_DB),
            "dq_election": f"zookeeper://127.0.0.1:{self.zookeeper.port}",
        }
        self._make: Callable[[], WorkerProcess] = lambda: WorkerProcess(
            "tests.allocation.siege_app",
            broker=DQ,
            conf=conf,
            pool=siege.pool,
            concurrency=2,
            name=name,
            preloaded=True,
        )
        self.process = self._make().start()

    def stop(self, how: signal.Signals) -> None:
        self.process.stop(how)

    def send(self, number: signal.Signals) -> None:
        assert self.process.process is not None
        self.process.process.send_signal(number)

    def restart(self, how: signal.Signals | None = None) -> None:
        """Start the worker again, under the same name; stop it before."""
        if how is not None:
            self.stop(how)
        self.process.discard()
        self.process = self._make().start()

    def close(self) -> None:
        self.process.discard()
        for proxy in (self.redis, self.zookeeper):
            proxy.stop()


class Siege:
    """The fault run; a context manager.

    Args:
        workers: Number of workers.
        partitions: Number of partitions.
        rate: Messages per second into each partition.
        pool: The pool of the workers.
        seed: Seed for the choice of the workers.
    """

    def __init__(
        self, workers: int = 3, partitions: int = 8, rate: float = 5.0, pool: str = "threads", seed: int = 1
    ) -> None:
        self.pool = pool
        self._worker_count, self._partitions, self._rate = workers, partitions, rate
        self._chance = random.Random(seed)
        self._faults: list[tuple[str, float, float]] = []
        self._published = 0
        self._ends = threading.Event()
        self._tenants = tenants(partitions)
        self.redis = RedisServer()
        self.zookeeper = ZooKeeperServer(tick_ms=200)

    def __enter__(self) -> Siege:
        self.redis.start()
        self.zookeeper.start()
        self.queue = SharedQueue(self.redis, self.zookeeper.hosts, self._partitions)
        self._names = (f"s{number}" for number in range(1_000))
        self.posts: list[Post] = []
        for _ in range(self._worker_count):
            self.add()
        for post in self.posts:
            post.process.wait_ready()
        self.queue.wait_settled(*(post.process.name for post in self.posts))
        self._load = threading.Thread(target=self._publish)
        self._load.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._load.join(30)
        if error is not None:
            for post in self.posts:
                lines = [line for line in post.process.log.splitlines() if "Task mark" not in line]
                print(f"log of {post.process.name}:", *lines[-60:], sep="\n")
        for post in self.posts:
            post.close()
        self.queue.close()
        self.zookeeper.stop()
        self.redis.stop()

    def _publish(self) -> None:
        due = time.monotonic()
        while not self._ends.is_set():
            for partition, tenant in enumerate(self._tenants):
                self.queue.send("mark", self._published, partition, time.time(), tenant=tenant)
                self._published += 1
            due += 1 / self._rate
            self._ends.wait(max(due - time.monotonic(), 0.0))

    def add(self) -> None:
        """Start another worker."""
        self.posts.append(Post(self, next(self._names)))

    # -- faults

    def suffer(self, fault: str) -> None:
        """Cause one fault, and wait until each partition has a living worker again."""
        began = time.time()
        post = self._chance.choice(self.posts)
        begin, end = FAULTS[fault]
        begin(self, post)
        # A gap shows in the messages that are sent during the fault.
        self._ends.wait(FAULT_SESSIONS * SESSION_S)
        end(self, post)
        self.queue.wait_settled(*(each.process.name for each in self.posts))
        self._ends.wait(SESSION_S)
        self._faults.append((fault, began, time.time()))

    # -- verdict

    def judge(self) -> Verdict:
        """End the load, wait for the last message, and compare what was published with what began."""
        self._ends.set()
        self._load.join(30)
        wait_until(
            lambda: self.queue.stored() == 0, 60, what=lambda: f"{self.queue.stored()} messages are left"
        )
        starts = sorted(
            (Start(*json.loads(each)) for each in self.queue.witness.reports("ran")),
            key=lambda start: start.began_at,
        )
        first: dict[int, Start] = {}
        for start in starts:
            first.setdefault(start.number, start)
        waits = [(name, _longest(first, began, ended)) for name, began, ended in self._faults]
        return Verdict(
            self._published,
            self._published - len(first),
            len(starts) - len(first),
            _overlaps(starts),
            waits,
            self.queue.generation.number,
            _longest(first, 0.0, time.time()),
        )


Act = Callable[[Siege, Post], object]
#: The beginning and the end of each fault, which a worker suffers.
FAULTS: dict[str, tuple[Act, Act]] = {
    "kill": (lambda _, post: post.stop(signal.SIGKILL), lambda _, post: post.restart()),
    "restart_killed": (lambda _, post: post.restart(signal.SIGKILL), lambda *_: None),
    "pause": (lambda _, post: post.send(signal.SIGSTOP), lambda _, post: post.send(signal.SIGCONT)),
    "cut_redis": (lambda _, post: post.redis.black_hole(), lambda _, post: post.redis.restore()),
    "cut_zookeeper": (lambda _, post: post.zookeeper.black_hole(), lambda _, post: post.zookeeper.restore()),
    "add": (lambda siege, _: siege.add(), lambda *_: None),
    "stop": (lambda _, post: post.stop(signal.SIGTERM), lambda _, post: post.restart()),
    "stop_zookeeper": (lambda siege, _: siege.zookeeper.kill(), lambda siege, _: siege.zookeeper.restart()),
    # Its data are gone.
    "rebuild_zookeeper": (lambda siege, _: siege.zookeeper.stop(), lambda siege, _: siege.zookeeper.start()),
}


def _longest(first: dict[int, Start], began: float, ended: float) -> float:
    """Return the longest wait of the messages that were sent in this time."""
    waits = [start.began_at - start.sent_at for start in first.values() if began <= start.sent_at <= ended]
    return max(waits, default=0.0)


def _overlaps(starts: list[Start]) -> int:
    """Return how many starts lie between two starts of another worker, within two seconds, in a partition."""
    found = 0
    recent: dict[int, list[Start]] = {}
    for start in starts:
        line = [each for each in recent.get(start.partition, []) if start.began_at - each.began_at < 2.0]
        workers = [each.worker for each in line]
        if start.worker in workers:
            found += sum(worker != start.worker for worker in workers[workers.index(start.worker) :])
            line = []
        recent[start.partition] = [*line, start]
    return found
