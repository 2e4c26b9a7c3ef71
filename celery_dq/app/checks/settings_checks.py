"""The checks of ``celery dq doctor`` that open no connection."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage
from typing import Any

from celery import Task, bootsteps

from celery_dq.app.api.api import dq_of
from celery_dq.app.api.buffer import spill_files
from celery_dq.app.checks.finding import Finding
from celery_dq.app.publishing.dedup_stage import DedupRules
from celery_dq.app.tenant_rules import TenantRules
from celery_dq.compat.guard import READ_VERSIONS, unread
from celery_dq.dedup.rule import rule_of
from celery_dq.errors import ConfigurationError, DQError, MissingLibrary
from celery_dq.other_brokers.redis_coordinator import redis_of
from celery_dq.private_files import check_parents
from celery_dq.shown import shown_logger
from celery_dq.transport.aliases import (
    PLAIN_SCHEMES,
    TENANT_SCHEMES,
    ZOOKEEPER_SCHEME,
    refuse_misspelt,
    schemes_in,
)
from celery_dq.transport.broker_url import refuse_key_prefix
from celery_dq.worker.start_checks import unenforced

logger = shown_logger(__name__)

_IN_MEMORY = "which is in memory: its messages do not survive the machine"
_REMOTE = "a file system of another machine, where locks and writes are not certain"
#: Kinds of file systems on which a buffer keeps no promise, with the reason.
_UNSAFE_FILE_SYSTEMS = {
    **dict.fromkeys(("tmpfs", "ramfs"), _IN_MEMORY),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"), _REMOTE),
}
#: The options of a task that celery-dq reads.
_TASK_OPTIONS = ("tenant", "dedup", "buffered", "outbox")
#: The similarity of a typo, for difflib. With 0.8 ``tenant_id`` would be one of ``tenant``.
_TYPO_RATIO = 0.82


def options(app: Any) -> Finding:
    """Whether the ``dq_*`` settings are valid."""
    try:
        found = dq_of(app).options
    except ConfigurationError as exc:
        return Finding("E001", str(exc), "Mend the setting.")
    return Finding("I001", f"The dq_* settings are valid; environment {found.environment}.")


def broker_url(app: Any) -> Iterator[Finding]:
    """Whether the broker URL can be read, and names a broker of celery-dq."""
    scheme = _scheme(app)
    try:
        refuse_misspelt(_broker_url(app))
        app.connection_for_write()
    except ImportError:
        pass  # the check of the client libraries reports it
    except ConfigurationError as exc:
        yield Finding("E002", str(exc), "Mend broker_url.")
        return
    if scheme in TENANT_SCHEMES:
        yield Finding("I002", f"The broker's scheme is {scheme}.")
    elif scheme in PLAIN_SCHEMES:
        yield Finding("I002", f"The broker's scheme is {scheme}; it has no tenants and quotas.")
    else:
        yield Finding(
            "W002",
            f"The broker's scheme is {scheme or 'not set'}: tenant queues, quotas and app.dq.queues need one"
            f" of {', '.join(TENANT_SCHEMES)}.",
            "Set broker_url to dq-redis://host:port/db.",
        )


def client_libraries(app: Any) -> Iterator[Finding]:
    """Whether the libraries of extras are installed where a setting needs them."""
    found = dq_of(app).options
    needs = (
        (_scheme(app) == ZOOKEEPER_SCHEME, "dq-zookeeper://", "kazoo", "kazoo", "zookeeper"),
        (
            found.election.startswith("zookeeper://"),
            f"dq_election = {found.election!r}",
            "kazoo",
            "kazoo",
            "zookeeper",
        ),
        (found.otel, "dq_otel = True", "opentelemetry.trace", "opentelemetry-api", "otel"),
        (
            found.metrics.port is not None,
            f"dq_metrics_port = {found.metrics.port}",
            "prometheus_client",
            "prometheus-client",
            "metrics",
        ),
    )
    for is_needed, subject, module, library, extra in needs:
        if is_needed and not _can_import(module):
            error = MissingLibrary.needed_by(subject, library, extra)
            yield Finding("E004", str(error), "Install it.")


def _can_import(module: str) -> bool:
    with suppress(ModuleNotFoundError):  # of the package of a module
        return find_spec(module) is not None
    return False


def key_prefix(app: Any) -> Iterator[Finding]:
    """Whether keys are separated by kombu's option, which no broker of celery-dq has."""
    if _scheme(app) in (*TENANT_SCHEMES, *PLAIN_SCHEMES):
        try:
            refuse_key_prefix(app.conf.broker_transport_options)
        except ConfigurationError as exc:
            yield Finding("E033", str(exc), "Remove the option.")


def library_versions(app: Any) -> Iterator[Finding]:
    """Whether the private names that celery-dq uses were read in the installed releases."""
    installed = {}
    for library in READ_VERSIONS:
        with suppress(PackageNotFoundError):
            installed[library] = version(library)
    for library, read in unread(installed).items():
        yield Finding(
            "W017",
            f"celery-dq replaces methods of {library}, and has been read against the releases {read} only.",
            "Install one of them, or run your tests with this release first: a missing name stops the "
            "process at its start.",
        )


def tenant_options(app: Any) -> Iterator[Finding]:
    """Whether the ``tenant`` option of every task can be used."""
    return _task_options(app, TenantRules(app).rule, "E003", "Mend the task's tenant option.")


def dedup_keys(app: Any) -> Iterator[Finding]:
    """Whether the dedup key of every task can be used."""
    rules = DedupRules(app)
    return _task_options(app, lambda name: rules.find(name, None), "E018", "Mend the task's dedup key.")


def misspelt_options(app: Any) -> Iterator[Finding]:
    """Whether an option of a task is a typo of one of celery-dq; Celery takes any attribute."""
    for name in sorted(app.tasks):
        kinds = type(app.tasks[name]).__mro__
        own = {option for kind in kinds if kind not in Task.__mro__ for option in vars(kind)}
        for option in sorted(own.difference(_TASK_OPTIONS, dir(Task))):
            for meant in get_close_matches(option, _TASK_OPTIONS, 1, _TYPO_RATIO):
                yield Finding(
                    "W034",
                    f"Task {name!r} has the option {option!r}, which Celery and celery-dq do not read: "
                    f"did you mean {meant!r}?",
                    f"Write {meant!r}, or give an attribute of your own another name.",
                )


class TaskOptionsStep(bootsteps.Step):
    """Logs, when a worker starts, the wrong options of its tasks, which fail their callers elsewhere."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        for check in (tenant_options, dedup_keys, misspelt_options):
            for found in check(consumer.app):
                logger.warning(
                    "%s. %s",
                    found.problem.rstrip("."),
                    found.remedy,
                    extra={"event": "task_option_wrong", "code": found.code},
                )


def _task_options(app: Any, compiled: Callable[[str], object], code: str, remedy: str) -> Iterator[Finding]:
    for name in sorted(app.tasks):
        try:
            compiled(name)
        except (DQError, TypeError, ValueError) as exc:  # noqa: PERF203 - each task by itself
            yield Finding(code, str(exc), remedy)


def tenants_and_quotas(app: Any) -> Iterator[Finding]:
    """Whether the broker ignores tenants and quotas that the app names."""
    ignored = "" if _scheme(app) in TENANT_SCHEMES else unenforced(dq_of(app).options, app.tasks)
    if ignored:
        yield Finding(
            "W005",
            f"The broker has no tenants: {ignored}.",
            "Set broker_url to dq-redis://host:port/db, or remove them.",
        )


def elections(app: Any) -> Iterator[Finding]:
    """Whether singleton queues and outboxes have an election."""
    found = dq_of(app).options
    if found.election or _scheme(app) in TENANT_SCHEMES:
        return
    singletons = ", ".join(repr(each.name) for each in found.singletons)
    relays = ", ".join(map(repr, found.outbox.databases))
    for setting, names in (("dq_singleton_queues", singletons), ("dq_outbox", relays)):
        if not names:
            continue
        yield Finding(
            "E006",
            f"{setting} names {names}, and nothing can elect a leader: the broker cannot, and dq_election is "
            "not set. A worker of this app does not start.",
            "Set dq_election to zookeeper://host:2181 or redis://host/db.",
        )


def dedup(app: Any) -> Iterator[Finding]:
    """Whether there is a Redis for the dedup locks of the tasks that have a dedup key."""
    if _scheme(app) in TENANT_SCHEMES or not uses_dedup(app):
        return
    try:
        redis_of(app, dq_of(app).options)
    except ConfigurationError as exc:
        yield Finding("E007", str(exc), "Set dq_dedup_url to redis://host/db.")


def uses_dedup(app: Any) -> bool:
    """Whether a task of the app takes part in dedup."""
    return any(rule_of(task) is not None for task in app.tasks.values())


def buffer_folder(app: Any) -> Iterator[Finding]:
    """Whether buffered calls can be written to disk."""
    folder = dq_of(app).options.buffer.folder
    if not folder:
        return
    path = Path(folder).absolute()
    try:
        nearest = next(each for each in (path, *path.parents) if each.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
        if nearest == path:
            check_parents(path / "broker")
    except OSError as exc:
        yield Finding(
            "E008",
            f"dq_buffer_folder = {folder!r} cannot be used: {exc.strerror or exc}. Buffered calls would be "
            "lost with their process.",
            "Make the folder and give it to the user of this process alone, or name another one.",
        )
        return
    yield Finding("I008", f"dq_buffer_folder {folder} can be written.")
    most, free = dq_of(app).options.buffer.max_spill_bytes, disk_usage(nearest).free
    files = dq_of(app).buffer.folder
    used = spill_files(files).bytes if files is not None and files.exists() else 0
    if free < most - used:
        yield Finding(
            "W029",
            f"dq_buffer_folder = {folder!r} has room for {free:,} bytes only, and dq_buffer_max_spill_bytes "
            f"is {most:,}. When the disk is full, calls fail.",
            "Make room, or lower dq_buffer_max_spill_bytes.",
        )
    kind = _file_system(nearest)
    if kind in _UNSAFE_FILE_SYSTEMS:
        yield Finding(
            "W030",
            f"dq_buffer_folder = {folder!r} is on {kind}, {_UNSAFE_FILE_SYSTEMS[kind]}.",
            "Name a folder on a local disk.",
        )


def _file_system(path: Path) -> str:
    """Return the kind of the file system that holds a path; "" where the system does not list them."""
    with suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        parents = {str(each) for each in (path.resolve(), *path.resolve().parents)}
        # The last of several mounts at one place is the one in use.
        found = [
            (len(place), number, kind) for number, (place, kind) in enumerate(mounts) if place in parents
        ]
        return max(found)[2] if found else ""
    return ""


def _broker_url(app: Any) -> Any:
    return app.conf.broker_write_url or app.conf.broker_url


def _scheme(app: Any) -> str:
    return next(iter(schemes_in(_broker_url(app))), "")
