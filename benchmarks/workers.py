"""Apps, workers and backlogs of the benchmarks that run Celery."""

from __future__ import annotations

from typing import Any

import redis

from benchmarks.shop import DEFAULTS, NAME, add_tasks
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.workers import WorkerProcess, make_app


def settings(url: str, clock_port: int = 0, **more: Any) -> dict[str, Any]:
    """Return the settings of an app here and in its worker; the tasks report to the Redis at `clock_port`."""
    return {**DEFAULTS, "broker_url": url, "clock_port": clock_port, **more}


def app_of(broker: str, conf: dict[str, Any]) -> Any:
    """Return the app; without a broker of the tests, the one in `conf`."""
    return add_tasks(make_app(NAME, BROKERS.get(broker), conf), conf["clock_port"])


def worker_of(broker: str, conf: dict[str, Any], **options: Any) -> WorkerProcess:
    """Return a worker of that app, not started."""
    return WorkerProcess(
        "benchmarks.shop", broker=BROKERS.get(broker), conf=conf, loglevel="WARNING", **options
    )


def publish_backlog(app: Any, amount: int, task: str = "noop") -> None:
    """Publish that many tasks with one argument, between two marks."""
    with app.producer_pool.acquire(block=True) as producer:
        app.tasks["mark"].apply_async(("begin",), producer=producer)
        for number in range(amount):
            app.tasks[task].apply_async((number,), producer=producer)
        app.tasks["mark"].apply_async(("end",), producer=producer)


def seconds_between_marks(clock: RedisServer) -> float:
    """Wait until the worker has run both marks; return the seconds between them."""
    with redis.Redis(port=clock.port, socket_timeout=None) as client:
        begin, end = client.blpop(["begin"], timeout=60), client.blpop(["end"], timeout=300)
    if begin is None or end is None:
        raise TimeoutError("the worker did not run the backlog")
    return float(end[1]) - float(begin[1])


def run_backlog(broker: str, amount: int, pool: str, concurrency: int, **conf: Any) -> dict[str, float]:
    """Publish a backlog of no-op tasks, start a worker, and return its tasks/s from the first to the last."""
    with RedisServer() as server, RedisServer() as clock:
        conf = settings(BROKERS[broker].url(server.port), clock.port, **conf)
        with app_of(broker, conf) as app:
            publish_backlog(app, amount)
            with worker_of(broker, conf, pool=pool, concurrency=concurrency):
                return {"rate": amount / seconds_between_marks(clock)}


def await_end(app: Any, queue: str, deadline_s: float = 60.0) -> None:
    """Wait until the queue holds no message, waiting or in flight."""

    def is_empty() -> bool:
        found = app.dq.queues[queue].snapshot(ages=False)
        return bool(found.waiting == found.held == 0)

    wait_until(is_empty, deadline_s)
