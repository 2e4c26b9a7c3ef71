"""The checks of a set-up, for ``celery dq doctor`` and Django's checks; the state, for ``celery dq status``.

A check is a function of the app that yields findings. A new check goes into one of the lists below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis
from kombu.exceptions import OperationalError

from celery_dq.app.api.api import dq_of
from celery_dq.app.api.outbox import OutboxSnapshot
from celery_dq.app.checks import outbox_checks, queue_checks, server_checks, settings_checks
from celery_dq.app.checks.finding import Finding, reason_of
from celery_dq.app.checks.server_checks import tls_hint
from celery_dq.errors import ConfigurationError, DQError
from celery_dq.inspector.queues import QueueSnapshot, ZooKeeperQueueSnapshot
from celery_dq.inspector.workers import LeaderSnapshot, WorkerSnapshot
from celery_dq.shared_reading import SharedReading
from celery_dq.shown import shell_word, shown_url
from celery_dq.transport.redis.store.server_errors import BrokerRefused

#: Checks that open no connection.
SETTINGS_CHECKS = (
    settings_checks.client_libraries,
    settings_checks.key_prefix,
    settings_checks.library_versions,
    settings_checks.tenant_options,
    settings_checks.dedup_keys,
    settings_checks.misspelt_options,
    settings_checks.tenants_and_quotas,
    settings_checks.elections,
    settings_checks.dedup,
    settings_checks.buffer_folder,
)
#: Checks that each open a connection, and close it.
SERVER_CHECKS = {
    "The server of dq_election": server_checks.election_server,
    "The Redis of the dedup locks": server_checks.dedup_server,
    "The databases of dq_outbox": outbox_checks.outboxes,
}
#: Checks of the tenant broker, which are called with the app and a channel after the broker was reached.
BROKER_CHECKS = (
    server_checks.redis_server,
    server_checks.clock_offset,
    server_checks.replicas,
    server_checks.rights,
    server_checks.stock_messages,
    server_checks.settings_quotas,
    queue_checks.partitions,
    queue_checks.nodes,
    queue_checks.unreadable_fields,
    queue_checks.unused_queues,
    queue_checks.unrouted_quotas,
    queue_checks.former_singleton_queues,
)


def check_tasks(app: Any) -> list[Finding]:
    """Import the modules of the app's tasks, as a worker does. The options of tasks are checked after it."""
    try:
        app.loader.import_default_modules()
    except Exception as exc:  # a module may raise anything
        problem = f"The tasks of the app cannot be imported: {type(exc).__name__}: {reason_of(exc)}."
        return [Finding("E040", problem, "No worker can start: mend the module, or install what it needs.")]
    return []


def check_settings(app: Any) -> list[Finding]:
    """Check the ``dq_*`` settings, the broker's scheme and the options of every task. Opens no connection."""
    found = settings_checks.options(app)
    if found.level == "error":
        # The other checks read the settings.
        return [found]
    broker = list(settings_checks.broker_url(app))
    if any(each.level == "error" for each in broker):
        # They would take the wrong URL for another broker.
        return [found, *broker]
    return [found, *broker, *(each for check in SETTINGS_CHECKS for each in check(app))]


def check_server(app: Any, on_step: Callable[[str], object] = lambda server: None) -> list[Finding]:
    """Check that all servers can be reached, and that the broker's server has the settings that it needs.

    Args:
        app: A Celery app.
        on_step: Called with the name of each server before it is asked.
    """
    findings: list[Finding] = []
    try:
        for server, look in SERVER_CHECKS.items():
            on_step(server)
            findings += look(app)
        on_step("The broker")
        with server_checks.broker(app, findings) as channel:
            if channel is not None:
                for check in BROKER_CHECKS:
                    # The check of the rights reports what this user may not read.
                    with suppress(redis.exceptions.NoPermissionError, BrokerRefused):
                        findings += check(app, channel)
    except ConfigurationError as exc:
        # The transport checks a part of broker_url when it connects, the server another one.
        if str(exc) not in {each.problem for each in check_settings(app)}:
            findings.append(Finding("E002", str(exc), "Mend the setting."))
    return findings


_DOCTOR = "'celery dq doctor' checks the set-up."
#: Errors of the settings with which no server can be asked.
_UNUSABLE = {"E001", "E002", "E004"}
#: Partitions that one warning names.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Status:
    """The state of all queues.

    Attributes:
        broker: URL of the broker, without its password; "" when the settings are wrong.
        queues: The counts of each queue; none when the broker cannot be used.
        leaders: The leaders of singleton queues and of other elections.
        workers: The workers that consume queues; none if the broker does not know them.
        outboxes: The rows of the databases of ``dq_outbox``.
        findings: Errors of the settings and the servers, and warnings about the queues.
        setup_warnings: Number of warnings of ``celery dq doctor``.
    """

    broker: str
    queues: tuple[QueueSnapshot | ZooKeeperQueueSnapshot, ...] = ()
    leaders: tuple[LeaderSnapshot, ...] = ()
    workers: tuple[WorkerSnapshot, ...] = ()
    outboxes: tuple[OutboxSnapshot, ...] = ()
    findings: tuple[Finding, ...] = ()
    setup_warnings: int = 0


def read_status(app: Any, timeout_s: float = 5.0) -> Status:
    """Check the set-up and read the state of all queues. An error of a server becomes a finding.

    Args:
        app: A Celery app.
        timeout_s: Seconds until the servers must have answered. After it the status is that of the queues
            which were read by then, with an error.
    """
    reading = _StatusReading(app)
    settings = [*check_tasks(app), *check_settings(app)]
    if not _UNUSABLE & {each.code for each in settings}:
        # A library may wait for a hung server for much longer: its timeout counts for each of its steps.
        reader: SharedReading[None] = SharedReading()
        reader.start("dq-status", reading.run)
        if reader.ends_within(timeout_s):
            reader.result()  # it raises a fault of this program
        else:
            problem = f"{reading.step} did not answer within {timeout_s:g} s."
            remedy = f"Look after it, or give --timeout.{tls_hint(app)}"
            reading.errors.append(Finding("E022", problem, remedy))
    errors = [each for each in settings if each.level == "error"] + reading.errors
    warnings = _warnings(reading.queues, reading.leaders, reading.expected_leaders)
    return Status(
        reading.broker,
        tuple(reading.queues),
        reading.leaders,
        reading.workers,
        reading.outboxes,
        (*errors, *warnings, *outbox_checks.outbox_faults(reading.outboxes)),
        sum(each.level == "warning" for each in (*settings, *reading.found)),
    )


class _StatusReading:
    """One look at all servers, in a thread of its own.

    Attributes:
        step: The server that is asked now, as the subject of a sentence.
        errors: The errors of the servers.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.step = "The broker"
        self.broker = ""
        self.found: list[Finding] = []
        self.errors: list[Finding] = []
        self.queues: list[QueueSnapshot | ZooKeeperQueueSnapshot] = []
        self.leaders: tuple[LeaderSnapshot, ...] = ()
        self.workers: tuple[WorkerSnapshot, ...] = ()
        self.outboxes: tuple[OutboxSnapshot, ...] = ()
        self.expected_leaders: frozenset[str] = frozenset()

    def run(self) -> None:
        """Ask the servers; every error is kept."""
        try:
            self._read()
        except (DQError, OperationalError, redis.RedisError, OSError) as exc:
            problem = f"The queues cannot be read: {reason_of(exc)}."
            self.errors.append(Finding("E011", problem, _DOCTOR))

    def _read(self) -> None:
        # Both modules are a worker's and a beat's, and need not be loaded by Django's checks.
        from celery_dq.beat.scheduler import leadership, schedule_name
        from celery_dq.worker.singleton import singleton_queues

        dq = dq_of(self._app)
        self.broker = shown_url(self._app.connection_for_write().as_uri())
        self.found = check_server(self._app, self._begin)
        self.errors += [each for each in self.found if each.level == "error"]
        if self.errors:
            return
        self._begin("The broker")
        for each in dq.queues.snapshots(ages=False):
            self.queues.append(each)
        if dq.options.election or dq.serves_queues():
            self._begin("The server of the elections")
            self.leaders = tuple(dq.leaders())
            beat = leadership(schedule_name(self._app, dq.options))
            self.expected_leaders = frozenset({beat, *singleton_queues(self._app, dq.options)})
        self.workers = tuple(dq.workers.among(self.queues))
        self._begin("The databases of dq_outbox")
        self.outboxes = tuple(dq.outbox.inspect())

    def _begin(self, step: str) -> None:
        self.step = step


def _warnings(
    queues: Iterable[QueueSnapshot | ZooKeeperQueueSnapshot],
    leaders: Iterable[LeaderSnapshot],
    expected_leaders: frozenset[str],
) -> Iterator[Finding]:
    vacant = {each.name for each in leaders if each.state == "vacant"}
    waits_for_leader = set()
    for queue in queues:
        count = queue.waiting + queue.delayed
        waiting = f"Messages wait in {queue.name!r} ({count})"
        start = f"Start a worker with -Q {shell_word(queue.name)}."
        if count and queue.name in vacant:
            waits_for_leader.add(queue.name)
            if queue.name not in expected_leaders:
                # Another program may have the setting.
                start += (
                    " If no setting names it in dq_singleton_queues: celery dq leaders "
                    f"{shell_word(queue.name)} --forget"
                )
            yield Finding("W018", f"{waiting}, and no worker leads this singleton queue.", start)
        elif isinstance(queue, QueueSnapshot) and (left := _unconsumed(queue)):
            them = "it"
            if len(left) < len(queue.partitions):
                listed = ", ".join(repr(each.name) for each in left[:_MOST_NAMED])
                waiting = f"Messages wait in {listed} ({sum(each.waiting + each.delayed for each in left)})"
                them = "it" if len(left) == 1 else "them"
                follows = "a running worker follows a new number of partitions within a quarter of dq_lease"
                start = f"Start a worker with -Q {shell_word(queue.name)} ({follows})."
            yield Finding("W019", f"{waiting}, and no living worker consumes {them}.", start)
        if queue.dead:
            remedy = (
                f"Look at them with 'celery dq dead list {shell_word(queue.name)}', and replay or purge them."
            )
            yield Finding("W020", f"{queue.name!r} has dead letters ({queue.dead}).", remedy)
    names = {queue.name for queue in queues}
    for name in sorted(vacant & expected_leaders - waits_for_leader):
        if name in names:
            problem, remedy = f"No worker leads singleton queue {name!r}.", f"Start a worker with -Q {name}."
        else:
            problem, remedy = f"No process leads {name!r}: no tick is sent.", "Start 'celery beat -S dq'."
        yield Finding("W021", problem, remedy)


def _unconsumed(queue: QueueSnapshot) -> list[QueueSnapshot]:
    """Return the partitions that have messages and no living consumer; of most queues, the queue itself."""
    return [
        each
        for each in queue.partitions or (queue,)
        if each.waiting + each.delayed and not each.living_consumers
    ]
