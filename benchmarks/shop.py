"""The Celery app of the worker benchmarks: a task that does nothing, and tasks that report the time."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import socket
import struct
import sys
import time
from typing import Any

import redis
from celery import Celery

from tests.workers import ENVIRONMENT, app_from_environment, make_app

NAME = "bench"
#: Settings of a fresh installation. The apps of the tests have a prefetch multiplier of 1.
DEFAULTS: dict[str, Any] = {"worker_prefetch_multiplier": 4}
#: A report of ``trickled``: seconds from the call to the first line of the task.
WAIT = struct.Struct("d")
#: An entry of the file of ``recorded``: the monotonic time, and the argument.
RECORD = struct.Struct("=dI")


def add_tasks(app: Celery, clock_port: int) -> Celery:
    @app.task(name="noop", shared=False, ignore_result=True)
    def noop(number: int = 0) -> None:
        return None

    @app.task(name="trickled", shared=False, ignore_result=True)
    def trickled(sent: float) -> None:
        # A datagram costs the task microseconds, and no command of any Redis.
        REPORTS.sendto(WAIT.pack(time.monotonic() - sent), ("127.0.0.1", app.conf["report_port"]))

    @app.task(name="mark", shared=False, ignore_result=True)
    def mark(key: str) -> None:
        now = time.monotonic()
        if clock_port:
            with redis.Redis(port=clock_port, socket_timeout=None) as client:
                client.rpush(key, now)
        else:
            MARKS.append(now)
            if key == "end":
                print(MARKS[1] - MARKS[0], flush=True)
                os._exit(0)  # the floor is measured, and an in-memory broker has nothing to close

    @app.task(name="stamp", shared=False, ignore_result=True)
    def stamp(sent: float) -> None:
        now = time.monotonic()
        with redis.Redis(port=clock_port, socket_timeout=None) as client:
            client.rpush("stamps", now - sent)

    @app.task(name="counted", shared=False, ignore_result=True)
    def counted() -> None:
        # Every 100th task reports, so that a run that is cut short has a rate, too.
        number = next(COUNTED)
        if number == 1 or number % 100 == 0:
            now = time.monotonic()
            with redis.Redis(port=clock_port, socket_timeout=None) as client:
                client.set("done", f"{number} {now}")
                if number == 1:
                    client.rpush("begin", now)
                if number == app.conf["counted"]:
                    client.rpush("end", now)

    @app.task(name="recorded", shared=False, ignore_result=True)
    def recorded(number: int) -> None:
        os.write(_record(app.conf["record"]), RECORD.pack(time.monotonic(), number))

    if app.conf.get("throttled_by"):
        from celery_dq import Throttled

        @app.task(name="call_service", shared=False, ignore_result=True, bind=True, max_retries=None)
        def call_service(self: Any, tenant: str, sent: float) -> None:
            with redis.Redis(port=clock_port, socket_timeout=None) as service:
                answer: Any = service.eval(SERVICE, 0, tenant, app.conf["retry_after_s"], sent)
            wait_s = float(answer)
            if wait_s and app.conf["throttled_by"] == "retry":
                raise self.retry(countdown=wait_s)
            if wait_s:
                raise Throttled(wait_s)

    if app.conf.get("has_keyed"):
        # Other workers do without the import, because their memory is measured.
        from celery_dq.dedup import dedup

        @app.task(name="keyed", shared=False, ignore_result=True)
        @dedup(key="{number}")
        def keyed(number: int) -> None:
            return None

    return app


#: A service that answers the seconds of a Retry-After, or 0. It limits some tenants, each for as long as it
#: has served them before. `early` counts the calls before the end; `recovered` has the seconds from the end
#: to the next call, and `latencies` those from a call of another tenant to its task.
SERVICE = """
local tenant, length, sent, time = ARGV[1], tonumber(ARGV[2]), ARGV[3], redis.call('TIME')
local now = time[1] + time[2] / 1e6
if redis.call('SISMEMBER', 'limited', tenant) == 0 then
  redis.call('RPUSH', 'latencies', string.format('%.6f', now - sent))
  return '0'
end
local ends = tonumber(redis.call('HGET', 'ends', tenant) or 0)
if ends > now then
  redis.call('INCR', 'early')
  return string.format('%.6f', ends - now)
end
if redis.call('HDEL', 'waits', tenant) == 1 then
  redis.call('RPUSH', 'recovered', string.format('%.6f', now - ends))
end
if now < ends + length then return '0' end
redis.call('INCR', 'answers')
redis.call('HSET', 'ends', tenant, string.format('%.6f', now + length))
redis.call('HSET', 'waits', tenant, '1')
return string.format('%.6f', length)
"""


@functools.cache
def _record(path: str) -> int:
    """Return the descriptor of the file of ``recorded``, to which threads and processes append."""
    return os.open(path, os.O_WRONLY | os.O_APPEND)


#: The number of the next ``counted`` of this process; threads share it.
COUNTED = itertools.count(1)
#: Any process of a pool may send from its copy.
REPORTS = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
atexit.register(REPORTS.close)
#: When the first and last marks of the floor ran; only its single process writes here.
MARKS: list[float] = []


def quiet_worker(app: Celery, pool: str) -> Any:
    """Return a worker with one slot that sends no events to others, in this process."""
    quiet: Any = {f"without_{name}": True for name in ("mingle", "gossip", "heartbeat")}
    return app.Worker(pool=pool, concurrency=1, loglevel="WARNING", **quiet)


def floor(amount: int, late: bool, pool: str) -> None:
    """Measure the floor of Celery itself: publish to ``memory://`` and run the tasks in this process."""
    conf = {"broker_url": "memory://", "task_acks_late": late, "worker_redirect_stdouts": False, **DEFAULTS}
    app = add_tasks(make_app(NAME, None, conf), 0)
    with app.producer_pool.acquire(block=True) as producer:
        app.tasks["mark"].apply_async(("begin",), producer=producer)
        for number in range(amount):
            app.tasks["noop"].apply_async((number,), producer=producer)
        app.tasks["mark"].apply_async(("end",), producer=producer)
    quiet_worker(app, pool).start()


if __name__ == "__main__":
    floor(int(sys.argv[1]), sys.argv[2] == "late", sys.argv[3])
elif ENVIRONMENT in os.environ:
    app = app_from_environment(NAME)
    add_tasks(app, int(app.conf["clock_port"]))
