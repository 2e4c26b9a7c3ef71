"""The drivers of the coordinators in Redis and among threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_dq.clock import ManualClock
from celery_dq.dedup.local import LocalCoordinator
from celery_dq.dedup.machine import Coordinator, DedupResult, HeldDedupLock
from celery_dq.keys import DedupKeys
from celery_dq.other_brokers.redis_coordinator import RedisCoordinator, load_scripts
from tests.dedup.model.clock import CLOCK, ScriptClock, TimedScripts
from tests.dedup.model.driver import KEYS, LEASE, Answer, Call, Standing


class CoordinatorDriver:
    def of(self, owner: str) -> Coordinator:
        raise NotImplementedError

    def ask(self, call: Call) -> Answer:
        result = self.of(call.owner).enqueue(
            call.key, call.id, task=call.task, policy=call.policy, waiting=call.waiting, timeout=call.timeout
        )
        assert isinstance(result, DedupResult)
        return Answer(result.verdict, result.covering, result.token, result.replaced or "")

    def start(self, call: Call) -> int | None:
        return self.of(call.owner).start(call.key, call.id)

    def end(self, call: Call, token: int) -> bool:
        return self.of(call.owner).finish(call.key, call.id, token)

    def release_call(self, call: Call, token: int) -> bool:
        return self.of(call.owner).release(call.key, call.id, token)

    def withdraw(self, call: Call) -> bool:
        return self.of(call.owner).withdraw(call.key, call.id)

    def renew(self, owner: str, calls: Sequence[Call]) -> list[bool]:
        return self.of(owner).renew([HeldDedupLock(each.key, each.id, each.token) for each in calls])

    def look(self) -> None:
        """Do nothing: each question reads the present state."""

    def free(self, key: str) -> None:
        self.of("operator").free(key)


class LocalDriver(CoordinatorDriver):
    """Threads. The calls of a dead thread stay until an eviction or an operator removes them."""

    leases = False
    sweeps = dict.fromkeys(("ask", "start", "renew"), "head")

    def reset(self) -> None:
        self.clock = ManualClock()
        self.coordinator = LocalCoordinator(self.clock)
        self.now = 0

    def of(self, owner: str) -> Coordinator:
        return self.coordinator

    def at(self, seconds: int) -> None:
        self.clock.advance(seconds - self.now)
        self.now = seconds

    def forget_scripts(self) -> None:
        """Do nothing: there are no scripts."""

    def standing(self, key: str) -> Standing:
        # inspect() would end an overdue run first.
        kept = self.coordinator._kept.get(key)
        if kept is None:
            return Standing()
        machine = kept.machine
        places = (machine.head, machine.heir, machine.tail)
        assert set(kept.calls) == {each.id for each in places if each}
        token = machine.head.token if machine.head else 0
        return Standing._make([*(each.id if each else "" for each in places), token])

    def woken_owners(self) -> set[tuple[str, str]] | None:
        return None  # threads wake each other

    def check(self, living: Sequence[Call]) -> None:
        assert set(self.coordinator.keys()) == {each.key for each in living}

    def left(self) -> set[str]:
        return set(self.coordinator.keys())


class RedisDriver(CoordinatorDriver):
    """Workers of any broker, each with its own coordinator on one Redis."""

    leases = True
    sweeps = dict.fromkeys(("ask", "start", "leave", "renew"), "all")

    def __init__(self, client: Any) -> None:
        self.client = client
        self.scripts = TimedScripts(load_scripts())
        self.keys = DedupKeys("online")
        self.names = {self.keys.dedup_lock(key): key for key in KEYS}
        self.pubsub: Any = client.pubsub()
        self.pubsub.psubscribe(f"{self.keys.channel.replace('{', '[{]')}*")
        assert self.pubsub.get_message(timeout=30)["type"] == "psubscribe"

    def reset(self) -> None:
        self.client.flushdb()
        self.clock = ScriptClock(self.client)
        self.owners: dict[str, RedisCoordinator] = {}
        self.woken_owners()

    def of(self, owner: str) -> Coordinator:
        if owner not in self.owners:
            self.owners[owner] = RedisCoordinator(
                self.client, self.keys, self.scripts, owner=owner, lease=float(LEASE)
            )
        return self.owners[owner]

    def at(self, seconds: int) -> None:
        self.clock.at(seconds)

    def forget_scripts(self) -> None:
        self.client.script_flush()

    def standing(self, key: str) -> Standing:
        found = self.of("operator").inspect(key)
        if found is None:
            return Standing()
        ids = [each.call if each else "" for each in found[1:]]
        return Standing._make([*ids, found.head.token if found.head else 0])

    def woken_owners(self) -> set[tuple[str, str]] | None:
        """The owners that were woken, with the key, since the last call of this method."""
        self.pubsub.ping()
        found = set()
        while (message := self.pubsub.get_message(timeout=30))["type"] != "pong":
            owner = message["channel"].decode().removeprefix(self.keys.channel)
            found.add((owner, self.names[message["data"].decode()]))
        return found

    def check(self, living: Sequence[Call]) -> None:
        """Check that every unused lock expires with the last lease of its calls."""
        for key in KEYS:
            leases = [each.lease for each in living if each.key == key]
            lives_ms = self.client.pttl(self.keys.dedup_lock(key))
            if not leases:
                assert lives_ms == -2
                continue
            seconds, micros = self.client.time()
            ends = self.clock.seconds((seconds * 1000 + micros / 1000 + lives_ms) * 1000)
            # A slow machine may need a second between the two questions.
            assert abs(ends - max(leases)) < 1

    def left(self) -> set[str]:
        # The keys of the model have no queue.
        kept = {CLOCK, self.keys.tokens, self.keys.verdicts("")}
        return {each.decode() for each in self.client.keys("*")} - kept
