"""``setup(app)``: the one place that knows every room of this package."""

from __future__ import annotations

from typing import Any

from celery_dq.app.amqp import WiredAMQP
from celery_dq.app.control import LastingControl
from celery_dq.app.face import dq_of
from celery_dq.app.mixed import mix_into
from celery_dq.transport.aliases import register_transports

__all__ = ["register_transports", "setup"]

#: The worker's boot steps, by name: a producer never imports them. Celery resolves a name when a
#: worker starts.
WORKER_STEPS = (("consumer", "celery_dq.worker.bootsteps:ConsumerStep"),)


def setup(app: Any) -> Any:
    """Give a Celery app the tenant broker and all that comes with it. Idempotent.

    Registers the ``dq-redis``, ``dq-rediss`` and ``dq-sentinel`` schemes, adds ``app.dq``, lets tasks
    and calls name a tenant, makes ``revoke`` last, and adds the worker's boot steps. Nothing is read
    or opened: the app may be configured before or after. The ``dq_*`` settings are checked when the
    app opens its first connection.

    Returns:
        The same app.
    """
    register_transports()
    dq_of(app)
    mix_into(app, "amqp", WiredAMQP)
    mix_into(app, "control", LastingControl)
    for blueprint, step in WORKER_STEPS:
        app.steps[blueprint].add(step)
    return app
