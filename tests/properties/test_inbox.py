"""Any interleaving of claims, deliveries and releases by the heartbeat."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from celery_dq.transport import envelope
from celery_dq.transport.in_flight import Message
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consuming.delivery import TURN_S, Inbox

QUEUES = st.sampled_from(["mail", "bills"])
TENANTS = st.sampled_from(["", "a", "b", "c"])
#: The line of a queue's discards.
DISCARDS = "discards"


def message(number: int, queue: str, tenant: str, reason: str = "") -> Message:
    record = MessageRecord(tenant, "", 0, 0, 0, envelope.pack({}, {}, None, None), b"")
    made = Message(record, ClaimedEntry(str(number), "1", 0, reason, b""), f"1/{number}", queue, None)
    # Each tenant lives in a partition of its own, and the discards in another one.
    made.prefix = DISCARDS if reason else tenant
    return made


def line_of(each: Message) -> str:
    return DISCARDS if each.discard else each.record.tenant


class InboxMachine(RuleBasedStateMachine):
    """Beside it, the numbers of the messages of each tenant in the order of their claims."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox = Inbox()
        self.number = 0
        self.now = 0.0
        #: The queue that was served last and has more, and since when without another one.
        self.turn: tuple[str, float] = ("", 0.0)
        #: A release may end the turn of a queue, or not.
        self.released = False
        self.lines: dict[tuple[str, str], list[int]] = {}
        #: How often another tenant of the queue was served while the tenant had something here.
        self.passed: dict[tuple[str, str], Counter[str]] = {}

    @rule(queue=QUEUES, tenant=TENANTS, amount=st.integers(1, 4))
    def claim(self, queue: str, tenant: str, amount: int) -> None:
        for _ in range(amount):
            self.number += 1
            self.inbox.add(message(self.number, queue, tenant))
            self.lines.setdefault((queue, tenant), []).append(self.number)

    @rule(queue=QUEUES, tenant=TENANTS)
    def claim_discard(self, queue: str, tenant: str) -> None:
        self.number += 1
        self.inbox.add(message(self.number, queue, tenant, "cancelled"))
        self.lines.setdefault((queue, DISCARDS), []).append(self.number)

    @rule(tenants=st.sets(TENANTS))
    def stop_partitions(self, tenants: set[str]) -> None:
        taken = [each.message_id for each in self.inbox.take_partitions(tenants)]
        gone = [
            number
            for (_, tenant), line in self.lines.items()
            if tenant in tenants
            for number in reversed(line)
        ]
        discards = [
            number for (_, tenant), line in self.lines.items() if tenant == DISCARDS for number in line
        ]
        assert sorted(map(int, taken)) == sorted(gone)
        assert not set(discards) & set(map(int, taken))
        for (queue, tenant), line in self.lines.items():
            if tenant in tenants:
                assert [int(each) for each in taken if int(each) in line] == line[::-1], "the youngest first"
                line.clear()
                self.passed.pop((queue, tenant), None)
        if taken:
            self.note_release()

    @rule(turns=st.sampled_from([0.25, 1.0]))
    def wait(self, turns: float) -> None:
        self.now += turns * TURN_S

    @precondition(lambda self: any(self.lines.values()))
    @rule()
    def deliver(self) -> None:
        last, since = self.turn
        waiting = {name for (name, _), line in self.lines.items() if line}
        taken: Any = self.inbox.take_next(self.now)
        queue, tenant = taken.queue, line_of(taken)
        if len(waiting) > 1 and queue == last:
            assert self.now < since + TURN_S, f"{queue!r} keeps its turn"
        if last in waiting and queue != last:
            assert self.released or self.now >= since + TURN_S, f"{last!r} has lost its turn"
        if queue != last:
            self.turn = (queue, self.now)
        # Within a tenant in the order of the claims.
        assert int(taken.message_id) == self.lines[queue, tenant].pop(0)
        if not any(line for (name, _), line in self.lines.items() if name == queue):
            self.turn = ("", 0.0)
        for (name, other), line in self.lines.items():
            if name == queue and other not in (tenant, DISCARDS) and line:
                assert tenant != DISCARDS, "a discard before a message"
                passed = self.passed.setdefault((queue, other), Counter())
                passed[tenant] += 1
                # No tenant has two turns while another one waits for one.
                assert passed[tenant] <= 1, f"{tenant!r} before {other!r} again"
        self.passed.pop((queue, tenant), None)

    @precondition(lambda self: not any(self.lines.values()))
    @rule()
    def deliver_nothing(self) -> None:
        assert self.inbox.take_next(self.now) is None
        assert not self.inbox

    @rule(queue=QUEUES)
    def release(self, queue: str) -> None:
        given: dict[tuple[str, str], list[int]] = {
            (queue, tenant): [] for tenant in ("", "a", "b", "c", DISCARDS)
        }
        for each in self.inbox.take_all(queue):
            given[queue, line_of(each)].append(int(each.message_id))
        for key, numbers in given.items():
            assert numbers == self.lines.pop(key, [])[::-1]
            self.passed.pop(key, None)
        self.note_release()

    def note_release(self) -> None:
        self.released = True
        if not any(line for (name, _), line in self.lines.items() if name == self.turn[0]):
            # The next look at the empty queue ends its turn, unless further messages come before.
            self.turn = ("", 0.0)

    @invariant()
    def knows_how_many(self) -> None:
        assert len(self.inbox) == sum(map(len, self.lines.values()))
        # Released messages may count until the next look.
        assert self.inbox or not any(self.lines.values())


TestInbox = InboxMachine.TestCase
TestInbox.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
