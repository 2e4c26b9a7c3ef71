"""``setup(app)``: the one module that knows all packages of celery-dq."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from celery_dq.app.api.api import dq_of
from celery_dq.app.mixins import DurableRevoke, define_attributes, mix_into
from celery_dq.app.publishing.amqp import DQAmqp
from celery_dq.app.publishing.async_methods import define_async_methods
from celery_dq.app.publishing.awaited_calls import AwaitedCalls
from celery_dq.app.publishing.buffer_stage import BufferStage, acquire_lazily
from celery_dq.app.publishing.call_tenants import note_callers_of_chords
from celery_dq.app.publishing.dedup_stage import DedupStage
from celery_dq.app.publishing.direct_stage import DirectStage
from celery_dq.app.publishing.pipeline import CallPipeline, CelerysWay, Stage
from celery_dq.app.publishing.template_stage import TemplateStage
from celery_dq.app.throttling import handle_throttled
from celery_dq.errors import InvalidRequest
from celery_dq.transport.aliases import register_transports, schemes_in

__all__ = ["equip_every_app", "register_transports", "setup"]

#: The stages of a call in their order.
STAGES: tuple[Callable[[Any], Stage], ...] = (
    DedupStage,  # has the call a dedup key? Afterwards: does another call cover it?
    BufferStage,  # is the call buffered?
    DirectStage,  # a call that is not buffered: until when may it be tried, or does it fail at once?
    TemplateStage,  # a plain call: its message from a template, into the buffer or to the broker
    CelerysWay,  # any other call: Celery makes the message and publishes it
)

#: The worker's boot steps, by name, so that a producer never imports them. Celery imports them when a worker
#: starts.
WORKER_STEPS = (
    ("consumer", "celery_dq.worker.task_events:TaskEventsStep"),
    ("consumer", "celery_dq.worker.bootsteps:ConsumerStep"),
    ("consumer", "celery_dq.worker.singleton:SingletonStep"),
    ("consumer", "celery_dq.other_brokers.singleton_sequencer:SequencedSingletonStep"),
    ("consumer", "celery_dq.worker.allocation:AllocationStep"),
    ("consumer", "celery_dq.other_brokers.dedup_locks:DedupLocksStep"),
    ("consumer", "celery_dq.worker.zookeeper_step:ZooKeeperStep"),
    ("consumer", "celery_dq.worker.evictions:EvictionsStep"),
    ("consumer", "celery_dq.worker.shutdown:PromptStopStep"),
    ("worker", "celery_dq.worker.shutdown:SoftShutdownStep"),
    ("consumer", "celery_dq.app.checks.settings_checks:TaskOptionsStep"),
    ("consumer", "celery_dq.worker.start_checks:StartChecksStep"),
    ("consumer", "celery_dq.worker.probe_step:ProbeStep"),
    ("consumer", "celery_dq.tracing.worker_step:TracingStep"),
    ("worker", "celery_dq.metrics.worker_step:MetricsStep"),
)


def setup(app: Any) -> Any:
    """Set up a Celery app for the brokers and features of celery-dq. Idempotent.

    This registers the schemes of :mod:`celery_dq.transport.aliases`, adds ``app.dq``, the task and call
    options ``tenant``, ``buffered`` and ``outbox``, durable revokes, and the worker's boot steps. No setting
    is read and no connection is opened, so the app may be configured before or after. The ``dq_*`` settings
    are checked when the app opens its first connection.

    Args:
        app: The Celery app.

    Returns:
        The same app.

    Raises:
        InvalidRequest: `app` is not a Celery app.
    """
    if not hasattr(app, "send_task"):
        raise InvalidRequest(f"setup({app!r}): give the Celery app, such as celery_dq.setup(app)")
    register_transports()
    define_attributes()
    define_async_methods()
    note_callers_of_chords()
    handle_throttled()
    dq_of(app)
    mix_into(app, "amqp", DQAmqp)
    mix_into(app, "control", DurableRevoke)
    wrap_calls(app)
    for blueprint, step in WORKER_STEPS:
        app.steps[blueprint].add(step)
    return app


def wrap_calls(app: Any) -> None:
    """Replace ``app.send_task`` once by the pipeline of :data:`STAGES`."""
    dq = dq_of(app)
    if not dq.calls_are_wrapped:
        dq.calls_are_wrapped = True
        dq.own_send_task = app.__dict__.get("send_task")
        app.send_task = CallPipeline([stage(app) for stage in STAGES])
        app.asend_task = AwaitedCalls(app)
        acquire_lazily(app)


class Equipment:
    """A Celery fixup that sets an app up as soon as its settings name a broker of celery-dq.

    A program may load an app before :func:`setup` was called. In a Django project, for example, ``celery
    purge`` runs before the Django apps are ready, and would use the wrong namespace.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._users_on_init = app.on_init
        # Celery creates the signals of an app after the fixups, and then calls on_init.
        app.on_init = self.on_init

    def on_init(self) -> None:
        """Run the app's own ``on_init``, and connect to its signal, at the end of ``Celery()``."""
        self._users_on_init()
        # Celery keeps its fixups alive, and so this receiver.
        self._app.on_after_configure.connect(self.on_configured)

    def on_configured(self, **_: Any) -> None:
        """Set the app up if its broker is one of celery-dq, after Celery has read the settings."""
        # A misspelled scheme is included: the app's connections then raise an error that explains it.
        if any(scheme.lower().startswith("dq") for scheme in schemes_in(self._app.conf.broker_url)):
            setup(self._app)


def equip_every_app() -> None:
    """Register transports and remote-control commands, and set up each later app that uses a transport.

    For the ``celery`` command only, which calls this before it loads the project. Idempotent.
    """
    from celery import Celery

    register_transports()
    # ``celery inspect`` and ``celery control`` look up a command before the app has read its settings.
    importlib.import_module("celery_dq.worker.commands")
    Celery.builtin_fixups.add(f"{Equipment.__module__}:{Equipment.__name__}")
