"""After a jump of the wall clock or a suspend, no message waits longer, and none is sent twice."""

from __future__ import annotations

import pytest
from kombu import Connection, Producer, Queue

from celery_dq.clock import ManualClock
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.flusher import LAST_DELAY_S
from celery_dq.producer.kombu_sender import KombuSender
from tests.producer.producer_harness import Bench

JUMPS = (0.0, 1.0, 1_700_000_000.0 - 3600, 1_700_000_000.0 + 3600, 4_000_000_000.0)


def test_linger_does_not_know_the_wall_clock(bench: Bench) -> None:
    bench.put(1)
    for wall in JUMPS:
        bench.clock.set_wall(wall)
        assert not bench.flusher.step()
    bench.clock.advance(0.5)
    assert bench.flusher.step()
    assert bench.got == [1]


def test_neither_does_a_broker_that_is_down(bench: Bench) -> None:
    bench.shelf.down = True
    bench.put(1)
    bench.clock.advance(1)
    assert bench.flusher.step()
    bench.shelf.down = False
    for wall in JUMPS:
        bench.clock.set_wall(wall)
        assert not bench.flusher.step(), "it was tried again before its time"
    bench.clock.advance(LAST_DELAY_S)
    assert bench.flusher.step()
    assert bench.got == [1]


def test_nor_the_age_of_messages(bench: Bench) -> None:
    bench.put(1)
    for wall in JUMPS:
        bench.clock.set_wall(wall)
        assert bench.message_store.age_s() == 0
    bench.clock.advance(3)
    assert bench.message_store.age_s() == 3


def test_a_night_of_suspend_sends_everything_once_and_in_order(bench: Bench) -> None:
    for number in range(25):
        bench.put(number)
    assert bench.flusher.step()  # a full batch does not linger
    bench.clock.advance(9 * 3600)
    for number in range(25, 40):
        bench.put(number)
    while bench.flusher.step():
        pass
    bench.clock.advance(9 * 3600)
    while bench.flusher.step():
        pass
    assert bench.got == list(range(40))
    assert bench.message_store.buffer.pending == 0


@pytest.mark.parametrize(
    ("jump_s", "left_ms"), [(0.0, 60_000), (20.0, 40_000), (-3600.0, 60_000), (3600.0, 0)]
)
def test_a_relative_expiration_counts_from_the_call(jump_s: float, left_ms: int) -> None:
    """Two processes share only the wall clock. When it goes back, a message expires later."""
    clock = ManualClock()
    connection = Connection("memory://")
    sender = KombuSender(lambda: connection, Producer, lambda name: Queue(name), clock=clock)
    made = {
        "body": "{}",
        "headers": {"id": "x"},
        "properties": {"expiration": "60000", "delivery_mode": 2},
        "content-type": "application/json",
        "content-encoding": "utf-8",
    }
    addressed = sender.address(made, "", "push", [Queue("push")])
    clock.set_wall(clock.wall() + jump_s)
    sender.send(addressed.lane, "00", [BufferedMessage(1, addressed.id, addressed.payload)])
    queue = Queue("push")(connection.default_channel)
    message = queue.get()
    assert message is not None
    assert message.properties["expiration"] == str(left_ms)
    queue.delete()
    sender.close()
