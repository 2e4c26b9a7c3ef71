"""The Celery app of the worker-level tests.

Its tasks report to a Redis of the test. A test waits for these reports, and never sleeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import redis
from billiard.process import current_process
from celery import Celery, Task
from celery.exceptions import Reject, SoftTimeLimitExceeded
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from celery_dq import Throttled
from celery_dq.app.throttling import handle_throttled
from tests.workers import ENVIRONMENT, app_from_environment

NAME = "shop"

#: Databases of the conformance server: the Celery broker, its results, and the witness.
BROKER_DB, RESULT_DB, WITNESS_DB = 1, 2, 3


class Witness:
    """The reports of the tasks to the test, and the release of held tasks by the test."""

    def __init__(self, port: int) -> None:
        # Tests cut connections and restart servers, so the witness retries.
        self._client = redis.Redis(
            port=port,
            db=WITNESS_DB,
            decode_responses=True,
            # The wait has its own limit. A timeout of the client would end it, and repeat it for as long.
            socket_timeout=None,
            retry=Retry(ConstantBackoff(0.1), 100),
            retry_on_error=[redis.ConnectionError],
        )

    def report(self, subject: str, value: object = "") -> None:
        self._client.rpush(f"reported:{subject}", str(value))

    def reports(self, subject: str) -> list[str]:
        return [str(each) for each in self._client.lrange(f"reported:{subject}", 0, -1)]

    def wait(self, subject: str, deadline: float = 30.0) -> str:
        """Wait for the next report on `subject`, and remove it."""
        received = self._client.blpop([f"reported:{subject}"], timeout=deadline)
        if received is None:
            raise TimeoutError(f"no report on {subject!r} within {deadline} s")
        return str(received[1])

    def release(self, key: str, amount: int = 1) -> None:
        """Release `amount` held tasks."""
        self._client.rpush(f"release:{key}", *["go"] * amount)

    def hold(self, key: str, limit: float = 60.0) -> None:
        """Block until released; used by tasks."""
        self._client.blpop([f"release:{key}"], timeout=limit)

    def close(self) -> None:
        self._client.close()


def own_witness(port: int) -> Witness:
    """Return this process's witness on `port`, for its tasks.

    It stays: the finalizer of a client that was dropped after a report can swallow the exception of a signal,
    and the task survives its termination.
    """
    return _witness(port, os.getpid())


@cache
def _witness(port: int, pid: int) -> Witness:
    return Witness(port)


def add_tasks(app: Celery, port: int) -> Celery:
    """Register the tasks on `app`; `port` is the witness's."""

    def witness() -> Witness:
        return own_witness(port)

    def task(**options: Any) -> Callable[[Callable[..., Any]], Any]:
        make: Callable[[Callable[..., Any]], Any] = app.task(shared=False, **options)
        return make

    @task(name="add")
    def add(x: int, y: int) -> int:
        return x + y

    @task(name="total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @task(name="report")
    def report(subject: str, value: object = "") -> None:
        witness().report(subject, value)

    @task(name="report_ignored", ignore_result=True)
    def report_ignored(subject: str) -> str:
        witness().report(subject)
        return "not kept"

    @task(name="own_eta", bind=True)
    def own_eta(self: Task[Any, Any]) -> Any:
        return self.request.eta

    @task(name="fail")
    def fail(text: str = "on purpose") -> None:
        raise ValueError(text)

    @task(name="hold", bind=True)
    def hold(self: Task[Any, Any], key: str) -> str:
        own = witness()
        own.report(f"started:{key}", os.getpid())
        own.hold(key)
        own.report(f"finished:{key}", self.request.id)
        return key

    @task(name="hold_late", bind=True, acks_late=True)
    def hold_late(self: Task[Any, Any], key: str) -> str:
        own = witness()
        own.report(f"started:{key}", os.getpid())
        own.hold(key)
        own.report(f"finished:{key}", self.request.id)
        return key

    @task(name="hold_or_die", bind=True, acks_late=True, reject_on_worker_lost=True)
    def hold_or_die(self: Task[Any, Any], key: str) -> str:
        own = witness()
        own.report(f"started:{key}", os.getpid())
        own.hold(key)
        return key

    @task(name="seem_dead")
    def seem_dead() -> int:
        # The parent takes the child for dead when this pipe is closed.
        child: Any = current_process()
        kept = {1, 2, child.outq._writer.fileno()}
        watched = set(_pipes(os.getppid()).values())
        for fd, pipe in _pipes(os.getpid()).items():
            if pipe in watched and fd not in kept and _is_written(fd):
                os.close(fd)
        return os.getpid()

    @task(name="die_once", bind=True, acks_late=True, reject_on_worker_lost=True)
    def die_once(self: Task[Any, Any], key: str) -> str:
        own = witness()
        own.report(f"deliveries:{key}", self.request.get("dq_deliveries"))  # the stock transport has none
        own.report(f"attempt:{key}")
        if len(own.reports(f"attempt:{key}")) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return "survived"

    @task(name="die", acks_late=True, reject_on_worker_lost=True)
    def die(key: str) -> None:
        witness().report(f"attempt:{key}")
        os.kill(os.getpid(), signal.SIGKILL)

    @task(name="retry", bind=True, max_retries=3)
    def retry(self: Task[Any, Any], key: str, succeed_at: int = 2, countdown: float = 0) -> int:
        witness().report(f"attempt:{key}", self.request.id)
        if self.request.retries < succeed_at:
            raise self.retry(countdown=countdown)
        return int(self.request.retries)

    @task(name="autoretry", autoretry_for=(KeyError,), max_retries=2, default_retry_delay=0)
    def autoretry(key: str) -> None:
        witness().report(f"attempt:{key}")
        raise KeyError(key)

    def throttled(self: Task[Any, Any], key: str, times: int = 2, seconds: float = 0.2) -> int:
        own = witness()
        own.report(f"attempt:{key}", f"{self.request.retries} {time.time()}")
        count = len(own.reports(f"attempt:{key}"))
        if count <= times:
            raise Throttled(seconds)
        return count

    handle_throttled()  # by `celery_dq.setup`, which an app on the stock broker does not call here
    for name, late in (("throttled", False), ("throttled_late", True)):
        task(name=name, bind=True, autoretry_for=(Exception,), max_retries=0, acks_late=late)(throttled)

    @task(name="reject", bind=True, acks_late=True)
    def reject(self: Task[Any, Any], key: str, requeue: bool) -> str:
        own = witness()
        own.report(f"attempt:{key}")
        if len(own.reports(f"attempt:{key}")) == 1:
            raise Reject("no", requeue=requeue)
        return "second time"

    @task(name="patient", bind=True, soft_time_limit=2)
    def patient(self: Task[Any, Any], key: str) -> str:
        try:
            witness().hold(key)
        except SoftTimeLimitExceeded:
            return "soft limit"
        return "released"

    class Noting(Task):  # type: ignore[type-arg]
        def on_failure(self, exc: Exception, task_id: str, *args: Any) -> None:
            witness().report(f"failed:{task_id}", type(exc).__name__)

    @task(name="stubborn", time_limit=1, base=Noting)
    def stubborn(key: str) -> None:
        witness().hold(key)

    @task(name="stubborn_late", time_limit=1, base=Noting, acks_late=True)
    def stubborn_late(key: str) -> None:
        witness().hold(key)

    @task(name="note_failure")
    def note_failure(task_id: str) -> None:
        witness().report(f"errback:{task_id}")

    @task(name="swap", bind=True)
    def swap(self: Task[Any, Any], x: int) -> int:
        raise self.replace(add.s(x, 1))

    @task(name="headers", bind=True)
    def headers(self: Task[Any, Any]) -> dict[str, Any]:
        request = self.request
        return {
            "priority": (request.delivery_info or {}).get("priority"),
            "custom": (request.headers or {}).get("custom"),
        }

    return app


def _pipes(pid: int) -> dict[int, str]:
    """The pipes that a process has open, by file descriptor."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            if (pipe := str(fd.readlink())).startswith("pipe:"):
                found[int(fd.name)] = pipe
    return found


def _is_written(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY


if ENVIRONMENT in os.environ:
    app = app_from_environment(NAME)
    add_tasks(app, int(app.conf["witness_port"]))
