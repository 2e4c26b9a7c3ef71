"""The events of a task's life in a worker, and the gates that its request passes before the pool.

::

    received ──gates──▶ offered ─────▶ in the pool ──▶ accepted ──▶ ending ──▶ (Celery) ──▶ ended
                           │               │
                        refused        forgotten: the pool has dropped the job, and calls nothing back

Celery and billiard call back in several places, and differently for each pool. This module wraps each of
those places once, and reports one event to every subscriber that follows the task, in the order of
:data:`ORDER`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, ClassVar

from billiard import einfo
from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import bootsteps
from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import TaskRevokedError, WorkerTerminate
from celery.platforms import EX_FAILURE
from celery.worker import state
from celery.worker.request import Request
from vine import promise

from celery_dq.compat.celery_calls import ending_lost_run
from celery_dq.compat.guard import check
from celery_dq.compat.prefork_pool import (
    count_without_locks,
    deliver_results_promptly,
    guard_flush,
    notice_deaths,
)
from celery_dq.compat.task_ends import requeues_timeout
from celery_dq.errors import LONGEST_REASON, described
from celery_dq.shown import shown_logger
from celery_dq.transport.in_flight import Message, StoredMessage

#: The order in which a request passes the gates, and in which the subscribers get each event.
ORDER = (
    "zookeeper",  # counts a crash, before Celery requeues the message
    "lease",  # ends the message on a tenant broker
    "ready_requests",  # starts the next request, after the message of this one has ended
    "dedup_locks",  # releases the lock of the task, before its message is released
    "singleton_queues",  # starts the next message, after the lock of this one was released
    "tracing",  # records what the others have done
)


class TaskSubscriber:
    """A part of the worker that takes part in the life of tasks. A method that is not defined does nothing.

    Attributes:
        role: its place in :data:`ORDER`.
    """

    role: ClassVar[str]

    def follows(self, request: Any) -> bool:
        """Return whether the subscriber gets the events of this task; asked when the pool is offered it."""
        raise NotImplementedError

    def offered(self, request: Any) -> None:
        """Prepare a request for the pool, before Celery's own check of revoked tasks.

        Raises:
            TaskRevokedError: the pool must not get the request. Celery frees its slot.
        """

    def refused(self, request: Any) -> None:
        """Note that the pool does not get the request: it is revoked, invalid, or a subscriber refused it."""

    def failed_to_start(self, request: Any) -> None:
        """Note that Celery or the pool raised an error on the way to the pool."""

    def accepted(self, request: Any) -> None:
        """Note that the task starts, or has started in a child process.

        Raises:
            TaskRevokedError: a task of a thread or greenlet must not start.
        """

    def ending(self, request: Any, info: Any, crashed: bool) -> None:
        """Note the outcome, before Celery acknowledges or rejects the message.

        Args:
            request: the request.
            info: the ``ExceptionInfo`` of a task that has failed; None after a success.
            crashed: the process of the task was lost.
        """

    def ended(self, request: Any, info: Any) -> None:
        """Note the end of a task that was in the pool: once, after Celery's bookkeeping.

        Args:
            request: the request.
            info: as in :meth:`ending`; has a ``Retry`` when Celery tries a task again whose process was lost.
        """

    def forgotten(self, request: Any) -> None:
        """Note that the pool has dropped the task, which does not run."""

    def exhausted(self, message: Any, why: str) -> None:
        """Note that a message became a dead letter, because its deliveries have lost their workers."""


logger = shown_logger(__name__)

check("worker")

# The types of both libraries lack a name.
_bootsteps: Any = bootsteps
_einfo: Any = einfo


def stops(consumer: Any) -> bool:
    """Whether the worker shuts down, for any cause, and has not only lost its connection.

    Celery sets a flag after a signal; in a soft shutdown, at its end. Remote control, a connection that is
    not retried, and an error close the worker without a flag.

    Args:
        consumer: Celery's consumer.
    """
    # A flag may be the exit code 0, which also means a stop. Each task costs several calls of this function.
    stop: Any = state.should_stop
    terminate: Any = state.should_terminate
    worker = consumer.controller
    # Not TERMINATE: the app of a worker that has ended may consume without one.
    return (
        (stop is not None and stop is not False)
        or (terminate is not None and terminate is not False)
        or worker.blueprint.state == _bootsteps.CLOSE
        or worker.dq_stops_softly
    )


#: Returned in the place of a result of a task whose error was reported.
_REPORTED = object()


class TaskInPool:
    """One task, from its offer to the pool until its end. Its methods take the place of Celery's callbacks.

    Attributes:
        request: Celery's request.
        job: the pool's job; None for a pool that is closed.
        started: the task has started.
    """

    def __init__(self, events: TaskEvents, request: Any, followers: list[TaskSubscriber]) -> None:
        self.request = request
        self.followers = followers
        self.job: Any = None
        self.started = False
        self._cancelled = False
        self._events = events

    def wrap(self, options: dict[str, Any], *, cancel: bool) -> dict[str, Any]:
        """Replace the callbacks among the arguments of the pool's ``apply_async``, and ``request.cancel``."""
        given = options.get
        self._accept = given("accept_callback") or _nothing
        self._succeed = given("callback") or _nothing
        self._fail = given("error_callback") or _nothing
        self._time_out = given("timeout_callback") or _nothing
        if cancel:
            self._cancel, self.request.cancel = self.request.cancel, self.cancel
        return {
            **options,
            "accept_callback": self.on_accepted,
            "callback": self.on_success,
            "error_callback": self.on_failure,
            "timeout_callback": self.on_timeout,
        }

    def on_accepted(self, pid: int, time_accepted: float) -> Any:
        """Report the start. A child process has begun before; a thread or greenlet begins after it."""
        try:
            for each in self.followers:
                each.accepted(self.request)
        except BaseException:
            self._events.remove(self)
            raise
        self.started = True
        try:
            return self._accept(pid, time_accepted)
        except BaseException:
            if self._events.drops_errors:
                # The error ends the thread or greenlet, and the pool calls nothing back.
                self._end(None)
            raise

    def run(self, target: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run the task in a pool without processes, and report an error that Celery's trace lets through.

        The result backend raises one when it is away. Billiard reports it as a failure. A pool of threads or
        greenlets would drop it, and a solo pool would pass it to the consumer's loop.
        """
        try:
            return target(*args, **options)
        except Exception:
            try:
                self.on_failure(ExceptionInfo())
            except Exception:
                logger.exception(
                    "The failure of task %s[%s] could not be recorded. The task is over, and the result "
                    "backend may lack its state.",
                    self.request.name,
                    self.request.id,
                    extra={"event": "task_end_not_recorded"},
                )
            return _REPORTED

    def on_success(self, failed__retval__runtime: Any, **options: Any) -> Any:
        """Report the end of a task that has returned, or has raised an exception in its child."""
        result = failed__retval__runtime
        if result is _REPORTED:
            return None
        if not isinstance(result, tuple) and hasattr(result, "exception"):
            # Pools without processes report a task that calls sys.exit() here, with the error of a lost
            # process, which Celery's own callback cannot read.
            return self.on_failure(result, **options)
        if self._cancelled and _is_killed(result):
            # Celery would take the task for finished, and acknowledge it.
            return self._end(None)
        info = result[1] if isinstance(result, tuple) and result[0] else None
        return self._handle(info, False, self._succeed, result, **options)

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        """Report the end of a task whose pool has failed to run it."""
        return self._handle(exc_info, is_crash(exc_info), self._fail, exc_info, *args, **options)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Report the end of a task by its hard time limit, where the pool reports no failure before it.

        Billiard calls it with keywords, and the pool of gevent by position.
        """
        request = self.request
        try:
            if not soft and self._events.has(self):
                # A pool of gevent has not reported it as a failure before.
                info = _timed_out(timeout)
                _report(self.followers, lambda each: each.ending(request, info, False))
            with nullcontext() if soft else ending_lost_run(request):
                return self._time_out(soft, timeout)
        except Exception:
            if soft:
                raise
            _log_not_recorded(request, "timed out")
            if request.task.acks_late and not requeues_timeout(request.task):
                request.acknowledge()
            return None
        finally:
            if not soft:
                self._end(None)

    def cancel(self, pool: Any, *args: Any, **options: Any) -> Any:
        """Cancel the task at a cold shutdown, in a pool where Celery would take it for finished.

        A solo pool cannot terminate a job, and raises an error inside the task, which then fails. A green
        pool kills the greenlet, whose result is that of a success. Both would send a late ack.
        """
        self._cancelled = True
        try:
            return self._cancel(pool, *args, **options)
        except NotImplementedError:
            if isinstance(pool, SoloPool) and self._events.has(self):
                # A signal handler runs on the stack of the task: this error ends both, and the task's own
                # error handlers do not catch it.
                raise WorkerTerminate(EX_FAILURE) from None
            self._cancelled = False
            raise

    def _handle(
        self, info: Any, crashed: bool, celerys: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        lost: Any = None
        try:
            _report(self.followers, lambda each: each.ending(self.request, info, crashed))
        finally:
            try:
                with ending_lost_run(self.request) if crashed else nullcontext() as lost:
                    answer = celerys(*args, **options)
            finally:
                if lost is not None and lost.retry is not None:
                    info = SimpleNamespace(exception=lost.retry)
                self._end(info)
        return answer

    def _end(self, info: Any) -> None:
        # Billiard reports a hard time limit twice: as a failure, and as a timeout.
        if self._events.remove(self):
            _report(self.followers, lambda each: each.ended(self.request, info))


class TaskEvents:
    """Reports the events of the tasks of one worker. :func:`task_events` makes it.

    Args:
        consumer: Celery's consumer; its ``create_task_handler`` and ``on_task_request``, the
            ``_process_task`` of its worker, and ``apply_async`` and ``on_stop`` of its pool are replaced.
    """

    def __init__(self, consumer: Any) -> None:
        self._pool = pool = consumer.pool
        self._controller = controller = consumer.controller
        self._subscribers: list[TaskSubscriber] = []
        self._gates: dict[int, Callable[[Any], Any]] = {}
        self._tasks: dict[int, TaskInPool] = {}
        self._passing = (*consumer.connection_errors, *consumer.conninfo.channel_errors)
        _keep_ends_without_backend()
        self._make_handler, consumer.create_task_handler = consumer.create_task_handler, self._task_handler
        self._apply, pool.apply_async = pool.apply_async, self._apply_async
        # Celery's semaphore calls the method by its name; without one the consumer holds the method itself.
        self._process, self._run = controller._process_task, consumer.on_task_request
        if self._run == self._process:
            self._run = self._start
        controller._process_task = self._start
        consumer.on_task_request = partial(self._pass_on, -1)
        self._stop_pool = pool.on_stop
        if not pool.uses_semaphore:
            pool.on_stop = self._stop_then_forget

    def subscribe(self, subscriber: TaskSubscriber) -> None:
        """Report all later events to a subscriber."""
        self._subscribers.append(subscriber)
        self._subscribers.sort(key=lambda each: ORDER.index(each.role))

    def add_gate(self, role: str, receive: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Pass each received request to `receive`.

        Args:
            role: the place of the gate in :data:`ORDER`.
            receive: passes the request on, now or later, or ends it.

        Returns:
            The function that passes a request on, to the next gate or to Celery.
        """
        place = ORDER.index(role)
        self._gates = dict(sorted({**self._gates, place: receive}.items()))
        return partial(self._pass_on, place)

    def _pass_on(self, passed: int, request: Any) -> Any:
        for place, receive in self._gates.items():
            if place > passed:
                return receive(request)
        return self._run(request)

    # -- on the way to the pool

    def _task_handler(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Return Celery's handler of messages, wrapped so that no message stops the worker.

        Celery expects a message that names a task to have the shape of one. A body of another shape, or a
        header of another type, raises any error and ends the worker. The message would return to its place
        and end the next worker.
        """
        handle = self._make_handler(*args, **{"promise": ack_promise, **options})

        def on_task_received(message: Any) -> Any:
            try:
                # Celery counts the tasks by this name when the pool has accepted them, too late for an error.
                hash((message.headers or {}).get("shadow"))
                return handle(message)
            except Exception as error:
                if not self._dead_letters(message, error):
                    raise
                return None

        return on_task_received

    def _dead_letters(self, message: Any, error: BaseException) -> bool:
        """Dead-letter a message of which no task can be made, and return whether that is the end of it."""
        if (
            not isinstance(error, Exception)
            or isinstance(error, self._passing)
            or not isinstance(message, StoredMessage)
            or any(task.request.message is message for task in list(self._tasks.values()))
        ):
            return False
        logger.error(
            "Message %.200s goes to the dead letters: it is not a valid task.",
            message.headers.get("id"),
            exc_info=error,
            extra={"event": "invalid_task_dead_lettered", "queue": message.queue},
        )
        # Celery has ended a message whose task it does not know, before its own bookkeeping has failed.
        if not message.acknowledged:
            message.dead_letter(f"invalid task: {described(error)}"[:LONGEST_REASON])
        return True

    def _start(self, req: Any) -> Any:
        """Pass a request to the pool, as Celery's worker does.

        A message that the pool cannot take must not leave the request reserved: in a prefork pool the error
        may come up in the callback of another task, and would stop no worker.
        """
        followers = self._followers(req)
        if not followers:
            return self._process(req)
        self._tasks[id(req)] = TaskInPool(self, req, followers)
        try:
            for each in followers:
                each.offered(req)
            return req.execute_using_pool(self._pool)
        except TaskRevokedError:
            pass
        except BaseException as error:
            self._tasks.pop(id(req), None)
            _report(followers, lambda each: each.failed_to_start(req))
            state.task_ready(req)
            if not self._dead_letters(req.message, error):
                self._release_slot()
                raise
        self.refuse(req)
        self._release_slot()
        return None

    def _release_slot(self) -> None:
        release_slot = getattr(self._controller, "_quick_release", None)
        if release_slot is not None:
            release_slot()

    def refuse(self, request: Any) -> None:
        """Report that the pool does not get a request."""
        self._tasks.pop(id(request), None)
        _report(self._followers(request), lambda each: each.refused(request))

    def _followers(self, request: Any) -> list[TaskSubscriber]:
        return [each for each in self._subscribers if each.follows(request)]

    def _apply_async(self, target: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        task = self._tasks.get(id(getattr(options.get("callback"), "__self__", None)))
        if task is None:
            return self._apply(target, args, kwargs, **options)
        has_processes = self._pool.uses_semaphore
        options = task.wrap(options, cancel=not has_processes)
        job = self._apply(target if has_processes else partial(task.run, target), args, kwargs, **options)
        if self.has(task):
            task.job = job
        return job

    # -- in the pool

    @property
    def drops_errors(self) -> bool:
        """Whether the pool drops an error that a callback raises in its thread or greenlet."""
        return not (self._pool.uses_semaphore or isinstance(self._pool, SoloPool))

    @property
    def requests(self) -> set[Any]:
        """The requests that the pool has."""
        return {task.request for task in list(self._tasks.values())}

    def has(self, task: TaskInPool) -> bool:
        """Return whether the pool has the task, which has not ended."""
        return self._tasks.get(id(task.request)) is task

    def remove(self, task: TaskInPool) -> bool:
        """Remove a task that has ended; return whether this was its first end."""
        # The job has the task's callbacks. A cycle would keep the message until the garbage collection.
        task.job = None
        return self._tasks.pop(id(task.request), None) is not None

    def flushed(self, kept: frozenset[int]) -> None:
        """Report the tasks that a prefork pool has dropped, after a lost connection or at the end.

        Args:
            kept: the ``id`` of each job that the pool still knows.
        """
        for task in list(self._tasks.values()):
            if id(task.job) not in kept:
                self._forget(task)

    def _stop_then_forget(self) -> None:
        """Report the tasks that a pool of threads cancels without a callback when it stops."""
        self._stop_pool()
        for task in reversed(list(self._tasks.values())):
            if not task.started:
                self._forget(task)

    def exhausted(self, message: Any, why: str) -> None:
        """Report a message that is not delivered again, because its deliveries have lost their workers."""
        for each in self._subscribers:
            each.exhausted(message, why)

    def _forget(self, task: TaskInPool) -> None:
        if self.remove(task):
            _report(task.followers, lambda each: each.forgotten(task.request))


def task_events(consumer: Any) -> TaskEvents:
    """Return the events of the tasks of this consumer. The first call replaces Celery's methods."""
    events: TaskEvents | None = getattr(consumer, "dq_task_events", None)
    if events is None:
        events = consumer.dq_task_events = TaskEvents(consumer)
    return events


class TaskEventsStep(bootsteps.StartStopStep):
    """Replaces the methods of a pool that has started. Does nothing in a worker without a subscriber."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        """Get the pool's reports, at the start and after each lost connection."""
        if getattr(consumer, "dq_task_events", None) is not None:
            guard_flush(consumer.pool, task_events(consumer).flushed)
            notice_deaths(consumer.pool)
            deliver_results_promptly(consumer.pool)
            count_without_locks(consumer.pool)


def _report(followers: Iterable[TaskSubscriber], event: Callable[[TaskSubscriber], object]) -> None:
    """Report an event to each follower, and raise the first error of them only then."""
    first: BaseException | None = None
    for follower in followers:
        try:
            event(follower)
        except BaseException as error:  # noqa: PERF203 - the others get the event, too
            first = first or error
    if first is not None:
        raise first


def error_of(info: Any) -> BaseException | None:
    """Return the error of a task, without the traceback with which billiard may wrap it; None without one."""
    error: BaseException | None = getattr(info, "exception", None)
    return error.exc if isinstance(error, _einfo.ExceptionWithTraceback) else error


def is_crash(info: Any) -> bool:
    """Whether the error of a pool means that the process of the task was lost."""
    return isinstance(error_of(info), (WorkerLostError, SystemExit, KeyboardInterrupt))


#: Celery's methods that announce an end of a request, and what each notes on the request at last.
_ANNOUNCEMENTS = {"_announce_revoked": "_already_revoked", "_announce_cancelled": "_already_cancelled"}


def _keep_ends_without_backend() -> None:
    """Let revoked and cancelled requests end when the result backend is away. Idempotent.

    Celery tells the backend first, and notes the end and acknowledges only then. Without the note, a late
    message that was cancelled after a lost connection counts as revoked, and is acknowledged, when its child
    process ends. The error of a revoked one looks like a lost connection to the broker, again and again.
    """
    for name, noted in _ANNOUNCEMENTS.items():
        announce = getattr(Request, name)
        if not hasattr(announce, "__wrapped__"):
            setattr(Request, name, _announcement(announce, noted))


def _announcement(announce: Callable[..., None], noted: str) -> Callable[..., None]:
    @wraps(announce)
    def announce_or_log(request: Any, *args: Any, **options: Any) -> None:
        try:
            announce(request, *args, **options)
        except Exception:
            _log_not_recorded(request, noted.rpartition("_")[2])
            setattr(request, noted, True)
            if noted == "_already_revoked":
                request.acknowledge()

    return announce_or_log


def _log_not_recorded(request: Any, end: str) -> None:
    logger.exception(
        "The end of task %s[%s] (%s) could not be recorded. The result backend may lack its state.",
        request.name,
        request.id,
        end,
        extra={"event": "task_end_not_recorded"},
    )


class AckPromise(promise):
    """The promise to acknowledge or reject a message of this package."""

    def throw(self, exc: BaseException | None = None, tb: Any = None, propagate: bool = True) -> None:
        """Log the error of the ack, which vine passes to ``on_error`` only."""
        answer: Any = self.fun
        message: Message = answer.__self__
        logger.error(
            "The ack or reject of message %s of queue %s failed. If it was recorded, it is sent again; "
            "otherwise the message may be delivered again after the end of this worker.",
            message.message_id,
            message.queue,
            exc_info=exc or True,
            extra={"event": "ack_failed", "queue": message.queue},
        )
        super().throw(exc, tb, propagate)


def ack_promise(call_soon: Any, args: tuple[Any, ...], **options: Any) -> Any:
    """Return Celery's promise to acknowledge or reject a message, which a message of ours does at once.

    Celery passes the answer to its event loop, because other transports write to their connection. Here an
    ack is recorded for the next script, from any thread. Celery may drop it when a connection breaks.

    Args:
        call_soon: Celery's function that passes an ack to its event loop.
        args: The method that acknowledges or rejects. Another library may have replaced it by a function,
            which is called in Celery's way.
        **options: Further arguments of the promise.
    """
    (answer,) = args
    if isinstance(getattr(answer, "__self__", None), Message):
        return AckPromise(answer, **options)
    return promise(call_soon, args, **options)


def _timed_out(timeout: float) -> ExceptionInfo:
    try:
        raise TimeLimitExceeded(timeout)
    except TimeLimitExceeded:
        return ExceptionInfo()


def _nothing(*args: Any, **options: Any) -> None:
    """Stand in for a callback that a request of the user's own class does not pass."""


def _is_killed(result: Any) -> bool:
    """Whether the result is the one that a green pool makes for a killed task: it has no run time."""
    return isinstance(result, tuple) and len(result) == 3 and result[2] is None
