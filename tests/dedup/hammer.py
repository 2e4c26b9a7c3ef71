"""``python -m tests.dedup.hammer``: a load test of few keys with many processes and threads, and a judge.

The hammer runs the scripts of the tenant broker without Celery. Pushers publish calls. Workers claim them,
settle half of the messages early, wait a moment, and finish, release or die. Some worker processes are
killed by SIGKILL, or stop for longer than their lease, so that others reap them. Every event gets a number
and a time in another database of the same Redis, so that the judge can order all events.

The judge (:mod:`tests.dedup.hammer_judge`) checks four rules. No two calls of a key run at the same time,
except for counted overlaps by an eviction or a lost lease. No two are blocked. No key is left behind. No
update is lost: the covering call of a declined one started after the declined one was made, or was
cancelled with it.

A million calls, as 8 processes with 64 threads::

    python -m tests.dedup.hammer --calls 1000000 --kills 200
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from celery_dq.inspector.dedup_locks import verdicts
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.dedup.hammer_judge import Event, Verdict, judge

EVENTS, CLOCK = "events", "clock"
#: Time limits in seconds: of all calls, and of the work that is left after them.
PUSHING_S, DRAINING_S = 7_200.0, 60.0

# Numbers and stores an event in one atomic step.
RECORD_EVENT = """
local n, t = redis.call('INCR', KEYS[2]), redis.call('TIME')
redis.call('RPUSH', KEYS[1], n .. ' ' .. t[1] .. string.format('%06d', t[2]) .. ' ' .. ARGV[1])
return n
"""


@dataclass(frozen=True)
class Plan:
    seed: int = 1
    calls: int = 20_000
    keys: int = 100
    #: Number of processes that publish.
    pushers: int = 4
    workers: int = 4
    #: Number of threads in each process.
    threads: int = 8
    kills: int = 3
    #: How often a worker is stopped for longer than its lease.
    stalls: int = 0
    timeout_us: int = 0
    lease_ms: int = 2_000


class Hand:
    """The connections of one thread."""

    def __init__(self, port: int) -> None:
        self.client: Any = redis.Redis(port=port, db=1, socket_timeout=60)
        self.journal: Any = redis.Redis(port=port, db=2, socket_timeout=60)
        self.partition = Partition(PartitionKeys("online", "cache"), load_scripts())
        self._record = self.journal.register_script(RECORD_EVENT)

    def record(self, what: str, key: str, call: str, **more: Any) -> None:
        self._record([EVENTS, CLOCK], [json.dumps([what, key, call, more])])

    def now(self) -> int:
        """A number that is smaller than those of all later events."""
        return int(self.journal.incr(CLOCK))


def push(port: int, plan: Plan, pusher: int) -> None:
    """Run one process that publishes."""
    amount = plan.calls // (plan.pushers * plan.threads)
    _in_threads(plan.threads, lambda thread: _push(Hand(port), plan, f"{pusher}.{thread}", amount))


def _push(hand: Hand, plan: Plan, name: str, amount: int) -> None:
    chance = random.Random(f"{plan.seed}/{name}")
    for number in range(amount):
        key = f"k{min(int(abs(chance.gauss(0, plan.keys / 3))), plan.keys - 1)}"
        call = f"{name}.{number}"
        section = DedupSection(key, timeout_us=plan.timeout_us, replace=chance.random() < 0.05)
        record = MessageRecord("", "refresh", 0, 0, 0, b"{}", "[]", section.pack()).pack()
        made = hand.now()
        (pushed,) = hand.partition.push([OutgoingRecord(0, call, record)]).run(hand.client)
        hand.record(pushed.status, key, call, covering=pushed.covering, replaced=pushed.replaced, made=made)


def work(port: int, plan: Plan, name: str, ready: Any) -> None:
    """Run one process that works: all its threads share one lease, as in a Celery worker."""
    threading.Thread(target=_renew, args=(Hand(port), plan, name), daemon=True).start()
    ready.set()
    _in_threads(plan.threads, lambda thread: _work(Hand(port), plan, name, thread))


def _in_threads(amount: int, target: Any) -> None:
    threads = [threading.Thread(target=target, args=(thread,), daemon=True) for thread in range(amount)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _renew(hand: Hand, plan: Plan, name: str) -> None:
    while True:
        sent = _microseconds()
        hand.partition.heartbeat(name, lease_ms=plan.lease_ms, max_deliveries=0).run(hand.client)
        hand.record("renewed", "", name, sent=sent)
        time.sleep(plan.lease_ms / 4000)  # the pace of the heartbeat


def _microseconds() -> int:
    # The server runs on this machine, and so has the same clock.
    return time.time_ns() // 1000


def _work(hand: Hand, plan: Plan, name: str, thread: int) -> None:
    chance = random.Random(f"{plan.seed}/{name}/{thread}")
    while True:
        asked, asked_at = hand.now(), _microseconds()
        claimed = hand.partition.claim(name, lease_ms=plan.lease_ms, want=1, max_deliveries=0).run(
            hand.client
        )
        if not claimed.entries:
            if hand.journal.get("over") is not None:
                return
            time.sleep(0.002)  # the pace of an idle worker
            continue
        (entry,) = claimed.entries
        key = DedupSection.unpack(MessageRecord.unpack(entry.record).dedup).key
        if entry.reason:
            hand.partition.ack(name, finish=[entry.tag]).run(hand.client)
            continue
        reported: dict[str, Any] = {"claim": int(entry.claim), "worker": name}
        hand.record("start", key, entry.id, asked=asked, asked_at=asked_at, **reported)
        if chance.random() < 0.5:
            hand.partition.ack(name, settle=[entry.tag]).run(hand.client)
        time.sleep(chance.random() * 0.002)  # the work
        requeue = chance.random() < 0.02
        hand.record("end", key, entry.id, **reported)
        if requeue:
            stale = hand.partition.release(name, [entry.tag], mode="requeue").run(hand.client)
        else:
            stale = hand.partition.ack(name, finish=[entry.tag]).run(hand.client)
        if stale:
            # The process was stopped for longer than its lease, and taken for dead.
            hand.record("stale", key, entry.id, **reported)


class Journal:
    """The events, in a file because they do not fit into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._over = threading.Event()

    def write(self, hand: Hand) -> None:
        """Fetch the recorded events until the run is over and none is left."""
        with self.path.open("ab") as file:
            while True:
                over = self._over.is_set()
                lines = hand.journal.lpop(EVENTS, 5_000)
                if lines:
                    file.write(b"\n".join(lines) + b"\n")
                elif over:
                    return
                else:
                    time.sleep(0.05)  # the pace of the journal

    def close(self) -> None:
        self._over.set()

    def __iter__(self) -> Iterator[Event]:
        with self.path.open("rb") as file:
            for line in file:
                number, at, text = line.split(b" ", 2)
                yield Event(int(number), int(at), *json.loads(text))


class Works:
    """The worker processes, some of which are killed."""

    def __init__(self, port: int, plan: Plan, hand: Hand) -> None:
        self._port, self._plan, self._hand = port, plan, hand
        # Imports take longer than a short run, so that one process makes them for all others.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([work.__module__])
        self._serial = 0
        self._workers: dict[str, Any] = {}

    def process(self, target: Any, *args: Any) -> Any:
        started = self._context.Process(target=target, args=(self._port, self._plan, *args), daemon=True)
        started.start()
        return started

    def start(self) -> None:
        self._serial += 1
        name, ready = f"w{self._serial}", self._context.Event()
        self._workers[name] = self.process(work, name, ready)
        ready.wait(60)

    def kill(self, chance: random.Random) -> None:
        name = chance.choice(sorted(self._workers))
        victim = self._workers.pop(name)
        self._hand.record("dying", "", name)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(30)
        self._hand.record("dead", "", name)

    def stall(self, chance: random.Random) -> None:
        victim = self._workers[chance.choice(sorted(self._workers))]
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(self._plan.lease_ms / 1000 * 1.5)  # the duration of the stop
        os.kill(victim.pid, signal.SIGCONT)

    def join(self) -> None:
        for process in self._workers.values():
            process.join(60)


def hammer(plan: Plan) -> Verdict:
    """Run the plan on a new server, and judge it."""
    chance = random.Random(plan.seed)
    with RedisServer() as server, tempfile.TemporaryDirectory(prefix="dedup-hammer-") as folder:
        hand, log = Hand(server.port), Journal(Path(folder) / "events")
        writer = threading.Thread(target=log.write, args=(Hand(server.port),))
        writer.start()
        works = Works(server.port, plan, hand)
        for _ in range(plan.workers):
            works.start()
        pushers = [works.process(push, pusher) for pusher in range(plan.pushers)]
        faults = ["kill"] * plan.kills + ["stall"] * plan.stalls
        chance.shuffle(faults)
        for number, fault in enumerate(faults):
            # Distribute the faults over the run.
            reported = plan.calls * (number + chance.random()) / len(faults)
            wait_until(
                lambda reported=reported: (  # type: ignore[misc]  # of a default
                    _called(hand) >= reported or not any(pusher.is_alive() for pusher in pushers)
                ),
                PUSHING_S,
            )
            if fault == "stall":
                works.stall(chance)
                continue
            works.kill(chance)
            works.start()
        for pusher in pushers:
            pusher.join()
        keys = hand.partition.keys
        with contextlib.suppress(TimeoutError):  # messages that are left are judged below
            wait_until(lambda: not hand.client.exists(keys.messages, keys.dedup_locks), DRAINING_S)
        hand.journal.set("over", "1")
        works.join()
        log.close()
        writer.join()
        verdict = judge(log, lease_us=plan.lease_ms * 1000, timeout_us=plan.timeout_us)
        left = hand.client.exists(
            keys.dedup_locks, keys.dedup_members, keys.blocked, keys.following, keys.messages
        )
        if left:
            verdict.wrong.append(f"{left} keys of dedup are left behind")
        for name, count in verdicts([[hand.partition]], hand.client)[0].items():
            verdict.counts[f"broker {name}"] = count
        if verdict.forced["an eviction"] > verdict.counts["broker evict"]:
            verdict.wrong.append("more overlaps are put down to evictions than there were evictions")
        return verdict


def _called(hand: Hand) -> int:
    """How many calls were made, by the broker's counters."""
    counts = verdicts([[hand.partition]], hand.client)[0]
    return sum(counts.get(each, 0) for each in ("accept", "block", "decline"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dedup.hammer", description=__doc__)
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    started = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        plan = Plan(**vars(parser.parse_args()))
        print(plan, flush=True)
        verdict = hammer(plan)
        print(verdict, f"took {time.monotonic() - started:.0f} s", sep="\n")
        return 1 if verdict.wrong else 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
