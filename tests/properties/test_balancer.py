"""Leaderships stop moving, for any sets of candidates.

The model is a cluster of workers that stand in lines, one for each queue; the first in line leads. The
workers ask their balancers repeatedly, and follow the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hypothesis import given, strategies as st

from celery_dq.clock import ManualClock
from celery_dq.singleton.leaderships import BALANCE_EVERY_S, LONGEST_PAUSE_S, Balancer

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


class Lines:
    """Reads the lines, and counts the readings.

    Args:
        lines: The lines, by queue.
        watched: Whether changes are reported, as by ZooKeeper.
    """

    def __init__(self, lines: Mapping[str, list[Place]], watched: bool) -> None:
        self.lines = lines
        self.watched = watched
        self.asked = 0
        self.seen: dict[str, list[str]] = {}

    @property
    def changed(self) -> bool:
        return self.watched and bool(self.seen) and self.seen != self.now(self.seen)

    def now(self, queues: Collection[str]) -> dict[str, list[str]]:
        return {queue: [place.who for place in self.lines[queue]] for queue in queues}

    def read(self, queues: Collection[str]) -> dict[str, list[str]]:
        self.asked += 1
        self.seen = self.now(queues)
        return self.seen


class Cluster:
    """Workers with their queues; the first one of a queue leads until the balancer decides otherwise."""

    def __init__(self, stands_for: Mapping[str, set[str]], watched: bool = True) -> None:
        self.clock = ManualClock()
        self.lines: dict[str, list[Place]] = {}
        self.places: dict[str, dict[str, Place]] = {}
        self.balancers: dict[str, Balancer] = {}
        self.readers: dict[str, Lines] = {}
        self.moves = 0
        for worker, queues in stands_for.items():
            electors = {queue: Place(self.lines.setdefault(queue, []), worker) for queue in sorted(queues)}
            for place in electors.values():
                place.line.append(place)
            self.places[worker] = electors
            self.readers[worker] = Lines(self.lines, watched)
            self.balancers[worker] = Balancer(electors, self.clock, self.readers[worker])
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


clusters = st.builds(
    Cluster,
    st.dictionaries(
        st.sampled_from(["ann", "bob", "cid", "dan"]),
        st.sets(st.sampled_from(["audit", "ledger", "mail", "orders", "payments"]), min_size=1),
        min_size=1,
    ),
    st.booleans(),
)


@given(clusters)
def test_leaderships_stop_moving_in_balance(cluster: Cluster) -> None:
    # After as many looks as chance may need
    cluster.look(1000)
    # Then no leadership moves, and no worker leads two more queues than another candidate for one of them.
    assert cluster.look(200) == 0
    for one in cluster.places:
        for other in cluster.places:
            if cluster.leads(one) & set(cluster.places[other]):
                assert cluster.lead_over(one, other) < 2


def test_a_queue_of_ones_own_reports_nothing_about_balance() -> None:
    # A worker that leads a queue only it can lead, and one that both can: the other has its own, too
    cluster = Cluster({"ann": {"ledger", "payments"}, "bob": {"ledger", "audit"}})
    assert cluster.look(100) == 0
    assert (cluster.leads("ann"), cluster.leads("bob")) == ({"ledger", "payments"}, {"audit"})


def test_a_worker_reads_less_and_less_while_nothing_changes() -> None:
    queues = {f"ledger-{number}" for number in range(20)}
    cluster = Cluster({"ann": queues, "bob": set()}, watched=False)
    rounds = 1000
    assert cluster.look(rounds) == 0
    first = cluster.readers["ann"].asked
    # A reading is of all queues, and after each check of the balance at first.
    assert 1 <= first <= 5 + rounds * ASKS_S / LONGEST_PAUSE_S
    assert cluster.look(int(2 * LONGEST_PAUSE_S / ASKS_S)) == 0
    assert 1 <= cluster.readers["ann"].asked - first <= 2


def test_a_change_that_is_reported_is_read_at_the_next_check() -> None:
    cluster = Cluster({"ann": {"ledger", "payments"}, "bob": {"audit"}})
    assert cluster.look(1000) == 0
    for queue in ("ledger", "payments"):
        place = cluster.places["bob"][queue] = Place(cluster.lines[queue], "bob")
        place.line.append(place)
    cluster.places["bob"]["audit"].term = None
    before = cluster.readers["ann"].asked
    assert cluster.look(int(2 * BALANCE_EVERY_S / ASKS_S)) == 1
    assert cluster.readers["ann"].asked > before
    assert len(cluster.leads("bob")) == 1
