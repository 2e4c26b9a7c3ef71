"""Awaited calls beside ``delay`` in a thread: calls per second, latency, and the longest turn of the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from benchmarks.buffering import shop
from benchmarks.measure import Report, benchmark, interleave, percentile, spending
from celery_dq.testing.servers import RedisServer

#: Coroutines that call at the same time.
TOGETHER = 1000
#: Seconds between two looks whether the loop runs.
LOOK_S = 0.001
WAYS = ("to_thread", "adelay")


@benchmark(
    "way | calls/s, one at a time | vs to_thread | p50 µs | p99 µs | cpu µs/call "
    "| calls/s, together | vs to_thread | p50 ms | p99 ms | turn ms | late ms",
    f"""
    way: delay in asyncio.to_thread, or await adelay; no result is awaited
    together: {TOGETHER} coroutines that call at the same time; p50 and p99 from their common start
    turn: the longest turn of the loop, in CPU time of its thread, once all coroutines have started
    late: the longest time by which a coroutine that sleeps {LOOK_S * 1000:g} ms comes too late
    """,
)
def awaited(report: Report, quick: bool) -> None:
    """Measure awaited calls that are not buffered, from one event loop."""
    found = interleave(WAYS, 3 if quick else 7, partial(_measure, 500 if quick else 5_000), 120)
    report.compare(
        found, "to_thread", "rate | vs rate | p50 | p99 | cpu | burst | vs burst | b50 | b99 | turn | late"
    )


def _measure(amount: int, way: str) -> dict[str, float]:
    with RedisServer() as server, shop("dq", server) as task:
        call = partial(asyncio.to_thread, task.delay) if way == "to_thread" else task.adelay
        return asyncio.run(_calls(amount, call))


async def _calls(amount: int, call: Callable[..., Any]) -> dict[str, float]:
    await asyncio.gather(*(call(42, "A-1") for _ in range(50)))
    with spending() as spent:
        waits = [await _timed(call, time.perf_counter()) for _ in range(amount)]
    late_s: list[float] = []
    looking = asyncio.create_task(_look(late_s))
    await asyncio.sleep(LOOK_S * 10)
    started = time.perf_counter()
    together = await asyncio.gather(*(_timed(call, started) for _ in range(TOGETHER)))
    took_s = time.perf_counter() - started
    looking.cancel()
    turns = [each async for each in _turns(asyncio.gather(*(call(42, "A-1") for _ in range(TOGETHER))))]
    return {
        "rate": amount / sum(waits),
        "p50": percentile(waits, 0.5) * 1e6,
        "p99": percentile(waits, 0.99) * 1e6,
        "cpu": spent.per(amount)["own"],
        "burst": TOGETHER / took_s,
        "b50": percentile(together, 0.5) * 1e3,
        "b99": percentile(together, 0.99) * 1e3,
        "turn": max(turns) * 1e3,
        "late": max(late_s) * 1e3,
    }


async def _timed(call: Callable[..., Any], started: float) -> float:
    await call(42, "A-1")
    return time.perf_counter() - started


async def _look(late_s: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LOOK_S)
        late_s.append(time.perf_counter() - before - LOOK_S)


async def _turns(calls: asyncio.Future[Any]) -> AsyncIterator[float]:
    """Yield the CPU time of each turn of the loop until all calls are over, in seconds."""
    await asyncio.sleep(0)  # each of them starts, for which the caller asks at one moment
    while not calls.done():
        before = time.thread_time()
        await asyncio.sleep(0)
        yield time.thread_time() - before
