"""Leaderships stop moving, for any sets of candidates.

The model is a cluster of workers that stand in lines, one for each queue; the first in line leads. The
workers ask their balancers repeatedly, and follow the answers.
"""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, strategies as st

from celery_dq.clock import ManualClock
from celery_dq.singleton.balancer import LOOK_S, Balancer

#: Seconds between two questions of a term whether it should yield.
ASKS_S = 0.5


class Place:
    """One worker's place in one line; its `Balancer` takes it for an elector."""

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


class Cluster:
    """Workers with their queues; the first one of a queue leads until the balancer decides otherwise."""

    def __init__(self, stands_for: Mapping[str, set[str]]) -> None:
        self.clock = ManualClock()
        self.lines: dict[str, list[Place]] = {}
        self.places: dict[str, dict[str, Place]] = {}
        self.balancers: dict[str, Balancer] = {}
        self.moves = 0
        for worker, queues in stands_for.items():
            electors = {queue: Place(self.lines.setdefault(queue, []), worker) for queue in sorted(queues)}
            for place in electors.values():
                place.line.append(place)
            self.places[worker] = electors
            self.balancers[worker] = Balancer(electors, self.clock)
        for line in self.lines.values():
            line[0].term = "the first one"

    def leads(self, worker: str) -> set[str]:
        return {queue for queue, place in self.places[worker].items() if place.term is not None}

    def look(self, rounds: int) -> int:
        """Every term asks that often; returns how often a leadership has moved."""
        before = self.moves
        for _ in range(rounds):
            self.clock.advance(ASKS_S)
            for worker, balancer in self.balancers.items():
                for queue in self.leads(worker):
                    if balancer.should_yield(queue):
                        self.moves += 1
                        self._elect(queue)
        return self.moves - before

    def _elect(self, queue: str) -> None:
        """Move the leader to the end of the line, and then each first worker that lets others go first."""
        line = self.lines[queue]
        line[0].term = None
        line.append(line.pop(0))
        for _ in range(len(line)):
            if self.balancers[line[0].worker].may_take(queue):
                line[0].term = "another one"
                return
            line.append(line.pop(0))
        # Each has let others go first once, and no worker does so twice in a row.
        assert self.balancers[line[0].worker].may_take(queue)
        line[0].term = "another one"

    def lead_over(self, one: str, other: str) -> int:
        shared = set(self.places[one]) & set(self.places[other])
        return len(self.leads(one) & shared) - len(self.leads(other) & shared)


clusters = st.dictionaries(
    st.sampled_from(["ann", "bob", "cid", "dan"]),
    st.sets(st.sampled_from(["audit", "ledger", "mail", "orders", "payments"]), min_size=1),
    min_size=1,
).map(Cluster)


@given(clusters)
def test_leaderships_stop_moving_in_balance(cluster: Cluster) -> None:
    # After as many looks as chance may need
    cluster.look(400)
    # Then no leadership moves, and no worker leads two more queues than another candidate for one of them.
    assert cluster.look(40) == 0
    for one in cluster.places:
        for other in cluster.places:
            if cluster.leads(one) & set(cluster.places[other]):
                assert cluster.lead_over(one, other) < 2


def test_a_queue_of_ones_own_reports_nothing_about_balance() -> None:
    # A worker that leads a queue only it can lead, and one that both can: the other has its own, too
    cluster = Cluster({"ann": {"ledger", "payments"}, "bob": {"ledger", "audit"}})
    assert cluster.look(100) == 0
    assert (cluster.leads("ann"), cluster.leads("bob")) == ({"ledger", "payments"}, {"audit"})


def test_a_worker_looks_once_in_a_while_however_many_queues_it_leads() -> None:
    queues = {f"ledger-{number}" for number in range(20)}
    cluster = Cluster({"ann": queues, "bob": set()})
    rounds = 40
    assert cluster.look(rounds) == 0
    asked = [place.asked for place in cluster.places["ann"].values()]
    assert 1 <= max(asked) <= rounds * ASKS_S / LOOK_S
