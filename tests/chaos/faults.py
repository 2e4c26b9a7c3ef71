"""The faults: drawn from a seed, committed at a share of the progress, recorded for the verdict."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import redis

from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer, SentinelPair
from tests.chaos.chaos_workers import SOFT_TIMEOUT, ChaosWorkers, WorkerPlace
from tests.chaos.mover import Movers

#: The mode whose number of faults is a parameter of its own.
KILL = "kill-worker"

#: The other modes with their relative frequencies.
WEIGHTS = {
    "kill-child": 3,
    "pause": 2,
    "cold": 1,
    "soft": 1,
    "warm": 1,
    "kill-connections": 2,
    "black-hole": 1,
    "script-flush": 1,
    "restart-broker": 1,
}

#: Modes with a Sentinel pair or a cluster only, with a cluster only, and with several partitions only.
FAILOVER = "failover"
MOVE_SLOT = "move-slot"
CHANGE = "change-partitions"
FAILOVER_WEIGHT = 3

#: Seconds for which a slot has keys on two nodes.
MOVE_S = 0.3

#: Modes that interrupt the messages of all workers.
HITS_ALL = ("kill-connections", "restart-broker", FAILOVER, MOVE_SLOT)

#: Modes that hit no single worker.
AT_LARGE = (*HITS_ALL, "script-flush", CHANGE)

#: Modes that need a worker with a soft shutdown, or one without; even places have one.
SOFT, COLD = "soft", "cold"

#: Modes after which messages may run again. A warm stop, a flushed script cache and changed partitions are no
#: reason for that.
EXCUSES = frozenset({KILL, FAILOVER, *WEIGHTS}) - {"warm", "script-flush"}


@dataclass(frozen=True)
class Planned:
    """One fault of the schedule."""

    #: Number of finished messages at which the fault is due.
    at: int
    mode: str
    place: int


@dataclass
class Fault:
    """One committed fault; times on CLOCK_MONOTONIC."""

    mode: str
    #: Node name of the worker that was hit; '' for all workers.
    worker: str
    #: The pool child that was hit; 0 for the whole worker.
    pid: int
    begin: float
    end: float


def draw_schedule(
    seed: int,
    messages: int,
    kills: int,
    others: int,
    workers: int,
    modes: Sequence[str] = (KILL, *WEIGHTS),
) -> list[Planned]:
    """Draw `kills` SIGKILLs of workers and `others` other faults, with jitter over nine tenths of the
    messages.

    Each other mode of `modes` comes once before modes are drawn by weight, so that a short run has seen as
    many modes as possible. Only modes in `modes` are drawn.
    """
    draw = random.Random(f"faults-{seed}")
    rest = [mode for mode in modes if mode != KILL]
    drawn = [KILL] * (kills if KILL in modes else 0)
    if rest and others:
        first = draw.sample(rest, len(rest))[:others]
        weights = [WEIGHTS.get(mode, FAILOVER_WEIGHT) for mode in rest]
        drawn += first + draw.choices(rest, weights, k=others - len(first))
    draw.shuffle(drawn)
    step = 0.9 * messages / max(1, len(drawn))
    return [
        Planned(int(step * (index + draw.uniform(0.2, 0.8))), mode, draw.randrange(workers))
        for index, mode in enumerate(drawn)
    ]


class Saboteur:
    """Commits faults. Longer ones end in :meth:`tend`, which the driver calls in each round."""

    def __init__(
        self,
        workers: ChaosWorkers,
        server: RedisServer | SentinelPair | RedisCluster,
        *,
        lease: float,
        seed: int,
        slots: Sequence[int] = (),
        movers: Movers | None = None,
    ) -> None:
        self.faults: list[Fault] = []
        self._workers = workers
        self._server = server
        self._lease = lease
        self._draw = random.Random(f"victims-{seed}")
        #: Slots of the partitions, on a cluster.
        self._slots = slots
        self._movers = movers
        self._under_way: list[tuple[float, Callable[[], bool]]] = []

    @property
    def idle(self) -> bool:
        return not self._under_way

    def victim(self, planned: Planned) -> WorkerPlace | None:
        """Return the victim: the worker at the fault's place, or the next one without a fault."""
        places = self._workers.places
        if planned.mode in AT_LARGE:
            return places[planned.place]
        turned = places[planned.place :] + places[: planned.place]
        return next((place for place in turned if self._suits(place, planned.mode)), None)

    def _suits(self, place: WorkerPlace, mode: str) -> bool:
        if (
            len(self._workers.places) > 1
            and mode in (SOFT, COLD)
            and (place.number % 2 == 0) != (mode == SOFT)
        ):
            return False
        return not place.busy and place.consumes

    def commit(self, mode: str, place: WorkerPlace) -> Fault:
        now = time.monotonic()
        fault = Fault(mode, "" if mode in AT_LARGE else place.name, 0, now, now)
        self.faults.append(fault)
        acts: dict[str, Callable[[], None]] = {
            KILL: lambda: self._signal(place, signal.SIGKILL),
            "kill-child": lambda: self._kill_child(place, fault),
            "pause": lambda: self._pause(place, fault),
            "warm": lambda: self._stop(place, fault, signal.SIGTERM),
            SOFT: lambda: self._stop(place, fault, signal.SIGQUIT),
            COLD: lambda: self._stop(place, fault, signal.SIGQUIT),
            "kill-connections": self._kill_connections,
            "black-hole": lambda: self._black_hole(place, fault),
            "script-flush": lambda: self._ask("SCRIPT", "FLUSH"),
            "restart-broker": self._restart_broker,
            FAILOVER: lambda: self._fail_over(fault),
            MOVE_SLOT: self._move_slot,
            CHANGE: lambda: self._change_partitions(fault),
        }
        acts[mode]()
        if fault.end == now:
            fault.end = time.monotonic()
        return fault

    def tend(self) -> None:
        """End the faults that are due to end."""
        now = time.monotonic()
        self._under_way = [(due, finish) for due, finish in self._under_way if now < due or not finish()]

    # One fault each.

    def _signal(self, place: WorkerPlace, number: signal.Signals) -> None:
        assert place.worker is not None
        with suppress(ProcessLookupError):
            os.kill(place.worker.pid, number)

    def _kill_child(self, place: WorkerPlace, fault: Fault) -> None:
        assert place.worker is not None
        children = []
        for child in place.worker.children():
            with suppress(psutil.NoSuchProcess):  # it has just gone
                if child.status() != psutil.STATUS_ZOMBIE:
                    children.append(child)
        if not children:
            # A pool without child processes: its only process is the worker.
            fault.mode = KILL
            self._signal(place, signal.SIGKILL)
            return
        fault.pid = self._draw.choice(children).pid
        with suppress(ProcessLookupError):
            os.kill(fault.pid, signal.SIGKILL)

    def _pause(self, place: WorkerPlace, fault: Fault) -> None:
        worker = place.worker
        assert worker is not None
        place.busy = True
        victims = [worker.pid, *(child.pid for child in worker.children())]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        fault.end = float("inf")

        def finish() -> bool:
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            fault.end, place.busy = time.monotonic(), False
            return True

        self._under_way.append((time.monotonic() + 1.5 * self._lease, finish))

    def _stop(self, place: WorkerPlace, fault: Fault, number: signal.Signals) -> None:
        worker = place.worker
        assert worker is not None
        place.busy = True
        fault.end = float("inf")
        self._signal(place, number)
        give_up = time.monotonic() + SOFT_TIMEOUT + 30

        def finish() -> bool:
            if worker.alive and time.monotonic() < give_up:
                return False
            if worker.alive:
                # The worker hangs in its shutdown. That is a finding, and the fault becomes a kill.
                fault.mode += " (hung)"
                self._signal(place, signal.SIGKILL)
                now = time.monotonic()
                self.faults.append(Fault(KILL, worker.name, 0, now, now))
            fault.end, place.busy = time.monotonic(), False
            return True

        self._under_way.append((0, finish))

    def _black_hole(self, place: WorkerPlace, fault: Fault) -> None:
        proxy = place.proxy
        if proxy is None:
            fault.mode = "nothing (no proxy)"
            return
        proxy.black_hole()
        place.busy = True
        fault.end = float("inf")

        def finish() -> bool:
            proxy.restore()
            fault.end, place.busy = time.monotonic(), False
            return True

        self._under_way.append((time.monotonic() + 1.5 * self._lease, finish))

    def _ask(self, *command: str) -> None:
        for port in master_ports(self._server):
            with redis.Redis(port=port) as client:
                client.execute_command(*command)

    def _kill_connections(self) -> None:
        for port in master_ports(self._server):
            with redis.Redis(port=port) as client:
                client.client_kill_filter(_type="normal", skipme=True)
                client.client_kill_filter(_type="pubsub", skipme=True)

    def _restart_broker(self) -> None:
        if isinstance(self._server, RedisServer):
            self._server.kill()
            self._server.restart()

    def _fail_over(self, fault: Fault) -> None:
        if isinstance(self._server, SentinelPair):
            self._server.fail_over()
            fault.end = time.monotonic()
            # Without a replica no publish could be confirmed, and the next failover would fail.
            self._server.rejoin()
        elif isinstance(self._server, RedisCluster):
            self._server.fail_over(self._server.master_of(self._draw.choice(self._slots)))
            fault.end = time.monotonic()
            self._server.restore()

    def _change_partitions(self, fault: Fault) -> None:
        movers = self._movers
        assert movers is not None
        movers.begin()
        fault.end = float("inf")

        def finish() -> bool:
            kills = movers.kills
            is_over = movers.tend()
            now = time.monotonic()
            self.faults += [Fault("kill-mover", "", 0, now, now)] * (movers.kills - kills)
            if not is_over:
                return False
            fault.end = time.monotonic()
            return True

        self._under_way.append((0, finish))

    def _move_slot(self) -> None:
        if isinstance(self._server, RedisCluster):
            cluster, slot = self._server, self._draw.choice(self._slots)
            here = cluster.master_of(slot)
            target = self._draw.choice([each for each in cluster.masters() if each is not here])
            cluster.begin_move(slot, target)
            end = time.monotonic() + MOVE_S
            while time.monotonic() < end:
                cluster.move_keys(slot, here, target, most=3)
                time.sleep(0.01)  # pace of the fault
            cluster.move_keys(slot, here, target)
            cluster.end_move(slot, target)


def master_ports(server: RedisServer | SentinelPair | RedisCluster) -> list[int]:
    """Return the ports of the servers that are asked to store messages now."""
    if isinstance(server, RedisCluster):
        return [node.port for node in server.masters()]
    return [server.master_port() if isinstance(server, SentinelPair) else server.port]
