"""The no-op programs of other task queues on Redis, each with one worker process at its defaults."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import redis

#: Where a process finds the port of the Redis that gets the times.
CLOCK = "BENCH_CLOCK_PORT"


def noop(number: int) -> None:
    return None


def mark(key: str) -> None:
    with redis.Redis(port=int(os.environ[CLOCK])) as client:
        client.rpush(key, time.monotonic())


class PeerApp(NamedTuple):
    """A program of one peer."""

    #: Calls `mark` with each of these keys, or `noop` with each of these numbers.
    publish: Callable[[Iterable[str | int]], None]
    #: Runs the worker until the process is killed.
    work: Callable[[], None]


def huey(port: int) -> PeerApp:
    app = importlib.import_module("huey").RedisHuey("bench", port=port, results=False)
    return PeerApp(_calling(app.task()(mark), app.task()(noop)), lambda: app.create_consumer(workers=1).run())


def dramatiq(port: int) -> PeerApp:
    module: Any = importlib.import_module("dramatiq")
    broker = importlib.import_module("dramatiq.brokers.redis").RedisBroker(url=f"redis://127.0.0.1:{port}")
    actors = [module.actor(task, broker=broker) for task in (mark, noop)]

    def work() -> None:
        # The default of 8 threads. One thread would fetch two messages and sleep until both are done.
        module.Worker(broker).start()
        threading.Event().wait()

    return PeerApp(_calling(*(actor.send for actor in actors)), work)


def rq(port: int) -> PeerApp:
    module: Any = importlib.import_module("rq")
    client = redis.Redis(port=port)
    queue = module.Queue(connection=client)

    def enqueue(task: Callable[..., None]) -> Callable[..., Any]:
        return lambda argument: queue.enqueue(task, argument, result_ttl=0)

    # The worker that does not fork for each job.
    worker = module.SimpleWorker
    return PeerApp(
        _calling(enqueue(mark), enqueue(noop)),
        lambda: worker([queue], connection=client).work(logging_level="WARNING"),
    )


def taskiq(port: int) -> PeerApp:
    broker = importlib.import_module("taskiq_redis").RedisStreamBroker(f"redis://127.0.0.1:{port}")

    @broker.task(task_name="noop")  # type: ignore[untyped-decorator]  # of a module that is found at run time
    async def noop_of_taskiq(number: int) -> None:
        noop(number)

    marking = broker.task(task_name="mark")(mark)

    async def publish(arguments: Iterable[str | int]) -> None:
        await broker.startup()
        for argument in arguments:
            await (marking if isinstance(argument, str) else noop_of_taskiq).kiq(argument)
        await broker.shutdown()

    async def work() -> None:
        broker.is_worker_process = True
        await importlib.import_module("taskiq.api").run_receiver_task(broker, run_startup=True)

    return PeerApp(lambda arguments: asyncio.run(publish(arguments)), lambda: asyncio.run(work()))


def _calling(
    mark_: Callable[[Any], Any], noop_: Callable[[Any], Any]
) -> Callable[[Iterable[str | int]], None]:
    def publish(arguments: Iterable[str | int]) -> None:
        for argument in arguments:
            (mark_ if isinstance(argument, str) else noop_)(argument)

    return publish


#: Name of the package -> its program.
PEER_APPS: dict[str, Callable[[int], PeerApp]] = {
    "huey": huey,
    "dramatiq": dramatiq,
    "taskiq_redis": taskiq,
    "rq": rq,
}
