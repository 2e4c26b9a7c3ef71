"""``setup(app)``: the one place that knows every room of this package."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from celery_dq.app.amqp import WiredAMQP
from celery_dq.app.calling import buffer_calls
from celery_dq.app.control import LastingControl
from celery_dq.app.duplicates import cover_calls
from celery_dq.app.face import dq_of
from celery_dq.app.mixed import mix_into
from celery_dq.transport.aliases import SCHEMES, register_transports

__all__ = ["equip_every_app", "register_transports", "setup"]

#: The worker's boot steps, by name: a producer never imports them. Celery resolves a name when a
#: worker starts.
WORKER_STEPS = (
    ("consumer", "celery_dq.worker.bootsteps:ConsumerStep"),
    ("consumer", "celery_dq.worker.singleton:SingletonStep"),
    ("consumer", "celery_dq.worker.claims_step:ClaimsStep"),
    ("consumer", "celery_dq.worker.zookeeper_step:ZooKeeperStep"),
    ("consumer", "celery_dq.worker.evictions:EvictionsStep"),
    ("consumer", "celery_dq.worker.prompt_stop:PromptStopStep"),
)


def setup(app: Any) -> Any:
    """Give a Celery app the tenant broker and all that comes with it. Idempotent.

    Registers the schemes of :mod:`celery_dq.transport.aliases`, adds ``app.dq``, lets tasks and calls name
    a tenant, lets calls be buffered, makes ``revoke`` last, and adds the worker's boot steps. Nothing is
    read or opened: the app may be configured before or after. The ``dq_*`` settings
    are checked when the app opens its first connection.

    Returns:
        The same app.
    """
    register_transports()
    dq_of(app)
    mix_into(app, "amqp", WiredAMQP)
    mix_into(app, "control", LastingControl)
    wrap_calls(app)
    for blueprint, step in WORKER_STEPS:
        app.steps[blueprint].add(step)
    if "celery.worker.control" in sys.modules:
        # The celery program: it knows the commands of ``inspect`` and ``control`` by their registration.
        importlib.import_module("celery_dq.worker.commands")
    return app


def wrap_calls(app: Any) -> None:
    """Put the buffer, which leaves keyed calls alone, and behind it dedup before ``app.send_task``, once."""
    face = dq_of(app)
    if not face.calls_are_wrapped:
        face.calls_are_wrapped = True
        cover_calls(app)
        buffer_calls(app)


class Equipment:
    """A Celery fixup: sets an app up as soon as its settings name a broker of celery-dq.

    For programs that load an app which nobody may have set up yet: in a Django project, ``celery
    purge`` runs without the Django apps being ready, and would look in the wrong namespace.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._users_on_init = app.on_init
        # Celery makes an app's signals after it has called the fixups, and then calls on_init.
        app.on_init = self.on_init

    def on_init(self) -> None:
        """Celery calls this at the end of ``Celery()``, in the place of the app's own callback."""
        self._users_on_init()
        # Celery keeps its fixups, and so this receiver, alive.
        self._app.on_after_configure.connect(self.on_configured)

    def on_configured(self, **_: Any) -> None:
        """Celery calls this when it has read the app's settings."""
        scheme = str(self._app.conf.broker_url or "").partition("://")[0]
        if scheme in [known for known, _ in SCHEMES]:
            setup(self._app)


def equip_every_app() -> None:
    """Register the transports, and set up every app that is made from now on and uses one of them.

    For the ``celery`` command only: it calls this before it loads the project. Idempotent.
    """
    from celery import Celery

    register_transports()
    Celery.builtin_fixups.add(f"{Equipment.__module__}:{Equipment.__name__}")
