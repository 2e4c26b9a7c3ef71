"""A Celery app whose tasks report their steps, for tests with real workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar

import redis
from billiard import current_process
from celery import Celery, Task, bootsteps, chain, chord, group
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.signals import worker_process_init
from celery.worker.request import Request
from kombu import Consumer, Queue

from celery_dq import Throttled
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import DQ
from tests.conformance.shop import Witness, own_witness
from tests.workers import ENVIRONMENT, WorkerProcess, app_from_environment, make_app

NAME = "worker_app"
BROKER_DB, RESULT_DB = 1, 2

_serial = count()


def add_tasks(app: Celery, port: int) -> Celery:
    """Register the tasks, which report to the witness on `port`."""

    def report(subject: str, value: object) -> None:
        own_witness(port).report(subject, value)

    @app.task(name="note")
    def note(what: Any) -> Any:
        report("ran", what)
        return what

    @app.task(name="note_late", acks_late=True)
    def note_late(what: Any) -> None:
        report("ran", what)

    @app.task(name="timed")
    def timed(due: float) -> None:
        report("late", time.time() - due)

    @app.task(name="hold", bind=True)
    def hold(self: Any, key: str) -> str:
        report("began", key)
        own_witness(port).hold(key)
        report("ended", key)
        return key

    @app.task(name="hold_late", bind=True, acks_late=True, reject_on_worker_lost=True)
    def hold_late(self: Any, key: str) -> str:
        report("began", key)
        own_witness(port).hold(key)
        report("ended", key)
        return key

    @app.task(name="linger")
    def linger(key: str) -> None:
        try:
            own_witness(port).hold(key)
        except SoftTimeLimitExceeded:
            report("warned", key)
            own_witness(port).hold(key)
        report("ended", key)

    @app.task(name="listen")
    def listen(key: str, seconds: float) -> None:
        report("began", key)
        own_witness(port).hold(key)
        with app.connection_for_read() as connection, Consumer(connection, [Queue("silence")]):
            began = time.monotonic()
            with suppress(TimeoutError):
                connection.drain_events(timeout=seconds)
            report("listened", time.monotonic() - began)

    @app.task(name="nap", acks_late=True)
    def nap(seconds: float) -> None:
        report("began", "nap")
        time.sleep(seconds)  # stands for work
        report("ended", "nap")

    @app.task(name="spin", acks_late=True)
    def spin(seconds: float) -> None:
        report("began", "spin")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
        report("ended", "spin")

    @app.task(name="die", acks_late=True, reject_on_worker_lost=True)
    def die(key: str) -> None:
        report("began", key)
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="end_with_lock")
    def end_with_lock() -> None:
        # As a child that is killed while it looks whether its results were read.
        child: Any = current_process()
        child._target.on_ready_counter.get_lock().acquire()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    @app.task(name="outcome", bind=True, max_retries=2)
    def outcome(self: Any, how: str) -> Any:
        report("began", how)
        if how == "fail":
            raise ValueError(how)
        if how == "ignore":
            raise Ignore
        if how == "reject":
            raise Reject(how)
        if how == "retry" and self.request.retries < 2:
            raise self.retry(countdown=0.05)
        return how

    def hold_then_retry(self: Any, key: str) -> None:
        if self.request.retries:
            report("ran", key)
            return
        report("began", key)
        own_witness(port).hold(key)
        raise self.retry(countdown=0)

    def hold_then_call(key: str) -> None:
        report("began", key)
        own_witness(port).hold(key)
        note.delay(key)

    def hold_then(name: str, call: Callable[[list[Any]], Any]) -> None:
        @app.task(name=f"hold_then_{name}")
        def hold_then_call_several(key: str) -> None:
            report("began", key)
            own_witness(port).hold(key)
            call([note.signature((number,), options={"tenant": "a"}, immutable=True) for number in range(2)])

    hold_then("group", lambda calls: group(calls).apply_async())
    hold_then("chain", lambda calls: chain(*calls).apply_async())
    hold_then("chord", lambda calls: chord(calls[:1])(calls[1]))

    @app.task(name="hold_then_reject", acks_late=True)
    def hold_then_reject(key: str) -> None:
        report("began", key)
        own_witness(port).hold(key)
        raise Reject(key)

    def die_once(self: Any) -> None:
        report("tenant", self.request.properties.get("tenant"))
        if not self.request.retries:
            os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="hold_again", retry_on_worker_lost=True, max_retries=1, default_retry_delay=0)
    def hold_again(key: str) -> None:
        report("began", key)
        own_witness(port).hold(key)

    def die_at_last(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="succeed_and_die", on_success=die_at_last)
    def succeed_and_die() -> None:
        pass

    def stumble(what: Any) -> None:
        report("ran", what)

    # Since Celery 5.7.
    retried: dict[str, Any] = {"bind": True, "retry_on_worker_lost": True, "default_retry_delay": 0}

    for ending, late in (("", False), ("_late", True)):
        app.task(name=f"stumble{ending}", acks_late=late, Request=StumblingRequest)(stumble)
        app.task(name=f"hold_then_retry{ending}", bind=True, max_retries=1, acks_late=late)(hold_then_retry)
        app.task(name=f"hold_then_call{ending}", acks_late=late)(hold_then_call)
        make: Any = app.task(name=f"die_once{ending}", acks_late=late, tenant="usual", **retried)
        make(die_once)

    @app.task(name="call_on_own_connection")
    def call_on_own_connection(key: str) -> None:
        publish: Any = note.apply_async
        with app.connection_for_write() as connection:
            options: Any = connection.transport_options
            report("max_retries", options.get("max_retries"))
            publish((key,), connection=connection)
            report("max_retries", options.get("max_retries"))

    @app.task(name="retry_once", bind=True, max_retries=1)
    def retry_once(self: Any, countdown: float) -> None:
        report("attempt", time.monotonic())
        if not self.request.retries:
            raise self.retry(countdown=countdown)

    @app.task(name="repeat_once")
    def repeat_once(countdown: float, is_last: bool = False) -> None:
        report("attempt", time.monotonic())
        if not is_last:
            repeat_once.apply_async((countdown, True), countdown=countdown)

    @app.task(name="use", bind=True, acks_late=True, max_retries=1)
    def use(self: Any, key: str, retries: bool = False) -> None:
        resource = self.request.dq_resource
        report("took", f"{key} {resource}")
        own_witness(port).hold(resource)
        if retries and not self.request.retries:
            raise self.retry(countdown=0)
        report("left", f"{key} {resource}")

    class Noting(Task):  # type: ignore[type-arg]
        def on_failure(self, exc: Exception, *args: Any) -> None:
            report("failed", exc)

        def on_retry(self, exc: Exception, *args: Any) -> None:
            report("retried", exc)

    def ask(self: Any, key: str, retry_after: Any, times: int = 1, tenant: Any = None) -> str:
        """Ask a service that answers 429 at first, so many times."""
        asked, request = f"asked {key}", self.request
        report(asked, f"{time.time()} {request.retries} {request.delivery_info.get('redelivered', False)}")
        if len(own_witness(port).reports(asked)) <= times:
            raise Throttled(retry_after, tenant, f"429 for {key}")
        report("served", key)
        return key

    @app.task(name="hold_then_ask")
    def hold_then_ask(key: str, retry_after: Any) -> None:
        report("began", key)
        own_witness(port).hold(key)
        raise Throttled(retry_after)

    for name, options in (
        ("ask", {}),
        ("ask_late", {"acks_late": True}),
        ("ask_again", {"autoretry_for": (Exception,), "max_retries": 0, "throws": (Throttled,)}),
    ):
        app.task(name=name, bind=True, base=Noting, **options)(ask)

    @app.task(name="errback")
    def errback(task_id: str) -> None:
        report("errback", task_id)

    return app


class StumblingRequest(Request):
    """A request at the start of whose first task the connection is lost, after an early ack."""

    _starts: ClassVar[Iterator[int]] = count()

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        super().on_accepted(pid, time_accepted)
        if not next(self._starts):
            raise ConnectionError("stumbled")


class Stumble(bootsteps.StartStopStep):
    """Loses the first connection after all other steps have started and before the event loop runs."""

    requires = ("celery_dq.worker.bootsteps:ConsumerStep",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._starts = count()

    def start(self, consumer: Any) -> None:
        if not next(self._starts):
            raise ConnectionError("stumbled")


class WrapAcks(bootsteps.Step):
    """Replaces the method by which Celery acknowledges a message, as other people's plugins may."""

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        make_handler = consumer.create_task_handler

        def create_task_handler(*args: Any, **options: Any) -> Any:
            handle = make_handler(*args, **options)

            def on_task_received(message: Any) -> Any:
                ack = message.ack_log_error

                def wrapped(*args: Any, **options: Any) -> None:
                    own_witness(consumer.app.conf["witness_port"]).report("acked", message.headers["task"])
                    ack(*args, **options)

                message.ack_log_error = wrapped
                return handle(message)

            return on_task_received

        consumer.create_task_handler = create_task_handler


class _ShortLived(WorkerProcess):
    def stop(self, how: signal.Signals = signal.SIGKILL, deadline: float = 25.0) -> int:
        return super().stop(how, deadline)


class WorkerApp:
    """A Celery app that publishes, and workers with the same settings."""

    def __init__(self, server: RedisServer, port: int | None = None, **conf: Any) -> None:
        self.server = server
        self.queue = f"worker-app-{next(_serial)}"
        self.conf: dict[str, Any] = {
            "broker_url": DQ.url(port or server.port, BROKER_DB),
            "result_backend": f"redis://127.0.0.1:{server.port}/{RESULT_DB}",
            "task_default_queue": self.queue,
            "witness_port": server.port,
            "dq_lease": 1.0,
            "dq_claim_ahead": 0.01,
            "dq_watchdog": 0,
            "worker_prefetch_multiplier": 4,
            "task_reject_on_worker_lost": True,
            **conf,
        }
        self.app = make_app(NAME, DQ, self.conf)
        self.witness = Witness(server.port)
        # No timeout, also because MONITOR may be silent for long.
        self.client: Any = redis.Redis(port=server.port, db=BROKER_DB, socket_timeout=None)
        self.keys = PartitionKeys("online", self.queue)
        self._names = count()

    def worker(
        self, pool: str = "threads", concurrency: int = 2, *, warm: bool = False, **options: Any
    ) -> WorkerProcess:
        """Return a worker that is killed at the end, or, slower, stopped by a warm shutdown if `warm`."""
        kind = WorkerProcess if warm else _ShortLived
        return kind(
            "tests.broker.worker_app",
            broker=DQ,
            conf=self.conf,
            pool=pool,
            concurrency=concurrency,
            name=f"w{next(self._names)}",
            preloaded=True,
            **options,
        )

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.send_task(task, args, **options)

    def wait_responsive(self) -> None:
        """Wait until the worker answers to remote control: its mailbox opens after it begins to consume."""
        wait_until(lambda: self.app.control.ping(timeout=5, limit=1), 60, what="an answer")

    def ran(self, count_: int, timeout_s: float = 30.0, subject: str = "ran") -> list[str]:
        """Wait until `count_` reports on `subject` have come; return all of them."""
        wait_until(
            lambda: len(self.witness.reports(subject)) >= count_,
            timeout_s,
            what=lambda: f"{count_} on {subject!r}; reports: {self.witness.reports(subject)}",
        )
        return self.witness.reports(subject)

    def settled(self, timeout_s: float = 30.0) -> None:
        """Wait until no message of the queue is stored, in flight or running."""

        def left() -> dict[str, Any]:
            keys = self.keys
            held = list(self.client.scan_iter(keys.prefix + "held:*"))
            return {
                "messages": self.client.hgetall(keys.messages),
                "running": self.client.hgetall(keys.running),
                "held": held,
            }

        wait_until(lambda: not any(left().values()), timeout_s, what=lambda: str(left()))

    def dead(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.client.hgetall(self.keys.dead_info)
        return found

    def close(self) -> None:
        self.app.close()
        self.client.close()
        self.witness.close()


OpenApp = Callable[..., WorkerApp]

if ENVIRONMENT in os.environ:
    app = app_from_environment(NAME)
    add_tasks(app, app.conf["witness_port"])
    if app.conf.get("holds_children"):

        @worker_process_init.connect(weak=False)
        def hold_child(**_: Any) -> None:
            witness = Witness(app.conf["witness_port"])
            witness.report("child", os.getpid())
            witness.hold("child")

    #: Blocks the main thread until "main thread" is released; the other threads go on.
    signal.signal(signal.SIGRTMIN, lambda *_: Witness(app.conf["witness_port"]).hold("main thread"))

    for step, setting in ((Stumble, "stumbles"), (WrapAcks, "wraps_acks")):
        if app.conf.get(setting):
            app.steps["consumer"].add(step)
