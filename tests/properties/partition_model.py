"""The expected behaviour of a partition in plain Python: one message at a time, no chunks, no clocks.

Rates are so slow that no token comes back during a test; the messages that a tenant has taken are a count.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from tests.properties.partition_messages import Held, Message, Quota, Took
from tests.properties.partition_rotation import Rotations

STRICT = 1e15
PLACES = ("turn", "throttled", "at_concurrency", "paused")


class Model:
    def __init__(self) -> None:
        self.messages: dict[str, Message] = {}
        self.waiting: dict[str, list[Message]] = {}
        self.rotations = Rotations()
        self.delayed: dict[str, float] = {}
        self.discards: list[Message] = []
        self.discard_tags: dict[str, float] = {}
        self.held: dict[str, dict[str, Held]] = {}
        self.dead: dict[str, Message] = {}
        self.tombstones: set[str] = set()
        #: Producer -> its last sequence, and the sequences of its last call that were full.
        self.producers: dict[str, tuple[int, set[int]]] = {}
        self.quotas: dict[str, Quota] = {}
        self.default = Quota()
        self.pauses: set[str] = set()
        #: Tenants whose pause ends by itself, now or later.
        self.pause_ends: dict[str, bool] = {}
        self.queue_pauses = False
        self.used: dict[str, int] = {}
        self.v = 0.0
        self.start: dict[str, float] = {}
        self.finished: dict[str, float] = {}
        self.floor = 0.0
        self.place: dict[str, str] = {}
        self.claims = 0
        #: Tenants with a backlog -> messages claimed since the first claim that left one.
        self.claimed: dict[str, int] = {}
        #: The counters that the partition keeps in its state, by name.
        self.counts: Counter[str] = Counter()
        self._seq = 1.7e15

    # -- small things

    def quota(self, tenant: str) -> Quota:
        quota = self.quotas.get(tenant, self.default)
        return dataclasses.replace(quota, paused=quota.paused or tenant in self.pauses)

    def slots(self, tenant: str) -> int:
        return sum(
            1
            for held in self.held.values()
            for each in held.values()
            if each.resource == tenant and not each.message.reason
        )

    def seq(self) -> float:
        self._seq += 1
        return self._seq

    def due(self) -> list[str]:
        return sorted((i for i, at in self.delayed.items() if at < 1e6), key=lambda i: (self.delayed[i], i))

    def unique(self, task: str, used: Collection[str] = ()) -> str | None:
        for each in (task, *(f"{task}~{i}" for i in range(1, 10))):
            if each not in self.messages and each not in self.dead and each not in used:
                return each
        return None

    def unlimited(self, tenant: str) -> bool:
        quota = self.quota(tenant)
        return not quota.burst and not quota.concurrency

    def belongs(self, tenant: str) -> str | None:
        quota = self.quota(tenant)
        if self.rotations.next_of(tenant, self.waiting) is None:
            return None
        if quota.paused:
            return "paused"
        if quota.concurrency and self.slots(tenant) >= quota.concurrency:
            return "at_concurrency"
        if quota.burst and self.used.get(tenant, 0) >= quota.burst:
            return "throttled"
        return "turn"

    def put_in_place(self) -> None:
        self.rotations.leave_empty(self.waiting)
        for tenant in {*self.waiting, *self.place, *self.rotations.of} - {*self.rotations.sets}:
            old, new = self.place.get(tenant), self.belongs(tenant)
            if old == "turn" and new != "turn":
                tag = self.start.pop(tenant)
                if new is None and self.unlimited(tenant):
                    self.floor = max(self.floor, tag)
                elif tag > self.v:
                    self.finished[tenant] = tag
            if new == "turn" and old != "turn":
                self.start[tenant] = max(self.v, self.finished.pop(tenant, 0.0))
                if old is None and self.unlimited(tenant):
                    behind = min(self.floor, self.v + 1 / self.quota(tenant).weight)
                    self.start[tenant] = max(self.start[tenant], behind)
            if new is None:
                self.place.pop(tenant, None)
                self.claimed.pop(tenant, None)
            else:
                self.place[tenant] = new
        if not self.start:
            self.v = max(self.v, self.floor, *self.finished.values())
            self.finished.clear()

    def refund(self, charges: dict[str, float]) -> None:
        """Back goes the turn: as many messages more as were paid for, and first among equals."""
        near = max(1.0, self.v) * 2**-50
        for tenant, charge in charges.items():
            if tenant in self.start:
                tag = self.start[tenant] - charge
                self.start[tenant] = min(tag, self.v - near) if tag < self.v + near else tag
            elif tenant in self.finished:
                self.finished[tenant] -= charge

    def wait(self, message: Message) -> None:
        line = self.waiting.setdefault(message.tenant, [])
        line.append(message)
        self.rotations.enter(message.tenant)
        line.sort(key=lambda each: (each.score, each.id.encode()))

    def discard(self, message: Message, reason: str) -> None:
        """Behind the discards of its tenant, which take turns with those of the others."""
        first = self.first_discard(0.0)
        self.counts.update(("discarded", reason))
        message.reason = reason
        message.score = max(first, self.discard_tags.get(message.tenant, 0.0))
        self.discard_tags[message.tenant] = message.score + 1
        self.rediscard(message)

    def first_discard(self, otherwise: float) -> float:
        return self.discards[0].score if self.discards else otherwise

    def rediscard(self, message: Message) -> None:
        self.discards.append(message)
        self.discards.sort(key=lambda each: (each.score, each.id.encode()))

    def add_dead_letter(self, message: Message) -> None:
        # A dead letter is a copy: it does not know why its message is delivered once more.
        self.counts["dead_lettered"] += 1
        self.dead.setdefault(message.id, dataclasses.replace(message, reason="", settled=False))

    def drop(self, message: Message, how: str = "dropped") -> None:
        del self.messages[message.id]
        self.counts[how] += 1
        self.counts["settled"] += message.settled

    # -- verbs

    def push(self, batch: Sequence[tuple[int, Message]], producer: str) -> list[str]:
        last, was_full = self.producers.get(producer, (-1, set()))
        found = {
            sequence: "seen"
            if producer and sequence <= last and sequence not in was_full
            else self.accept(message)
            for sequence, message in batch
        }
        full = {sequence for sequence, status in found.items() if status == "full"}
        if max(found) <= last:
            full |= was_full - set(found)
        self.producers[producer] = max(last, *found), full
        self.drop_overflow(message.tenant for sequence, message in batch if found[sequence] != "seen")
        self.put_in_place()
        return list(found.values())

    def accept(self, message: Message) -> str:
        quota, waiting = self.quota(message.tenant), len(self.waiting.get(message.tenant, ()))
        is_cancelled = message.task in self.tombstones
        if (
            quota.max_waiting
            and waiting >= quota.max_waiting
            and quota.when_full in ("refuse", "wait")
            and not (is_cancelled or message.delayed or message.accepted)
        ):
            self.counts["full"] += 1
            return "full"
        self.messages[message.id] = message
        self.counts["pushed"] += 1
        if is_cancelled:
            self.discard(message, "cancelled")
            return "discarded"
        if message.delayed:
            self.delayed[message.id] = 1e18
        else:
            message.score = self.seq() - message.priority * STRICT
            self.wait(message)
        return "accepted"

    def drop_overflow(self, tenants: Iterable[str]) -> None:
        for tenant in dict.fromkeys(tenants):
            quota, line = self.quota(tenant), self.waiting.get(tenant, [])
            if not quota.max_waiting or quota.when_full in ("refuse", "wait"):
                continue
            while len(line) > quota.max_waiting:
                message = line.pop(0)
                is_kept = quota.when_full == "dead_letter"
                if is_kept:
                    self.add_dead_letter(message)
                self.discard(message, "dead:overflow" if is_kept else "overflow")
                self.counts["overflowed"] += 1

    def may_serve(self) -> bool:
        """Whether a message, or a discard, may be taken now."""
        return bool(self.discards or (self.start and not self.queue_pauses))

    def promote(self) -> None:
        for tenant in [each for each, is_over in self.pause_ends.items() if is_over]:
            del self.pause_ends[tenant]
            self.pauses.discard(tenant)
        for each in self.due():
            message = self.messages[each]
            message.score = self.delayed.pop(each) - message.priority * STRICT
            self.wait(message)
        self.put_in_place()

    def claim(
        self,
        consumer: str,
        want: int,
        free: int,
        max_deliveries: int,
        suspects: bool = True,
        besides: int | None = None,
    ) -> Took:
        self.promote()
        took = Took()
        number = self.claims + 1

        def hold(message: Message, resource: str = "") -> None:
            charge = 0.0 if message.reason else 1 / self.quota(resource).weight
            self.held.setdefault(consumer, {})[message.id] = Held(number, message, charge, resource)
            self.counts["claimed"] += not message.reason
            of_set = resource if resource != message.tenant else ""
            took.entries.append((message.id, message.reason, message.crashes, message.returned, of_set))

        passed: set[str] = set()
        passed_backlogs: set[str] = set()
        served: Counter[str] = Counter()
        while len(took.entries) < want and not (took.suspect or self.queue_pauses):
            if not (line := [t for t in self.start if t not in passed]):
                break
            tenant = min(line, key=lambda t: (self.start[t], t.encode()))
            quota, backlog = self.quota(tenant), self.rotations.next_of(tenant, self.waiting, passed_backlogs)
            took.needs_slot = quota.concurrency > 0 >= free
            if took.needs_slot:
                break
            if backlog is None:
                passed.add(tenant)
                continue
            message = self.waiting[backlog][0]
            if message.expired or message.crashes >= max_deliveries:
                self.give_up(backlog)
                continue
            if message.crashes and not suspects:
                passed_backlogs.add(backlog)
                if self.rotations.next_of(tenant, self.waiting, passed_backlogs) is None:
                    passed.add(tenant)
                continue
            if message.crashes and took.entries:
                break
            took.suspect = message.crashes > 0
            self.waiting[backlog].pop(0)
            self.rotations.served(tenant, backlog)
            hold(message, tenant)
            served[tenant] += 1
            self.v = max(self.v, self.start[tenant])
            self.start[tenant] += 1 / quota.weight
            free -= bool(quota.concurrency)
            self.used[tenant] = self.used.get(tenant, 0) + bool(quota.burst)
            self.put_in_place()
        for tenant in (each for each in served if each in self.place):
            self.claimed[tenant] = self.claimed[tenant] + served[tenant] if tenant in self.claimed else 0
        if want and not took.suspect:
            self.take_discards(want if besides is None else besides, hold)
        if took.entries:
            self.claims = number
        return took

    def give_up(self, backlog: str) -> None:
        message = self.waiting[backlog].pop(0)
        if not message.expired:
            self.add_dead_letter(message)
        self.discard(message, "expired" if message.expired else "dead:max_deliveries")
        self.put_in_place()

    def take_discards(self, most: int, hold: Callable[[Message], None]) -> None:
        taken, self.discards = self.discards[:most], self.discards[most:]
        for message in taken:
            hold(message)
        if taken:
            first = self.first_discard(math.inf)
            self.discard_tags = {t: tag for t, tag in self.discard_tags.items() if tag > first}

    def find(self, consumer: str, claim: str, message_id: str) -> Message | None:
        found = self.held.get(consumer, {}).get(message_id)
        return found.message if found and found.claim == int(claim) else None

    def settle(self, consumer: str, tags: list[tuple[str, str]]) -> int:
        found = [self.find(consumer, *tag) for tag in tags]
        for message in filter(None, found):
            message.settled = True
        self.counts["stale_acks"] += found.count(None)
        return found.count(None)

    def finish(self, consumer: str, tags: list[tuple[str, str]]) -> int:
        before = self.counts["stale_acks"]
        for tag in tags:
            message = self.find(consumer, *tag)
            if message is None:
                self.counts["stale_acks"] += 1
                continue
            del self.held[consumer][message.id]
            self.drop(message, "discards_finished" if message.reason else "finished")
        self.put_in_place()
        return self.counts["stale_acks"] - before

    def release(
        self,
        consumer: str,
        tags: list[tuple[str, str]],
        mode: str,
        max_deliveries: int,
        as_what: str = "released",
        delays: bool = False,
    ) -> int:
        before = self.counts["stale_acks"]
        charges: dict[str, float] = {}
        new: list[tuple[Message, str]] = []
        again: list[Message] = []
        for tag in tags:
            message = self.find(consumer, *tag)
            if message is None:
                self.counts["stale_acks"] += 1
                continue
            held = self.held[consumer].pop(message.id)
            self.counts[as_what] += 1
            if message.settled:
                self.drop(message)
                continue
            message.crashes += mode == "crashed"
            message.returned = message.returned or mode not in ("unstarted", "paused")
            over = mode == "crashed" and message.crashes >= max_deliveries
            if message.reason:
                if over and message.crashes >= 2 * max_deliveries:
                    if message.id not in self.dead:
                        self.add_dead_letter(message)
                    self.drop(message)
                else:
                    again.append(message)
                continue
            if mode == "unstarted" and self.quota(held.resource).burst and self.used.get(held.resource):
                self.used[held.resource] -= 1
            if over:
                self.add_dead_letter(message)
                new.append((message, "dead:max_deliveries"))
            elif message.task in self.tombstones:
                new.append((message, "cancelled"))
            elif delays:
                self.delayed[message.id] = 1e18
            else:
                self.wait(message)
                if mode == "unstarted" or (mode == "crashed" and message.crashes == 1):
                    charges[held.resource] = charges.get(held.resource, 0.0) + held.charge
        # A returned message was among the first ones, whatever was pushed since.
        first = self.first_discard(math.inf)
        for message in again:
            message.score = min(message.score, first)
            self.rediscard(message)
        for message, reason in new:
            self.discard(message, reason)
        self.put_in_place()
        self.refund(charges)
        return self.counts["stale_acks"] - before

    def requeue_and_pause(self, consumer: str, tag: tuple[str, str], alone: bool) -> int:
        message = self.find(consumer, *tag)
        if message is not None:
            message.settled = False
            tenant = self.held[consumer][message.id].resource
            # A pause without end stays, and of two others the later end wins.
            if not alone and (tenant not in self.pauses or tenant in self.pause_ends):
                self.pauses.add(tenant)
                self.pause_ends[tenant] = False
        return self.release(consumer, [tag], "paused", 0, delays=alone)

    def give_all(self, consumer: str, mode: str, max_deliveries: int) -> int:
        held = self.held.get(consumer, {})
        found = sorted(held.values(), key=lambda each: each.message.score)
        tags = [(str(each.claim), each.message.id) for each in found]
        self.counts["leases_lost"] += mode == "crashed"
        self.release(consumer, tags, mode, max_deliveries, "reaped" if mode == "crashed" else "released")
        return len(tags)

    def cancel(self, task: str, stone: bool) -> str:
        rank = ("none", "discarded", "delayed", "waiting", "claimed")
        best = "none"
        for each in (task, *(f"{task}~{i}" for i in range(1, 10))):
            message = self.messages.get(each)
            if message is None:
                continue
            if message in self.waiting.get(message.tenant, []):
                self.waiting[message.tenant].remove(message)
                self.discard(message, "cancelled")
                where = "waiting"
            elif each in self.delayed:
                del self.delayed[each]
                self.discard(message, "cancelled")
                where = "delayed"
            else:
                where = "discarded" if message in self.discards else "claimed"
            best = max(best, where, key=rank.index)
        if stone and best in ("none", "claimed"):
            self.tombstones.add(task)
            best = "tombstone" if best == "none" else best
        self.put_in_place()
        return best

    def edit(self, task: str, priority: int | None, is_later: bool) -> str:
        """Change the first message of a task that waits or is delayed."""
        ids = [each for each in (task, *(f"{task}~{i}" for i in range(1, 10))) if each in self.messages]
        for each in ids:
            message = self.messages[each]
            line = self.waiting.get(message.tenant, [])
            if message not in line and each not in self.delayed:
                continue
            if is_later and message.expired:
                return "expires"
            if priority is not None:
                message.score += (message.priority - priority) * STRICT
                message.priority = priority
            if message in line:
                line.remove(message)
                if not is_later:
                    self.wait(message)
            if is_later:
                self.delayed[each] = 1e18
            self.put_in_place()
            return "delayed" if each in self.delayed else "waiting"
        return "other" if ids else "none"

    def cancel_tenant(self, tenant: str) -> int:
        for message in (line := self.waiting.pop(tenant, [])):
            self.discard(message, "cancelled")
        self.put_in_place()
        return len(line)

    def purge(self) -> int:
        gone = [each for line in self.waiting.values() for each in line]
        gone += [*(self.messages[each] for each in self.delayed), *self.discards]
        for message in gone:
            self.drop(message)
        self.waiting.clear()
        self.delayed.clear()
        self.discards.clear()
        self.discard_tags.clear()
        self.put_in_place()
        return len(gone)

    def set_quota(self, tenant: str, quota: Quota | None) -> None:
        if quota is None:
            self.quotas.pop(tenant, None)
        else:
            self.quotas[tenant] = quota
        self.recap(tenant)

    def recap(self, tenant: str) -> None:
        self.used[tenant] = min(self.used.get(tenant, 0), self.quota(tenant).burst)
        self.put_in_place()

    def dead_letter(self, consumer: str, tag: tuple[str, str]) -> str:
        message = self.find(consumer, *tag)
        if message is None:
            return "stale"
        if message.settled:
            return "no record"
        self.add_dead_letter(message)
        self.finish(consumer, [tag])
        return "dead"

    def replay(self, message_id: str, new_id: str) -> None:
        dead = self.dead.pop(message_id)
        # The place by due time is long past, so it waits like any other.
        message = Message(new_id, dead.task, dead.tenant, dead.priority, dead.expired)
        self.messages[new_id] = message
        self.counts["replayed"] += 1
        message.score = self.seq() - message.priority * STRICT
        self.wait(message)
        self.put_in_place()
