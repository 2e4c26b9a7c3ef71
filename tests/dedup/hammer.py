"""``python -m tests.dedup.hammer``: processes and threads that hammer few keys, and an independent judge.

The hammer pushes and works against the scripts of the tenant broker themselves, without Celery: pushers call,
workers claim, settle half of the messages early, hold them a moment, and finish, give back or die. Each
worker process is killed by SIGKILL now and then (its lease is short, so others reap it). Every event gets a
number from one counter in another database of the same Redis, so that the judge can order them all.

The judge reads the events, knows nothing of the scripts, and says: never two running (unless an eviction,
or a lease that was lost without a kill, let the second one start: both are counted), never two blocked, no
key left behind, and no lost update: whoever covered a declined call started after that call was made, or
was cancelled with it.
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
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis.partition import Partition, load_scripts
from celery_dq.transport.redis.record import DedupSection, Record
from celery_dq.transport.redis.replies import Outgoing

LEASE_MS = 1_000
EVENTS, CLOCK = "events", "clock"

# Numbers the event in the same step in which it is written down.
TELL = "local n = redis.call('INCR', KEYS[2]) redis.call('RPUSH', KEYS[1], n .. ' ' .. ARGV[1]) return n"


@dataclass(frozen=True)
class Plan:
    seed: int = 1
    calls: int = 20_000
    keys: int = 100
    pushers: int = 2
    workers: int = 3
    threads: int = 8
    kills: int = 3
    timeout_us: int = 0


class Hand:
    """One thread's connections."""

    def __init__(self, port: int) -> None:
        self.client: Any = redis.Redis(port=port, db=1, socket_timeout=30)
        self.journal: Any = redis.Redis(port=port, db=2, socket_timeout=30)
        self.partition = Partition(PartitionKeys("online", "cache"), load_scripts())

    def tell(self, what: str, key: str, call: str, **more: Any) -> int:
        text = json.dumps([what, key, call, more])
        return int(self.journal.eval(TELL, 2, EVENTS, CLOCK, text))


def push(port: int, plan: Plan, pusher: int, thread: int, amount: int) -> None:
    hand, chance = Hand(port), random.Random(f"{plan.seed}/{pusher}/{thread}")
    for number in range(amount):
        key = f"k{min(int(abs(chance.gauss(0, plan.keys / 3))), plan.keys - 1)}"
        call = f"{pusher}.{thread}.{number}"
        section = DedupSection(key, timeout_us=plan.timeout_us, replace=chance.random() < 0.05)
        record = Record("", "refresh", 0, 0, 0, b"{}", "[]", section.pack()).pack()
        made = hand.tell("call", key, call)
        (pushed,) = hand.partition.push([Outgoing(0, call, record)]).run(hand.client)
        hand.tell(pushed.status, key, call, covering=pushed.covering, replaced=pushed.replaced, made=made)


def work(port: int, plan: Plan, name: str, ready: Any) -> None:
    """One worker process: all its threads hold under one lease, as a Celery worker does."""
    threading.Thread(target=_renew, args=(port, name), daemon=True).start()
    threads = [
        threading.Thread(target=_work, args=(port, plan, name, thread), daemon=True)
        for thread in range(plan.threads)
    ]
    for thread in threads:
        thread.start()
    ready.set()
    for thread in threads:
        thread.join()


def _renew(port: int, name: str) -> None:
    hand = Hand(port)
    while True:
        hand.partition.renew(name, lease_ms=LEASE_MS, max_deliveries=0).run(hand.client)
        time.sleep(LEASE_MS / 4000)


def _work(port: int, plan: Plan, name: str, thread: int) -> None:
    hand, chance = Hand(port), random.Random(f"{plan.seed}/{name}/{thread}")
    while hand.journal.get("over") is None:
        asked = int(hand.journal.incr(CLOCK))
        claimed = hand.partition.claim(name, lease_ms=LEASE_MS, want=1, max_deliveries=0).run(hand.client)
        if not claimed.entries:
            time.sleep(0.001)
            continue
        (entry,) = claimed.entries
        key = DedupSection.unpack(Record.unpack(entry.record).dedup).key
        if entry.reason:
            hand.partition.finish(name, [entry.tag]).run(hand.client)
            continue
        told: dict[str, Any] = {"claim": int(entry.claim), "worker": name, "asked": asked}
        hand.tell("start", key, entry.id, **told)
        if chance.random() < 0.5:
            hand.partition.settle(name, [entry.tag]).run(hand.client)
        time.sleep(chance.random() * 0.002)
        requeue = chance.random() < 0.02
        hand.tell("end", key, entry.id, **told)
        if requeue:
            stale = hand.partition.release(name, [entry.tag], mode="requeue").run(hand.client)
        else:
            stale = hand.partition.finish(name, [entry.tag]).run(hand.client)
        if stale:
            # The process stood still for longer than its lease: it was taken for dead.
            hand.tell("stale", key, entry.id, **told)


@dataclass
class Verdict:
    """What the judge found."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    overlaps: int = 0

    def __str__(self) -> str:
        seen = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        lines = [seen, f"overlaps that evictions and lost leases forced: {self.overlaps}"]
        return "\n".join([*lines, *self.wrong[:20], f"{len(self.wrong)} violations"])


Event = tuple[int, str, str, str, dict[str, Any]]


def judge(events: list[Event], evictions: bool) -> Verdict:
    """Check the journal. A killed worker does not say that its runs ended: the journal says "kill"."""
    verdict = Verdict()
    running: dict[str, dict[str, tuple[str, int]]] = defaultdict(dict)  # key -> call -> worker, claim
    started: dict[str, list[int]] = defaultdict(list)
    declined: list[tuple[str, str, int]] = []
    gave_way: dict[str, str] = {}
    taken_for_dead = {(call, more["claim"]) for _, what, _, call, more in events if what == "stale"}
    for number, what, key, call, more in events:
        verdict.counts[what] += 1
        if what == "start":
            for other, (worker, claim) in list(running[key].items()):
                if evictions or (other, claim) in taken_for_dead:
                    verdict.overlaps += 1
                    del running[key][other]
                else:
                    verdict.wrong.append(f"{number}: {call} starts on {key} while {other} runs on {worker}")
                # An evicted run may be told of after the next one.
                if claim >= more["claim"] and not evictions:
                    verdict.wrong.append(f"{number}: {call} has token {more['claim']}, {other} had {claim}")
            running[key][call] = (more["worker"], more["claim"])
            started[call].append(number)
        elif what == "end":
            running[key].pop(call, None)
        elif what == "kill":
            for runs in running.values():
                for other in [other for other, (worker, _) in runs.items() if worker == call]:
                    del runs[other]
        elif what == "declined":
            declined.append((call, more["covering"], more["made"]))
        if more.get("replaced"):
            gave_way[more["replaced"]] = call
    verdict.wrong += _two_waiting(events)
    for call, covering, made in declined:
        while covering in gave_way:
            covering = gave_way[covering]
        if not any(number > made for number in started[covering]):
            verdict.wrong.append(
                f"{call}, made at {made}, is covered by {covering}, which began {started[covering]}"
            )
    return verdict


def _two_waiting(events: list[Event]) -> list[str]:
    """A tail waits at least from when its pusher was told until a worker asks for it, or its replacement is
    made.

    What a worker had claimed and not told when it was killed cannot be judged.
    """
    kills = [number for number, what, _, _, _ in events if what == "kill"]
    begin: dict[str, tuple[str, int]] = {}
    end: dict[str, int] = {}
    for number, what, key, call, more in events:
        if what == "blocked":
            begin[call] = (key, number)
        if what == "start":
            end.setdefault(call, more["asked"])
        if more.get("replaced"):
            end[more["replaced"]] = min(more["made"], end.get(more["replaced"], number))
    last: dict[str, tuple[int, str]] = {}
    wrong = []
    for call, (key, number) in sorted(begin.items(), key=lambda each: each[1][1]):
        if end.get(call, 0) <= number:
            continue  # it was told so late that it waited no more
        until, other = last.get(key, (0, ""))
        if until > number and not any(begin[other][1] < kill < until for kill in kills):
            wrong.append(f"{number}: {call} waits on {key} while {other} does, until {until}")
        last[key] = max(last.get(key, (0, "")), (end.get(call, 0), call))
    return wrong


def hammer(plan: Plan) -> Verdict:
    """Run the plan on a server of its own, and judge it."""
    chance = random.Random(plan.seed)
    context = multiprocessing.get_context("spawn")
    with RedisServer() as server:
        hand = Hand(server.port)
        serial = 0
        workers: dict[str, Any] = {}

        def start_worker() -> None:
            nonlocal serial
            serial += 1
            name, ready = f"w{serial}", context.Event()
            workers[name] = context.Process(target=work, args=(server.port, plan, name, ready), daemon=True)
            workers[name].start()
            ready.wait(30)

        for _ in range(plan.workers):
            start_worker()
        amount = plan.calls // (plan.pushers * plan.threads)
        pushers = [
            threading.Thread(target=push, args=(server.port, plan, pusher, thread, amount))
            for pusher in range(plan.pushers)
            for thread in range(plan.threads)
        ]
        for pusher in pushers:
            pusher.start()
        for _ in range(plan.kills):
            time.sleep(chance.uniform(0.3, 1.0))
            name = chance.choice(sorted(workers))
            victim = workers.pop(name)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join(10)
            hand.tell("kill", "", name)
            start_worker()
        for pusher in pushers:
            pusher.join()
        keys = hand.partition.keys
        deadline = time.monotonic() + 60
        while hand.client.exists(keys.messages, keys.claims) and time.monotonic() < deadline:
            time.sleep(0.05)
        hand.journal.set("over", "1")
        for process in workers.values():
            process.join(20)
        events = [_event(line) for line in hand.journal.lrange(EVENTS, 0, -1)]
        verdict = judge(sorted(events, key=lambda event: event[0]), plan.timeout_us > 0)
        left = hand.client.exists(keys.claims, keys.claimants, keys.blocked, keys.following, keys.messages)
        if left:
            verdict.wrong.append(f"{left} keys of dedup are left behind")
        for name, count in hand.client.hgetall(keys.verdicts).items():
            verdict.counts[f"broker {name.decode()}"] = int(count)
        return verdict


def _event(line: bytes) -> Event:
    number, _, text = line.partition(b" ")
    what, key, call, more = json.loads(text)
    return int(number), what, key, call, more


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dedup.hammer", description=__doc__)
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    started = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        verdict = hammer(Plan(**vars(parser.parse_args())))
        print(verdict, f"took {time.monotonic() - started:.0f} s", sep="\n")
        return 1 if verdict.wrong else 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
