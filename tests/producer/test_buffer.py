from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from celery_dq.producer.buffer import BufferedMessage, Lane, Limits, MessageBuffer

LIMITS = Limits(batch_size=3, linger_s=0.01, max_messages=8, max_bytes=100)


def message(sequence: int, size: int = 1) -> BufferedMessage:
    return BufferedMessage(sequence, b"", b"x" * size)


def filled(count: int, limits: Limits = LIMITS) -> tuple[MessageBuffer, Lane]:
    buffer, lane = MessageBuffer(limits), Lane("a", b"a")
    for sequence in range(count):
        buffer.add(lane, message(sequence), 1.0)
    return buffer, lane


def numbers(batch: list[BufferedMessage]) -> list[int]:
    return [each.sequence for each in batch]


def test_one_batch_is_in_flight_and_goes_again_as_it_was() -> None:
    buffer, lane = filled(2)
    buffer.take(2.0)
    buffer.add(lane, message(2), 2.0)
    buffer.failed(lane, 3.0)
    buffer.flush_soon()
    assert buffer.take(2.9) is None
    assert buffer.take(3.0) is lane
    assert numbers(buffer.done(lane, 3.0)) == [0, 1]


def test_lanes_take_turns_and_the_dead_come_first() -> None:
    buffer = MessageBuffer(LIMITS)
    lanes = [Lane("a", b"a"), Lane("b", b"b"), Lane("c", b"c", adopted=True)]
    for lane in lanes:
        for sequence in range(6):
            buffer.load(lane, [message(sequence)], 0, 1.0)
    turns = []
    while (taken := buffer.take(9.0)) is not None:
        turns.append(taken.key)
        buffer.done(taken, 9.0)
    assert turns == ["c", "c", "a", "b", "a", "b"]


def test_memory_is_limited_by_count_and_by_bytes() -> None:
    buffer, lane = filled(8)
    assert not buffer.admits(lane, 1)
    buffer, lane = filled(1)
    assert buffer.admits(lane, 99)
    assert not buffer.admits(lane, 100)


def test_the_refused_one_is_found_by_halving() -> None:
    buffer, lane = filled(8, Limits(batch_size=8, linger_s=0))
    sent: list[int] = []
    refused: list[int] = []
    calls = 0
    while buffer.take(9.0) is not None:
        calls += 1
        if 5 in numbers(lane.in_flight):
            if not buffer.split(lane):
                refused += numbers(buffer.done(lane, 9.0))
        else:
            sent += numbers(buffer.done(lane, 9.0))
    assert (sent, refused) == ([0, 1, 2, 3, 4, 6, 7], [5])
    assert calls < 12


def test_the_age_is_that_of_the_oldest() -> None:
    buffer, lane = MessageBuffer(LIMITS), Lane("a", b"a")
    for sequence in range(5):
        buffer.add(lane, message(sequence), float(sequence))
    assert buffer.oldest_s(10.0) == 10.0
    buffer.take(10.0)
    assert buffer.oldest_s(10.0) == 10.0
    buffer.done(lane, 10.0)
    assert buffer.oldest_s(10.0) == 7.0
    buffer.take(10.5)
    buffer.done(lane, 11.0)
    assert buffer.oldest_s(12.0) == 0.0


class Traffic(RuleBasedStateMachine):
    """After any sequence of operations, each lane was delivered in order and once, and the sums are right."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = MessageBuffer(LIMITS)
        self.lanes = {key: Lane(key, key.encode(), adopted=key == "c") for key in "abc"}
        self.put: dict[str, list[int]] = {key: [] for key in "abc"}
        self.out: dict[str, list[int]] = {key: [] for key in "abc"}
        self.disk: dict[str, list[int]] = {key: [] for key in "abc"}
        self.sequence = 0
        self.now = 1.0

    @rule(key=st.sampled_from("abc"), size=st.integers(1, 40))
    def add(self, key: str, size: int) -> None:
        self.sequence += 1
        lane = self.lanes[key]
        lane.next_sequence = self.sequence + 1
        if self.buffer.admits(lane, size):
            self.buffer.add(lane, message(self.sequence, size), self.now)
        else:
            self.buffer.add_stored(lane, self.sequence, self.now)
            self.disk[key].append(self.sequence)
        self.put[key].append(self.sequence)

    @rule(seconds=st.sampled_from([0.001, 0.01, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 4))
    def load(self, count: int) -> None:
        lane = self.buffer.wants_loading()
        if lane is not None:
            disk = self.disk[lane.key]
            part, self.disk[lane.key] = disk[:count], disk[count:]
            self.buffer.load(lane, map(message, part), len(part), self.now)

    @rule()
    def flush(self) -> None:
        self.buffer.flush_soon()
        for lane in self.lanes.values():
            if lane.waiting and not lane.in_flight:
                assert self.buffer.next_due() <= max(self.now, lane.retry_at)

    @rule(fate=st.sampled_from(["done", "part", "failed", "split"]))
    def send(self, fate: str) -> None:
        due = self.buffer.next_due()
        lane = self.buffer.take(self.now)
        assert (lane is not None) == (due <= self.now)
        if lane is None:
            return
        assert 1 <= len(lane.in_flight) <= 3
        if fate == "part":
            self.out[lane.key] += numbers(self.buffer.done_in_part(lane, 1, self.now))
        elif fate == "failed":
            self.buffer.failed(lane, self.now + 0.5)
        elif fate == "done" or not self.buffer.split(lane):
            self.out[lane.key] += numbers(self.buffer.done(lane, self.now))

    @invariant()
    def in_order_and_complete(self) -> None:
        held = 0
        for key, lane in self.lanes.items():
            rest = numbers([*lane.in_flight, *lane.waiting])
            assert self.out[key] + rest + self.disk[key] == self.put[key]
            assert lane.stored == len(self.disk[key])
            assert (lane.producer in self.buffer.active) == lane.busy
            held += len(rest)
        assert self.buffer.messages == held
        assert self.buffer.pending == sum(lane.pending for lane in self.lanes.values())
        assert self.buffer.bytes == sum(
            len(each.payload) for lane in self.lanes.values() for each in (*lane.in_flight, *lane.waiting)
        )


def test_every_lane_keeps_its_order() -> None:
    run_state_machine_as_test(
        Traffic, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )
