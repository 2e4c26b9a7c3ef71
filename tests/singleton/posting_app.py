"""The Celery app of the tests of singleton queues, and the book that checks the tokens.

The book is in a separate Redis that no fault affects. It behaves as a user's database should: each entry has
a token, and the book refuses an entry with a token below the highest one so far.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis
from celery import Celery, Task
from celery.concurrency.asynpool import AsynPool
from celery.exceptions import Reject
from celery.signals import worker_process_init

import celery_dq
from celery_dq import Throttled
from celery_dq.transport.redis.consuming import singleton_delivery as lanes
from tests import replaced  # noqa: F401  # registers its command
from tests.workers import ENVIRONMENT, app_from_environment

NAME = "posting"
QUEUE = "ledger"

#: Checks the token and writes the entry atomically.
_ENTER = """
local highest = tonumber(redis.call('GET', 'highest') or 0)
local token = tonumber(ARGV[1])
if token < highest then
  redis.call('RPUSH', 'refused', ARGV[2])
  return 0
end
redis.call('SET', 'highest', token)
redis.call('RPUSH', 'book', ARGV[2])
return 1
"""


@dataclass(frozen=True)
class Entry:
    """One entry of the book: a message started or finished, or a leader began or ended."""

    event: str
    number: int
    token: int
    worker: str
    pid: int
    monotonic: float


class Book:
    """The book: any process appends entries, and the test reads them."""

    def __init__(self, port: int) -> None:
        # A late answer is awaited without a timeout, because a repeated request would write the entry twice.
        self._client: Any = redis.Redis(port=port, socket_timeout=None)

    def enter(self, event: str, number: int, token: int, worker: str) -> bool:
        """Append an entry; return False if its token is stale."""
        line = json.dumps([event, number, token, worker, os.getpid(), time.monotonic()])
        return bool(self._client.eval(_ENTER, 0, token, line))

    def entries(self, event: str = "") -> list[Entry]:
        """Return the accepted entries in the order of their arrival."""
        lines = [Entry(*json.loads(line)) for line in self._client.lrange("book", 0, -1)]
        return [entry for entry in lines if not event or entry.event == event]

    def numbers(self, event: str) -> list[int]:
        return [entry.number for entry in self.entries(event)]

    def refused(self) -> list[Entry]:
        return [Entry(*json.loads(line)) for line in self._client.lrange("refused", 0, -1)]

    def hold(self, key: str, limit: float = 60.0) -> None:
        self._client.blpop([f"release:{key}"], timeout=limit)

    def release(self, key: str, amount: int = 1) -> None:
        self._client.rpush(f"release:{key}", *["go"] * amount)

    def clear(self) -> None:
        self._client.flushdb()

    def close(self) -> None:
        self._client.close()


def add_tasks(app: Celery, port: int) -> Celery:
    """Register the tasks on `app`; `port` is the port of the book's Redis."""
    celery_dq.setup(app)  # also for a broker that would not need it
    books: dict[int, Book] = {}

    def book() -> Book:
        return books.setdefault(os.getpid(), Book(port))

    worker_process_init.connect(lambda **_: books.clear(), weak=False)

    def task(**options: Any) -> Callable[[Callable[..., Any]], Any]:
        make: Callable[[Callable[..., Any]], Any] = app.task(shared=False, **options)
        return make

    def enter(event: str, self: Any, number: int) -> None:
        token = self.request.dq_token
        if not book().enter(event, number, token, str(self.request.hostname)):
            raise PermissionError(f"token {token} is stale")

    start, finish = partial(enter, "start"), partial(enter, "finish")

    def post(self: Task[Any, Any], number: int, seconds: float = 0.0) -> int:
        start(self, number)
        time.sleep(seconds)  # the work
        finish(self, number)
        return number

    def hold(self: Task[Any, Any], number: int) -> None:
        start(self, number)
        book().hold(str(number))
        finish(self, number)

    late = {"acks_late": True, "reject_on_worker_lost": True}
    # Without a Redis for dedup locks, a worker with such a task does not start.
    keyed = {} if app.conf.get("without_keys") else {"dedup": {"key": "{number}"}}
    task(name="post", bind=True)(post)
    task(name="post_late", bind=True, **late)(post)
    task(name="hold", bind=True)(hold)
    task(name="hold_late", bind=True, **late)(hold)
    task(name="hold_keyed", bind=True, **keyed)(hold)
    # Since Celery 5.7.
    retried = {"retry_on_worker_lost": True, "default_retry_delay": 0}
    task(name="hold_retried", bind=True, **retried)(hold)
    task(name="hold_retried_late", bind=True, acks_late=True, **retried)(hold)

    @task(name="reject_once", bind=True, acks_late=True)
    def reject_once(self: Task[Any, Any], number: int, seconds: float = 0.0) -> None:
        start(self, number)
        if book().numbers("start").count(number) == 1:
            raise Reject("not yet", requeue=True)
        finish(self, number)

    def throttled_once(self: Task[Any, Any], number: int, seconds: float = 0.0) -> None:
        start(self, number)
        if book().numbers("start").count(number) == 1:
            raise Throttled(0.3)
        finish(self, number)

    task(name="throttled_once", bind=True)(throttled_once)
    task(name="throttled_once_late", bind=True, **late)(throttled_once)

    @task(name="refuse_late", bind=True, acks_late=True)
    def refuse_late(self: Task[Any, Any], number: int, seconds: float = 0.0) -> None:
        start(self, number)
        time.sleep(seconds)  # the work
        finish(self, number)
        raise Reject("not this one", requeue=False)

    @task(name="work_on", bind=True)
    def work_on(self: Task[Any, Any], number: int) -> None:
        start(self, number)
        request: Any = self.request
        until = time.monotonic() + 30
        while not request.dq_term_ending and time.monotonic() < until:
            time.sleep(0.02)  # a part of the work
        if request.dq_term_ending:
            finish(self, number)

    @task(name="fail_keyed", bind=True, **keyed)
    def fail_keyed(self: Task[Any, Any], number: int) -> None:
        start(self, number)
        raise LookupError(number)

    @task(name="hold_and_retry", bind=True, max_retries=1)
    def hold_and_retry(self: Task[Any, Any], number: int) -> None:
        start(self, number)
        book().hold(str(number))
        if not self.request.retries:
            raise self.retry(countdown=0.5)
        finish(self, number)

    @task(name="spin_once", bind=True, **late)
    def spin_once(self: Task[Any, Any], number: int, seconds: float) -> None:
        start(self, number)
        if book().numbers("start").count(number) == 1:
            _end_early()
        until = time.monotonic() + seconds
        while book().numbers("start").count(number) == 1 and time.monotonic() < until:
            pass
        finish(self, number)

    @task(name="retry", bind=True, max_retries=3)
    def retry(self: Task[Any, Any], number: int, countdown: float = 0.0, times: int = 1) -> None:
        start(self, number)
        if self.request.retries < times:
            raise self.retry(countdown=countdown)
        finish(self, number)

    @task(name="nothing", ignore_result=True)
    def nothing() -> None:
        pass

    return app


def _end_early() -> None:
    """Close the pipe whose end reports this child's death to the pool, as the kernel may do early."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_launch":
        assert frame.f_back is not None, "this is not a child of a prefork pool"
        frame = frame.f_back
    os.close(frame.f_locals["child_w"])


if ENVIRONMENT in os.environ:
    app = app_from_environment(NAME)
    add_tasks(app, int(app.conf["book_port"]))
    # The number of unconfirmed deliveries must not depend on the current speed of the machine.
    lanes.UNCONFIRMED_S = app.conf.get("unconfirmed_s", lanes.UNCONFIRMED_S)
    if app.conf.get("most_unconfirmed"):
        # The number of unconfirmed deliveries is fixed, on a machine of any speed.
        lanes.most_unconfirmed = lambda service_s: int(app.conf["most_unconfirmed"])
    if app.conf.get("without_rounds"):
        # The pool does not run its periodic check of its children every five seconds.
        pool: Any = AsynPool
        pool.timers = {}
