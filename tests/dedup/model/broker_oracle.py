"""The expected fate of a message and of its followers, by the machines and the docs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from celery_dq.dedup.machine import Verdict
from tests.dedup.model.broker import MAX_DELIVERIES, BrokerDriver, Message
from tests.dedup.model.driver import KEYS, Call
from tests.dedup.model.ledger import Run
from tests.dedup.model.world import World

STATUS = {Verdict.ACCEPT: "accepted", Verdict.BLOCK: "blocked", Verdict.DECLINE: "declined"}


class BrokerOracle(World):
    driver: BrokerDriver  # type: ignore[assignment]  # a driver of messages, not of calls

    def prepare(self) -> None:
        self.messages: dict[str, Message] = {}
        self.followers: dict[str, list[str]] = {}
        self.discards: set[str] = set()
        self.outside: set[str] = set()
        self.leases: dict[str, int] = {}
        #: Owner that was away -> the time until which it takes no other owner for dead.
        self.reap_grace_until: dict[str, int] = {}
        self.zombies: list[tuple[str, Run]] = []
        self.counted: Counter[str] = Counter()
        self.sequence = 0
        self.covering = ""

    # -- events of a message

    def mine(self, owner: str, *, working: bool = False) -> list[Message]:
        held = [each for each in self.messages.values() if each.token and each.owner == owner]
        return [each for each in held if not (working and each.reason)]

    def any_held(self, *, working: bool = False) -> list[Message]:
        return [each for owner in self.owners for each in self.mine(owner, working=working)]

    def drop(self, message: Message) -> None:
        """Forget a message that is over, and give its end to its followers."""
        del self.messages[message.id]
        self.discards.discard(message.id)
        for each in self.followers.pop(message.id, []):
            if each in self.messages:
                self.discard(self.messages[each], f"covered:{message.id}")

    def discard(self, message: Message, reason: str) -> None:
        message.reason = reason
        self.discards.add(message.id)
        if not reason.startswith("covered:"):
            self.ledger.excuses(message.task, reason)

    def leave(self, message: Message, *, over: bool) -> None:
        """Remove a message from its key. `over`: it will not be delivered again either."""
        machine, head = self.machine(message.key), self.machine(message.key).head
        self.ledger.waits_no_more(message.id, message.key)
        self.outside.discard(message.id)
        if head is not None and head.id == message.id:
            if over and machine.heir is not None:
                self.hand_on(message.id, machine.heir.id)
            machine.dequeue(head.id, head.token)
        else:
            machine.dequeue(message.id)

    def hand_on(self, covering: str, later: str) -> None:
        """Let the followers of `covering` follow `later` from now on."""
        if covering in self.followers:
            mine = self.followers.setdefault(later, [])
            mine[:0] = self.followers.pop(covering)

    def lose_key(self, key: str, why: str) -> str:
        machine = self.machine(key)
        if machine.head is None:
            return ""
        head = machine.head
        message = self.messages[head.id]
        if head.started:
            self.falls(message, why)
        else:
            self.ledger.waits_no_more(head.id, key)
            self.outside.add(head.id)
        if machine.heir is not None:
            self.hand_on(head.id, machine.heir.id)
        machine.dequeue(head.id, head.token)
        self.counted["evict"] += 1
        return head.id

    def evict_overdue(self) -> None:
        """Evict overdue heads; a run has no time limit while no call waits for its key."""
        for key in KEYS:
            machine = self.machine(key)
            head = machine.head
            if head is None or not head.started or not (machine.heir or machine.tail):
                continue
            timeout = self.messages[head.id].timeout
            if timeout and self.now - head.since >= timeout:
                self.lose_key(key, "timeout")

    # -- producers

    def repeats(self, call: Call) -> tuple[tuple[str, int] | None, str | None]:
        assert isinstance(call, Message)
        return call.continues if call.continues[0] else None, None

    def expect(self, message: Message) -> tuple[str, str]:
        """The expected status of its push, and the message that lost its place."""
        decision = self.decide(message)
        self.covering = decision.covering
        declined = decision.verdict is Verdict.DECLINE
        status = "following" if declined and message.follow else STATUS[decision.verdict]
        self.counted[{"following": "follow"}.get(status, decision.verdict.value)] += 1
        if status != "declined":
            self.messages[message.id] = message
        if status == "following":
            self.followers.setdefault(decision.covering, []).append(message.id)
            self.ledger.follows(message.id, message.task)
        if decision.replaced is not None:
            self.counted["replace"] += 1
            replaced = self.messages[decision.replaced]
            later = self.followers.pop(replaced.id, [])
            self.outside.discard(replaced.id)
            if replaced.awaited:
                later.append(replaced.id)
                self.ledger.follows(replaced.id, replaced.task)
            else:
                del self.messages[replaced.id]
            if later:
                self.followers[message.id] = later
        return status, decision.replaced or ""

    def message(
        self, wanted: dict[str, Any], task: str = "", continues: tuple[str, int] = ("", 0)
    ) -> Message:
        self.count += 1
        wanted = dict(wanted)
        kind, awaited = wanted.pop("kind"), wanted.pop("awaited")
        due = self.now + 5 if kind == "delayed" else 0
        name = f"m{self.count}"
        return Message(
            name,
            task or name,
            owner="",
            follow=awaited == "result",
            awaited=awaited != "no",
            due=due,
            expired=kind == "expired",
            continues=continues,
            **wanted,
        )

    def push(self, batch: list[Message], fate: str) -> None:
        for each in batch:
            self.ledger.asks(each.task, each.key)
        reported = self.driver.push(self.sequence, batch)
        for message, answer in zip(batch, reported, strict=True):
            assert (answer.id, (answer.status, answer.replaced)) == (message.id, self.expect(message))
            assert answer.covering in self.calls or (answer.status, answer.covering) == ("accepted", "")
        if fate != "answered":
            again = self.driver.push(self.sequence, batch)
            for message, answer in zip(batch, again, strict=True):
                # Not stored: it was declined, or replaced within the batch. The answer has the other message.
                gone = message.id not in self.messages
                assert answer.status == ("declined" if gone else "seen")
        self.sequence += len(batch)

    def released(self, message: Message, *, crashed: bool) -> None:
        message.token, message.retried = 0, False
        if not message.settled:
            message.crashes += crashed
        dead = crashed and message.crashes >= MAX_DELIVERIES
        if message.settled:
            self.ledger.excuses(message.task, "settled, then lost")
            self.leave(message, over=True)
            self.drop(message)
        elif message.reason and dead and message.crashes >= 2 * MAX_DELIVERIES:
            self.ledger.excuses(message.task, "its bookkeeping crashes")
            self.drop(message)
        elif message.reason:
            self.discards.add(message.id)
        elif dead:
            self.leave(message, over=False)
            self.discard(message, "dead:max_deliveries")
        else:
            self.came_back(message)

    def came_back(self, message: Message) -> None:
        machine = self.machine(message.key)
        if machine.head is not None and machine.head.id == message.id:
            assert machine.release(message.id, machine.head.token)
            return
        # It had lost its key, and requests it again with its own options.
        self.outside.discard(message.id)
        del self.messages[message.id]
        mine = self.followers.pop(message.id, [])
        asks = (message.policy, message.waiting, message.follow, message.continues)
        message.policy, message.waiting, message.continues = "decline", 1, ("", 0)
        message.follow = message.awaited
        status, _ = self.expect(message)
        message.policy, message.waiting, message.follow, message.continues = asks
        if status == "declined":
            # Its followers get the end of its covering message.
            by = self.covering
            mine += self.followers.pop(by, [])
            self.followers.update({by: mine} if mine else {})
        elif mine:
            self.followers[message.id] = mine
