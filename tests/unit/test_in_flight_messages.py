"""Threads that meet in the ledger of in-flight messages, one step after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from celery_dq.clock import ManualClock, SystemClock
from celery_dq.transport import in_flight
from celery_dq.transport.in_flight import InFlightMessages, PausingRequeue
from celery_dq.transport.redis.consumer_identity import InDoubtClaims
from celery_dq.transport.redis.consuming.consumer_thread import Leases

ENDS: dict[str, Callable[[InFlightMessages, str], object]] = {
    "finish": lambda ledger, tag: ledger.finish(tag),
    "release": lambda ledger, tag: ledger.release(tag, "requeue"),
    "throttled": lambda ledger, tag: ledger.release(tag, PausingRequeue(1, "", b"", False)),
    "dead letter": lambda ledger, tag: ledger.dead_letter(tag, "a fault", b""),
}


def stepwise(call: Callable[[], Any], step: Callable[[], None]) -> Any:
    """Make a call, and another one at each step of the ledger's code, where Python may switch to a thread."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != in_flight.__file__:
            return None
        is_new, frame.f_trace_opcodes = not frame.f_trace_opcodes, True
        if is_new and sys.version_info[:2] == (3, 12):
            sys.settrace(trace)  # it reports the opcodes of the frame only from then on
        if event == "opcode":
            sys.settrace(None)
            step()
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


@pytest.fixture
def ledger() -> InFlightMessages:
    return InFlightMessages(SystemClock(), lease_s=15.0)


@pytest.fixture
def leases(ledger: InFlightMessages) -> Leases:
    process: Any = SimpleNamespace(in_flight=ledger, in_doubt=InDoubtClaims(SystemClock()))
    return Leases(process)


@pytest.mark.parametrize("end", ENDS)
def test_the_lease_is_in_use_at_each_step_of_an_end(
    ledger: InFlightMessages, leases: Leases, end: str
) -> None:
    """Otherwise the consumer thread ends the lease, and Redis delivers the message again."""
    held = ledger.add("p", "m", "1")
    assert held is not None
    tag, seen = held.tag, list[bool]()
    stepwise(lambda: ENDS[end](ledger, tag), lambda: seen.append(leases.is_in_use("p")))
    assert len(seen) > 20
    assert all(seen)


@pytest.mark.parametrize("end", ENDS)
def test_the_lease_is_in_use_at_whichever_step_of_the_look_a_message_ends(
    ledger: InFlightMessages, leases: Leases, end: str
) -> None:
    moment, steps = 0, 1
    while moment < steps:
        held = ledger.add("p", "m", str(moment))
        assert held is not None
        tag, passed = held.tag, 0

        def step(tag: str = tag, moment: int = moment) -> None:
            nonlocal passed
            if passed == moment:
                ENDS[end](ledger, tag)
            passed += 1

        assert stepwise(lambda: leases.is_in_use("p"), step)
        ENDS[end](ledger, tag)
        assert ledger.abandon_partition("p") == 1
        ledger.forget_partition("p")
        assert not leases.is_in_use("p")
        moment, steps = moment + 1, passed
    assert steps > 20


def test_no_task_starts_after_six_tenths_of_a_lease_without_an_answer() -> None:
    """The promise: when another worker may take the messages, this one has long ceased to start them."""
    clock = ManualClock()
    ledger = InFlightMessages(clock, lease_s=10.0)
    ledger.record_renewal("p", clock.monotonic())
    clock.advance(5.9)
    assert ledger.is_lease_trusted("p")
    clock.advance(0.2)
    assert not ledger.is_lease_trusted("p")
