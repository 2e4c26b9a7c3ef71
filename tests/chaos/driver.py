"""One chaos run, from the plan to the verdict."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer, SentinelPair
from celery_dq.testing.waiting import wait_until
from tests.brokers import Broker
from tests.chaos.chaos_workers import ChaosWorkers
from tests.chaos.faults import (
    CHANGE,
    FAILOVER,
    KILL,
    MOVE_SLOT,
    WEIGHTS,
    Saboteur,
    draw_schedule,
    master_ports,
)
from tests.chaos.ledger import Entry, Ledger
from tests.chaos.load import LoadGenerator, draw_messages
from tests.chaos.mover import IN_ORDER, Movers, prepare
from tests.chaos.tasks import NAME, add_tasks
from tests.chaos.verdict import Verdict, judge
from tests.workers import make_app

#: Partitions of the queue on a cluster.
PARTITIONS = 6
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Plan:
    """The parameters of a run, besides the broker."""

    seed: int = 7
    messages: int = 2000
    #: SIGKILLs of workers.
    kills: int = 4
    #: Faults of the other modes.
    others: int = 6
    workers: int = 3
    concurrency: int = 2
    pool: str = "prefork"
    tenants: int = 20
    #: Mean length of a task, in milliseconds.
    work_ms: float = 4.0
    #: Limit of messages that are published and not finished. A redelivered message waits for its tenant's
    #: turn, so with many messages a recovery lasts as long as a turn of all tenants.
    ahead: int = 2000
    #: Lease in seconds, where the broker has one.
    lease: float = 3.0
    #: Seconds without progress after which the run ends, with messages missing.
    patience: float = 20.0
    modes: tuple[str, ...] = (KILL, *WEIGHTS, FAILOVER, MOVE_SLOT, CHANGE)
    #: Partitions of the queue at the start; more than one lets their number and spreads change under way. A
    #: cluster begins with :data:`PARTITIONS`.
    partitions: int = 1
    #: Whether to use a Sentinel pair instead of one server, with failovers instead of proxies and restarts.
    sentinel: bool = False
    #: Whether to use a Redis Cluster instead, with failovers and moving slots.
    cluster: bool = False
    #: With replicas and leases: ``dq_confirm_replicas``. With 0 a failover may lose messages that were
    #: confirmed just before it.
    confirm_replicas: int = 1
    #: Stock only: seconds until an unacknowledged message goes to another worker; kombu's default.
    visibility_timeout: float = 3600.0


def run(broker: Broker, plan: Plan, log: Callable[[str], None] = lambda text: None) -> Verdict:
    """Run `plan` on `broker`, with servers that are started and removed here."""
    broker.prepare()
    with ExitStack() as stack:
        books = stack.enter_context(RedisServer())
        server: RedisServer | SentinelPair | RedisCluster
        if plan.cluster:
            server = stack.enter_context(RedisCluster())
        elif plan.sentinel:
            server = stack.enter_context(SentinelPair())
        else:
            server = stack.enter_context(RedisServer(appendonly=True))
        ledger = Ledger(books.port)
        stack.callback(ledger.close)
        return _Run(broker, plan, server, ledger, books.port, log, stack).go()


class _Run:
    def __init__(
        self,
        broker: Broker,
        plan: Plan,
        server: RedisServer | SentinelPair | RedisCluster,
        ledger: Ledger,
        ledger_port: int,
        log: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        self._plan = plan
        self._log = log
        self._server = server
        self._has_leases = broker.has_leases
        self._partitions = PARTITIONS if plan.cluster else plan.partitions
        self._changes = broker.has_leases and self._partitions > 1 and CHANGE in plan.modes
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="chaos-spill-")))
        has_replicas = plan.sentinel or plan.cluster
        self._replicas = plan.confirm_replicas if has_replicas and broker.has_leases else 0
        self._ledger = ledger
        self._entries: list[Entry] = []
        self._done: set[str] = set()
        conf = self._conf(broker, ledger_port)
        spills = {"dq_buffer_folder": str(folder)} if self._changes else {}
        self._app = add_tasks(make_app(NAME, broker, {**conf, **spills}), ledger_port)
        stack.callback(self._app.close)
        movers = Movers(broker, conf, plan.seed) if self._changes else None
        if movers is not None:
            prepare(self._app)
            stack.callback(movers.stop)
        self._workers = ChaosWorkers(
            broker=broker,
            conf=conf,
            workers=plan.workers,
            pool=plan.pool,
            concurrency=plan.concurrency,
            broker_port=server.port if isinstance(server, RedisServer) else 0,
            behind_proxy=not has_replicas,
        )
        stack.callback(self._workers.dismiss)
        keys = [PartitionKeys("online", NAME, number, on_cluster=True) for number in range(PARTITIONS)]
        slots = [each.slot for each in keys]
        self._saboteur = Saboteur(
            self._workers, server, lease=plan.lease, seed=plan.seed, slots=slots, movers=movers
        )
        self._schedule = draw_schedule(
            plan.seed, plan.messages, plan.kills, plan.others, plan.workers, self._modes()
        )
        self._load = LoadGenerator(
            self._app,
            draw_messages(plan.seed, plan.messages, plan.tenants, plan.work_ms),
            finished=lambda: len(self._done),
            await_broker=self._await_broker,
            ahead=plan.ahead,
            replicated=self._replicas > 0,
            options=(lambda message: {"tenant": message.tenant}) if broker.has_leases else lambda message: {},
            # Of a tenant all or none, because nothing orders a call and a buffered one.
            buffered=lambda message: self._changes and message.tenant[-1] in "02468",
        )
        stack.callback(self._load.stop)

    def _modes(self) -> tuple[str, ...]:
        # Servers with replicas have no proxy, and do not write to disk.
        unfit = ["black-hole", "restart-broker"] if self._plan.sentinel or self._plan.cluster else [FAILOVER]
        unfit += [] if self._plan.cluster else [MOVE_SLOT]
        unfit += [] if self._changes else [CHANGE]
        return tuple(mode for mode in self._plan.modes if mode not in unfit)

    def _conf(self, broker: Broker, ledger_port: int) -> dict[str, Any]:
        options: dict[str, Any] = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0}
        conf: dict[str, Any] = {"ledger_port": ledger_port, "worker_prefetch_multiplier": 4}
        if isinstance(self._server, SentinelPair):
            conf["broker_url"] = self._server.url(scheme=broker.sentinel_scheme)
            options["master_name"] = self._server.name
        elif isinstance(self._server, RedisCluster):
            conf["broker_url"] = self._server.url(scheme=broker.scheme)
        else:
            conf["broker_url"] = broker.url(self._server.port)
        if broker.has_leases:
            conf["dq_queues"] = {NAME: {"partitions": self._partitions}}
            conf["dq_lease"] = self._plan.lease
            conf["dq_confirm_replicas"] = self._replicas
        else:
            options["visibility_timeout"] = self._plan.visibility_timeout
        return {**conf, "broker_transport_options": options, "broker_connection_max_retries": None}

    def go(self) -> Verdict:
        plan = self._plan
        self._workers.start()
        self._log(f"{plan.workers} workers are ready")
        self._load.start()
        schedule = list(self._schedule)
        last_progress, seen = time.monotonic(), 0
        while True:
            self._read()
            if len(self._done) != seen:
                last_progress, seen = time.monotonic(), len(self._done)
            stalled = time.monotonic() - last_progress
            self._saboteur.tend()
            # A stall triggers the next fault early, so that the schedule is completed even with stuck
            # messages.
            due = bool(schedule) and (seen >= schedule[0].at or stalled > plan.lease * 2)
            victim = self._saboteur.victim(schedule[0]) if due else None
            if victim is not None:
                fault = self._saboteur.commit(schedule.pop(0).mode, victim)
                last_progress = time.monotonic()
                self._log(f"{seen} finished: {fault.mode} {fault.worker or '(all)'}")
            self._workers.fill_empty()
            complete = self._load.done and seen >= len(self._load.published.confirmed)
            if complete and not schedule and self._saboteur.idle:
                break
            if (
                stalled > plan.patience
                and self._saboteur.idle
                and (not schedule or stalled > 3 * plan.patience)
            ):
                self._log(f"no progress for {stalled:.0f} s: giving up on the rest")
                break
            self._turn()
        self._load.stop()
        self._await_quiet()
        left = self._left_in_broker()
        lease_s = plan.lease if self._has_leases else 0.0
        in_order = IN_ORDER if self._changes else ()
        return judge(self._load.published, self._entries, self._saboteur.faults, left, lease_s, in_order)

    def _turn(self) -> None:
        """Wait a short time for new lines in the ledger."""
        size = len(self._entries)

        def grown() -> bool:
            self._read()
            return len(self._entries) > size

        try:
            wait_until(grown, 0.05, interval_s=0.005)
        except TimeoutError:
            return

    def _await_quiet(self) -> None:
        """Wait until the ledger had no new line for more than a lease, in which late duplicates run."""
        silence, size, limit = time.monotonic(), len(self._entries), time.monotonic() + 10 * self._plan.lease
        while time.monotonic() < min(silence + self._plan.lease + 1, limit):
            self._turn()
            if len(self._entries) != size:
                silence, size = time.monotonic(), len(self._entries)

    def _read(self) -> None:
        new = self._ledger.read_new()
        self._entries += new
        self._done.update(entry.message for entry in new if entry.event == "finish")

    def _await_broker(self) -> None:
        def answers() -> bool:
            try:
                if isinstance(self._server, RedisCluster) and not self._server.is_whole():
                    return False
                for port in master_ports(self._server):
                    with redis.Redis(port=port, socket_timeout=1) as client:
                        # A message that needs replicas cannot be published before they are back.
                        if not (client.ping() and client.wait(self._replicas, 100) >= self._replicas):
                            return False
                return True
            except (redis.RedisError, OSError, RuntimeError):
                return False

        wait_until(answers, 60)

    def _left_in_broker(self) -> set[str]:
        """Return each task id in any key of the broker, independent of its layout."""
        found: set[str] = set()
        for port in master_ports(self._server):
            with redis.Redis(port=port) as client:
                found |= _ids_in(client)
        return found


def _ids_in(client: Any) -> set[str]:
    found: set[str] = set()
    for key in client.scan_iter(count=1000):
        kind = client.type(key)
        found.update(match.decode() for match in _UUID.findall(client.dump(key) or b""))
        if kind == b"hash":
            for field, value in client.hscan_iter(key, count=1000):
                found.update(match.decode() for match in _UUID.findall(field + value))
        elif kind == b"list":
            for value in client.lrange(key, 0, -1):
                found.update(match.decode() for match in _UUID.findall(value))
        elif kind == b"zset":
            for value, _ in client.zscan_iter(key, count=1000):
                found.update(match.decode() for match in _UUID.findall(value))
    return found


def log_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
