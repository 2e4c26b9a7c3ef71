"""The pure machine as oracle: the expected state of every key, and the events for the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis.stateful import RuleBasedStateMachine, initialize

from celery_dq.dedup.machine import Decision, DedupMachine, Verdict
from tests.dedup.model.driver import LEASE, Call, Driver, Standing
from tests.dedup.model.ledger import Ledger


class Oracle(RuleBasedStateMachine):
    """Has the expected state of each key, the calls of each owner, and the owners to be woken."""

    driver: Driver
    #: Number of stories that came to their end.
    closed = 0

    @initialize()
    def begin(self) -> None:
        self.driver.reset()
        self.prepare()
        self.ledger = Ledger()
        self.machines: dict[str, DedupMachine] = {}
        self.calls: dict[str, Call] = {}
        self.owners = ["w1", "w2"]
        self.holds: dict[str, list[Call]] = {}
        self.to_ask: list[Call] = []  # last requests of tasks that the broker delivers again
        self.stale: list[tuple[Call, int]] = []
        self.replaced: set[str] = set()
        self.to_wake: set[tuple[str, str]] = set()
        self.count = 0
        self.now = 0

    def prepare(self) -> None:
        """Prepare the additional state of a driver's own world."""

    # -- the oracle

    def machine(self, key: str) -> DedupMachine:
        return self.machines.setdefault(key, DedupMachine())

    def stands(self, key: str) -> Standing:
        machine = self.machine(key)
        ids = [each.id if each else "" for each in (machine.head, machine.heir, machine.tail)]
        return Standing._make([*ids, machine.head.token if machine.head else 0])

    def sweep(self, key: str, verb: str) -> None:
        """Remove the calls that the driver finds over when it reads the key for this verb."""
        how, machine = self.driver.sweeps.get(verb, ""), self.machine(key)
        if how == "all":
            for place in (machine.heir, machine.tail):
                if place is not None and self.calls[place.id].lease <= self.now:
                    machine.dequeue(place.id)
                    self.ledger.waits_no_more(place.id, key)
        while how and machine.head is not None:
            head = self.calls[machine.head.id]
            if how == "all" and head.lease <= self.now:
                self.falls(head, "lease lost")
                machine.dequeue(head.id, machine.head.token)
            elif head.timeout and machine.evict(self.now, head.timeout):
                self.falls(head, "timeout")
            else:
                return

    @contextmanager
    def looking(self, key: str, verb: str) -> Iterator[None]:
        """Wrap a step that reads a key: sweep, and note the owner to be woken, whose call may start."""
        before = self.stands(key).head
        self.sweep(key, verb)
        yield
        head = self.machine(key).head
        if head is not None and not head.started and head.id != before:
            self.to_wake.add((self.calls[head.id].owner, key))

    def falls(self, call: Call, why: str) -> None:
        """Note that a head loses its key."""
        if call.token and not self.ledger.run_of(call.id).end:
            self.ledger.takes_from(call.id, why)
        self.ledger.waits_no_more(call.id, call.key)

    def decide(self, call: Call) -> Decision:
        """The expected answer to the call, which the oracle's machine gives too."""
        continues, again = self.repeats(call)
        self.calls[call.id] = call
        call.lease = self.now + LEASE if self.driver.leases else float("inf")
        decision = self.machine(call.key).enqueue(
            call.id, policy=call.policy, waiting=call.waiting, continues=continues, again=again
        )
        if decision.verdict is Verdict.DECLINE:
            self.ledger.is_turned_away(
                call.task, self.calls[decision.covering].task, late=self.runs(decision.covering)
            )
        elif decision.replaced is not None:
            replaced = self.calls[decision.replaced]
            self.replaced.add(replaced.id)
            self.to_wake.add((replaced.owner, call.key))
            self.ledger.waits_no_more(replaced.id, call.key)
            self.ledger.is_turned_away(replaced.task, call.task, late=False)
        if decision.verdict is Verdict.BLOCK:
            self.ledger.waits(call.id, call.key)
        return decision

    def repeats(self, call: Call) -> tuple[tuple[str, int] | None, str | None]:
        """The run that the call continues, and the waiting delivery whose place it takes."""
        machine = self.machine(call.key)
        head, continues = machine.head, None
        if head is not None and self.calls[head.id].task == call.task:
            continues = (head.id, head.token)
            if not head.started:
                self.ledger.waits_no_more(head.id, call.key)
        late = (machine.heir, machine.tail)
        return continues, next((x.id for x in late if x and self.calls[x.id].task == call.task), None)

    def runs(self, call: str) -> bool:
        """Whether the call is a head with a token."""
        head = self.machine(self.calls[call].key).head
        return head is not None and head.id == call and head.started

    def started(self, call: Call, token: int) -> None:
        assert self.machine(call.key).start(call.id, token, self.now)
        call.token = token
        self.ledger.begins(call.id, call.task, call.key, token)

    def ended(self, call: Call, how: str, accepted: bool) -> None:
        self.ledger.ends(call.id, how, accepted=accepted)
        self.stale.append((call, call.token))
        call.token = 0

    # -- the owners, which take the steps

    def held(self, *, running: bool) -> list[Call]:
        return [each for calls in self.holds.values() for each in calls if bool(each.token) == running]

    def forgets(self, call: Call) -> None:
        self.holds[call.owner].remove(call)

    def redelivered(self, call: Call) -> None:
        """Deliver a task again: the broker has had no ack, or the waiting call has lost its place."""
        if not self.ledger.gone.get(call.task):
            self.to_ask.append(call)

    def die(self, owner: str) -> None:
        self.owners[self.owners.index(owner)] = f"{owner}+"
        for call in self.holds.pop(owner, []):
            if call.token and not self.ledger.run_of(call.id).end:
                self.ledger.ends(call.id, "died", accepted=False)
            self.redelivered(call)

    def meets(self, fate: str, owner: str) -> None:
        if fate == "unanswered":
            self.die(owner)
