"""The private names of other libraries, and the check at start-up that they exist as they were read.

A module of this package calls :func:`check` when it is imported or first used. A missing name stops the
process there with a clear error. Otherwise it would fail, or silently do something else, at a later call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from types import CodeType
from typing import Any, NamedTuple

from celery_dq.errors import ConfigurationError

__all__ = ["check", "problem_of", "READ_VERSIONS", "TABLE", "PrivateName", "unread"]

#: The oldest and the newest release (major, minor) of each library whose source was compared with the table.
READ_VERSIONS: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "celery": ((5, 5), (5, 7)),
    "kombu": ((5, 5), (5, 7)),
    "billiard": ((4, 2), (4, 3)),
    "amqp": ((5, 3), (5, 4)),
    "redis": ((5, 0), (8, 1)),
    "kazoo": ((2, 10), (2, 11)),
}


class PrivateName(NamedTuple):
    """One private name.

    Attributes:
        user: The module of ``celery_dq.compat`` that uses the name, or ``worker`` for the worker's modules.
        module: The module that has the name.
        name: The name in the module. The last part may be an attribute that instances of a class get.
        why: The purpose.
        seam: The public interface whose existence would make the use of the name unnecessary.
        parameters: The first parameters that a function must have, separated by spaces; "" checks none.
    """

    user: str
    module: str
    name: str
    why: str
    seam: str
    parameters: str = ""

    @property
    def library(self) -> str:
        """The distribution of the module."""
        return self.module.partition(".")[0]


def _rows(user: str, names: str, why: str, seam: str) -> list[PrivateName]:
    """Return the names in a text such as ``module: name, function(first second)``."""
    module, _, rest = names.partition(": ")
    found = re.findall(r"([\w.]+)(?:\(([\w ]+)\))?", rest)
    return [PrivateName(user, module, name, why, seam, parameters) for name, parameters in found]


TABLE: tuple[PrivateName, ...] = (
    *_rows(
        "celery_calls",
        "celery._state: _task_stack.top, _task_stack.stack, task_join_will_block",
        "the running task, and whether a process waits for results: calls of a task are treated differently",
        "a public function that returns the running task or None at the cost of an attribute",
    ),
    *_rows(
        "celery_calls",
        "celery._state: _tls.current_app, default_app",
        "the current app, if there is one: Django's commands must not create another",
        "celery.current_app without the creation of a default app",
    ),
    *_rows(
        "celery_calls",
        "celery.app.base: Celery._tasks, Celery._pool, Celery._backend",
        "the registered tasks of an app that must not finalize itself, and the connections to close in tests",
        "a read-only view of the registered tasks; Celery.close() that closes pools",
    ),
    *_rows(
        "celery_calls",
        "celery.app.amqp: AMQP._create_task_sender(self), AMQP._producer_pool",
        "the one place that sees every publish of an app and may raise",
        "a hook of AMQP that gets the message, the options and the producer before the publish",
    ),
    *_rows(
        "celery_calls",
        "celery.app.task: Task._get_exec_options(self), Task._backend",
        "a known plain call skips send_task",
        "Task.options() as a public method; Task.backend without creation",
    ),
    *_rows(
        "celery_calls",
        "celery.utils.collections: ConfigurationView._to_keys(self key)",
        "the names under which a setting may be written",
        "ConfigurationView.names(key)",
    ),
    *_rows(
        "celery_calls",
        "celery.result: AsyncResult._cache, AsyncResult._ignored, AsyncResult._on_fulfilled(self result)",
        "a result costs less than the call, and get() flushes the buffer first",
        "Celery.result_cls",
    ),
    *_rows(
        "celery_calls",
        "celery.result: AsyncResult._maybe_set_cache(self meta)",
        "a coroutine has read the state of a task, and get() must not ask for it again",
        "AsyncResult with a method that takes the state of its task",
    ),
    *_rows(
        "beat_sync",
        "celery.beat: Scheduler._do_sync(self)",
        "the elected scheduler saves the schedule of the scheduler that it wraps",
        "Scheduler.sync() that resets the counters of should_sync()",
    ),
    *_rows(
        "beat_sync",
        "celery.beat: Scheduler._heap, Scheduler._when(self entry next_time_to_run)",
        "an entry that cannot be sent comes after the others until it is tried again",
        "a pause for one entry of Scheduler",
    ),
    *_rows(
        "kombu_messages",
        "kombu.messaging: Producer._publish(self body priority content_type content_encoding headers "
        "properties routing_key mandatory immediate exchange declare), Producer._prepare(self body "
        "serializer content_type content_encoding compression headers)",
        "the buffer takes the finished message and sends it later",
        "Producer.prepare() and Producer.publish_prepared()",
    ),
    *_rows(
        "kombu_messages",
        "kombu.connection: Connection._reraise_as_library_errors(self), Connection._default_channel",
        "errors of Redis are kombu's OperationalError; a publish uses the channel that is open already",
        "Connection.library_errors(); Connection.open_channel_or_none()",
    ),
    *_rows(
        "kombu_messages",
        "kombu.serialization: SerializerRegistry._encoders, SerializerRegistry._decoders, "
        "SerializerRegistry._disabled_content_types",
        "whether JSON is still kombu's: only then a quicker codec does the same",
        "SerializerRegistry.encoder(name) and .decoder(content_type)",
    ),
    *_rows(
        "kombu_messages",
        "amqp.channel: Channel._basic_publish(self msg exchange routing_key mandatory immediate timeout)",
        "one wait for the publisher confirms of a batch",
        "Channel.basic_publish(wait=False)",
    ),
    *_rows(
        "redis_sockets",
        "redis.connection: Connection._sock",
        "the event loop watches the socket of a connection",
        "Connection.fileno()",
    ),
    *_rows(
        "kazoo_connection",
        "kazoo.protocol.connection: ConnectionHandler.__init__(self client retry_sleeper logger "
        "sasl_options), ConnectionHandler._expand_client_hosts(self), ConnectionHandler._connect_loop(self "
        "retry), ConnectionHandler._connect_attempt(self host hostip port retry), "
        "ConnectionHandler._connect(self host hostip port), ConnectionHandler._socket, "
        "ConnectionHandler.ping_outstanding",
        "a client leaves a server that owes an answer, and returns to servers that have lost data",
        "KazooClient(connection_handler_factory=…) and public steps of a connection",
    ),
    *_rows(
        "kazoo_connection",
        "kazoo.client: KazooClient._connection, KazooClient._conn_retry, KazooClient._session_timeout, "
        "KazooClient._session_id, KazooClient._pending, KazooClient.last_zxid, KazooClient._call(self "
        "request async_object), _prefix_root(root path)",
        "the connection above gets what kazoo's own gets; many nodes are read in one request",
        "KazooClient.session_id and .pending; a public multi-read",
    ),
    *_rows(
        "prefork_pool",
        "celery.concurrency.asynpool: AsynPool._event_process_exit(self hub proc), "
        "AsynPool._track_child_process(self proc hub), AsynPool._state, AsynPool._pool, "
        "AsynPool._sentinel_poll, AsynPool.maintain_pool(self)",
        "the death of a child is noticed at once, not at the next round",
        "a callback of the pool for the death of a child",
    ),
    *_rows(
        "prefork_pool",
        "celery.concurrency.asynpool: AsynPool.flush(self), AsynPool._flush_writer(self proc writer), "
        "AsynPool._active_writers, AsynPool._busy_workers, AsynPool._put_back, AsynPool._cache, "
        "AsynPool.outbound_buffer, AsynPool._writer",
        "jobs that a child has begun survive a lost connection and a warm shutdown",
        "AsynPool.flush(keep=…) that returns the jobs that are still known",
    ),
    *_rows(
        "prefork_pool",
        "billiard.pool: ApplyResult.discard(self), ApplyResult._accepted, ApplyResult._job, "
        "ApplyResult._write_to",
        "the same: whether a child has the job, or a part of it",
        "ApplyResult.is_begun()",
    ),
    *_rows(
        "prefork_pool",
        "billiard.process: BaseProcess._is_alive(self)",
        "the same: whether the child of a job lives",
        "Process.is_alive() in another process than its parent",
    ),
    *_rows(
        "prefork_pool",
        "celery.concurrency.asynpool: ResultHandler._flush_outqueue(self fd remove process_index "
        "on_state_change), AsynPool._result_handler",
        "a worker that stops reads a result when it comes, instead of sleeping half a second per child",
        "a timeout of the result handler's poll",
    ),
    *_rows(
        "prefork_pool",
        "billiard.pool: Pool._create_worker_process(self i), Pool._on_ready_counters",
        "a child that is killed while it waits for the count of its results does not stop the worker",
        "a count that the worker raises without a lock",
    ),
    *_rows(
        "prefork_pool",
        "billiard.queues: _SimpleQueue._reader",
        "the same: whether a child's result can be read",
        "_SimpleQueue.poll(timeout)",
    ),
    *_rows(
        "retry_records",
        "celery.app.trace: TraceInfo.handle_retry(self task req), TraceInfo.retval",
        "a throttled task is not lost when the result backend is away, or when its on_retry raises an error",
        "a retry that stays one when its record fails",
    ),
    *_rows(
        "task_ends",
        "celery.worker.request: Request._already_cancelled, Request._already_revoked, Request._context",
        "a dead letter of a failure for good, and of no run that Celery cancels, requeues or retries",
        "a signal in the worker's main process for each failure that Celery records",
    ),
    *_rows(
        "worker",
        "celery.worker.request: Request._already_cancelled, Request._already_revoked, "
        "Request._announce_cancelled(self), Request._announce_revoked(self reason terminated signum "
        "expired), Request._context, Request._payload, Request._request_dict",
        "the end of a task on every pool, and bookkeeping of a task that does not run",
        "events in the life of a request: accepted, ended, timed out, cancelled",
    ),
    *_rows(
        "worker",
        "celery.worker.consumer.consumer: Consumer.create_task_handler(self promise)",
        "an ack is recorded when Celery decides on it, and not when its loop gets to it",
        "acks that do not pass the event loop, on transports that need no loop for them",
    ),
    *_rows(
        "worker",
        "celery.worker.worker: WorkController._process_task(self req), WorkController._quick_release",
        "an invalid message becomes a dead letter and stops no worker",
        "a gate before the pool",
    ),
)


def unread(installed: Mapping[str, str]) -> dict[str, str]:
    """Return the libraries whose release lies outside of :data:`READ_VERSIONS`.

    Args:
        installed: Name of the distribution to its version; other distributions are ignored.

    Returns:
        Name and version of each such library, with the releases that were read.
    """
    found = {}
    for library, (oldest, newest) in READ_VERSIONS.items():
        version = installed.get(library)
        if version is None:
            continue
        release = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if not oldest <= release <= newest:
            low, high = ("{}.{}".format(*each) for each in (oldest, newest))
            found[f"{library} {version}"] = f"{low} to {high}"
    return found


def check(*users: str) -> None:
    """Check the names that these modules use.

    Raises:
        ConfigurationError: A name is missing, or a function has other parameters.
    """
    _refuse(each for each in TABLE if each.user in users)


def _refuse(names: Iterable[PrivateName]) -> None:
    for name in names:
        problem = problem_of(name)
        if problem:
            oldest, newest = READ_VERSIONS[name.library]
            raise ConfigurationError(
                f"{name.library} {version(name.library)}: {problem}, which celery-dq uses for: {name.why}. "
                f"Install {name.library} {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}, or a later "
                "celery-dq"
            )


def problem_of(name: PrivateName) -> str:
    """Return how the installed library differs from what was read; "" if it does not."""
    owner: Any = import_module(name.module)
    *path, last = name.name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    full = f"{name.module}.{name.name}"
    found = getattr(owner, last, None)
    if found is None:
        return "" if _has(owner, last) else f"{full} does not exist"
    if name.parameters:
        wanted = name.parameters.split()
        parameters = inspect.signature(found).parameters
        has = list(parameters)
        kinds = [each.kind for each in parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            # A monitoring tool has replaced the function by one that passes on its arguments.
            wanted = wanted[: kinds.index(inspect.Parameter.VAR_POSITIONAL)]
        if has[: len(wanted)] != wanted:
            return f"{full} has the parameters ({', '.join(has)}) instead of ({', '.join(wanted)}, …)"
    return ""


def _has(owner: Any, name: str) -> bool:
    """Whether the object has the name, or functions of a class use it as an attribute of instances."""
    if hasattr(owner, name):
        return True
    classes = owner.__mro__ if isinstance(owner, type) else ()
    functions = [member for each in classes for member in vars(each).values() if inspect.isfunction(member)]
    return any(name in code.co_names for member in functions for code in _codes(member.__code__))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
