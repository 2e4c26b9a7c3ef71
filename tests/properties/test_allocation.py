"""The ring and the assignment: balance, movement, determinism."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings, strategies as st

from celery_dq.allocation.assignment import (
    Assignment,
    RunningWorker,
    Unit,
    bound,
    compute,
    partitions_of,
    place,
)

NAMES = st.text(max_size=12)
COUNTS = st.integers(1, 40)
WORKERS = st.sets(NAMES, min_size=1, max_size=8)
QUEUES = st.dictionaries(NAMES, COUNTS, max_size=6)

MEMBERS = st.lists(
    st.builds(RunningWorker, NAMES, QUEUES, st.booleans()), max_size=6, unique_by=lambda member: member.name
)


@given(QUEUES, WORKERS, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_each_partition_has_one_worker_within_the_bound_in_any_order(
    queues: dict[str, int], workers: set[str], shuffled: random.Random
) -> None:
    units = partitions_of(queues)
    placed = place(units, workers)
    assert set(placed) == set(units)
    loads = Counter(placed.values())
    assert set(loads) <= workers
    assert all(load <= math.ceil(Fraction(105, 100) * len(units) / len(workers)) for load in loads.values())
    others = list(workers)
    shuffled.shuffle(units)
    shuffled.shuffle(others)
    assert place(units, others) == placed


@given(st.integers(1, 10_000), st.integers(1, 500))
def test_the_bound_is_exact(units: int, workers: int) -> None:
    assert bound(units, workers) == math.ceil(Fraction(105, 100) * units / workers)
    assert bound(units, workers) * workers >= units


@given(
    st.sampled_from([(1, 3000), (100, 30), (3000, 1)]), st.integers(2, 12), st.text(min_size=1, max_size=5)
)
@settings(max_examples=15)
def test_few_partitions_move_when_a_worker_comes_or_goes(
    shape: tuple[int, int], count: int, salt: str
) -> None:
    queues, partitions = shape
    units: list[Unit] = partitions_of({f"{salt}-{number}": partitions for number in range(queues)})
    workers = [f"w{number}@{salt}" for number in range(count + 1)]
    before, after = Assignment(place(units, workers[:-1])), Assignment(place(units, workers))
    # Where a worker leaves, its partitions must move; where it joins, those that it gets.
    optimum = Counter(after.servers.values())[workers[-1]]
    assert before.moved(after) == after.moved(before) <= 1.3 * optimum


def test_few_partitions_move_when_a_queue_gets_more() -> None:
    workers = [f"w{number}" for number in range(7)]
    before, after = (Assignment(place(partitions_of({"push": count}), workers)) for count in (1000, 1100))
    assert before.moved(after) <= 30


@given(MEMBERS)
@settings(max_examples=60)
def test_an_assignment_serves_each_queue_by_workers_that_consume_it(members: list[RunningWorker]) -> None:
    assignment = compute(members)
    assert compute(reversed(members)) == assignment
    assert assignment.is_served(members)
    counts: dict[str, int] = {}
    for member in members:
        for queue, number in member.queues.items():
            counts[queue] = max(number, counts.get(queue, 0))
    assert set(assignment.servers) == set(partitions_of(counts))
    by_name = {member.name: member for member in members}
    for (queue, _), worker in assignment.servers.items():
        consumers = [member for member in members if queue in member.queues]
        assert by_name[worker] in consumers
        assert not by_name[worker].draining or all(member.draining for member in consumers)
    lists = assignment.lists()
    units = [
        (queue, number)
        for queues in lists.values()
        for queue, numbers in queues.items()
        for number in numbers
    ]
    assert len(units) == len(assignment.servers)
    # A member that goes leaves its partitions unserved, and no others.
    for member in members:
        others = [other for other in members if other is not member]
        needed = compute(others).servers
        served_by_it = any(assignment.servers[unit] == member.name for unit in needed)
        assert assignment.is_served(others) is not served_by_it
