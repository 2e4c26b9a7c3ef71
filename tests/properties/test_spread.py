"""Leadership comes to rest, whoever stands for what.

Here is a town of workers that stand in lines, one for each queue; the first in line leads. The workers look
at their balance over and over, and do what it says.
"""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, strategies as st

from celery_dq.clock import ManualClock
from celery_dq.singleton.balancer import LOOK_S, Balancer

#: Seconds between two questions of a term whether it should yield.
ASKS_S = 0.5


class Place:
    """One worker's place in one line; an office to its `Balancer`."""

    def __init__(self, line: list[Place], worker: str) -> None:
        self.line = line
        self.worker = worker
        self.who = f"{worker}:unique"
        self.election = self
        self.term: object | None = None
        self.asked = 0

    def candidates(self) -> list[str]:
        self.asked += 1
        return [place.who for place in self.line]


class Town:
    """Workers by the queues that each stands for; who comes first leads, until balance says otherwise."""

    def __init__(self, stands_for: Mapping[str, set[str]]) -> None:
        self.clock = ManualClock()
        self.lines: dict[str, list[Place]] = {}
        self.offices: dict[str, dict[str, Place]] = {}
        self.spreads: dict[str, Balancer] = {}
        self.moves = 0
        for worker, queues in stands_for.items():
            electors = {queue: Place(self.lines.setdefault(queue, []), worker) for queue in sorted(queues)}
            for place in electors.values():
                place.line.append(place)
            self.offices[worker] = electors
            self.spreads[worker] = Balancer(electors, self.clock)
        for line in self.lines.values():
            line[0].term = "the first one"

    def led(self, worker: str) -> set[str]:
        return {queue for queue, place in self.offices[worker].items() if place.term is not None}

    def look(self, rounds: int) -> int:
        """Every term asks that often; returns how often a leadership has moved."""
        before = self.moves
        for _ in range(rounds):
            self.clock.advance(ASKS_S)
            for worker, spread in self.spreads.items():
                for queue in self.led(worker):
                    if spread.should_yield(queue):
                        self.moves += 1
                        self._elect(queue)
        return self.moves - before

    def _elect(self, queue: str) -> None:
        """The leader goes to the end of the line, and so does whoever is first and lets others go first."""
        line = self.lines[queue]
        line[0].term = None
        line.append(line.pop(0))
        for _ in range(len(line)):
            if self.spreads[line[0].worker].may_take(queue):
                line[0].term = "another one"
                return
            line.append(line.pop(0))
        # Each has let others go first once, and nobody does so twice in a row.
        assert self.spreads[line[0].worker].may_take(queue)
        line[0].term = "another one"

    def lead_over(self, one: str, other: str) -> int:
        shared = set(self.offices[one]) & set(self.offices[other])
        return len(self.led(one) & shared) - len(self.led(other) & shared)


towns = st.dictionaries(
    st.sampled_from(["ann", "bob", "cid", "dan"]),
    st.sets(st.sampled_from(["audit", "ledger", "mail", "orders", "payments"]), min_size=1),
    min_size=1,
).map(Town)


@given(towns)
def test_leadership_comes_to_rest_in_balance(town: Town) -> None:
    # After as many looks as chance may need
    town.look(400)
    # Then nothing moves any more, and nobody leads two more than somebody who could take one of them.
    assert town.look(40) == 0
    for one in town.offices:
        for other in town.offices:
            if town.led(one) & set(town.offices[other]):
                assert town.lead_over(one, other) < 2


def test_a_queue_of_ones_own_reports_nothing_about_balance() -> None:
    # A worker that leads a queue only it can lead, and one that both can: the other has its own, too
    town = Town({"ann": {"ledger", "payments"}, "bob": {"ledger", "audit"}})
    assert town.look(100) == 0
    assert (town.led("ann"), town.led("bob")) == ({"ledger", "payments"}, {"audit"})


def test_a_worker_looks_once_in_a_while_however_many_queues_it_leads() -> None:
    queues = {f"ledger-{number}" for number in range(20)}
    town = Town({"ann": queues, "bob": set()})
    rounds = 40
    assert town.look(rounds) == 0
    asked = [place.asked for place in town.offices["ann"].values()]
    assert 1 <= max(asked) <= rounds * ASKS_S / LOOK_S
