"""Gives an existing app another broker for a while, independent of its settings.

A Celery app caches objects that it made from its settings: the connection pools, the result backend and the
router, and with celery-dq also the options, the buffer and the templates of its calls. A test that only
changes ``broker_url`` still uses them, and publishes to the former broker.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from kombu import pools

from celery_dq.app.publishing.task_apply_async import TaskApplyAsync
from celery_dq.compat.celery_calls import open_parts
from celery_dq.wiring import setup

__all__ = ["use_broker"]

#: Attributes in which an app caches objects of its settings and its broker; the last four are set by
#: ``setup``.
_STATE = (
    "_backend_cache",
    "_local",
    "_pool",
    "amqp",
    "amqp_cls",
    "control",
    "control_cls",
    "events",
    "thread_oid",
    "AsyncResult",
    "dq",
    "producer_or_acquire",
    "send_task",
)

#: Environment variables that have precedence over settings in Celery.
_VARIABLES = (
    "CELERY_BROKER_URL",
    "CELERY_BROKER_READ_URL",
    "CELERY_BROKER_WRITE_URL",
    "CELERY_RESULT_BACKEND",
)

#: Settings about servers, with values that name no server.
_NEUTRAL: dict[str, Any] = {
    "broker_read_url": None,
    "broker_write_url": None,
    "broker_transport": None,
    "broker_user": None,
    "broker_password": None,
    "broker_use_ssl": None,
    "broker_transport_options": {},
    "redis_username": None,
    "redis_password": None,
    "redis_backend_credential_provider": None,
    "redis_backend_use_ssl": None,
    "result_backend_transport_options": {},
    "task_always_eager": False,
    "dq_dedup_url": "",
    "dq_election": "",
    "dq_election_options": {},
    "dq_allocation": False,
    "dq_confirm_replicas": 0,
}

#: Seconds to send messages that a test has buffered and not flushed.
CLOSE_S = 10.0


@contextlib.contextmanager
def use_broker(app: Any, broker_url: str, result_backend: str, **settings: Any) -> Iterator[Any]:
    """Give an app another broker and another result backend until the end of the block.

    The app has no connection and no cached setting at the beginning of the block. At its end all connections
    of the app are closed, and its settings are restored. ``celery_dq.setup`` is called if necessary.

    Args:
        app: A Celery app.
        broker_url: URL of the broker, e.g. ``dq-redis://127.0.0.1:6390/0``.
        result_backend: URL of the result backend.
        settings: Further settings during the block. Settings about servers (``dq_election``,
            ``dq_allocation``, ``dq_confirm_replicas``, ``dq_dedup_url``, ``broker_transport_options``, …) and
            ``task_always_eager`` are neutral unless given here. Without ``dq_allocation``, ``allocated`` of
            the app's ``dq_queues`` is left out.

    Yields:
        The app.
    """
    app.finalize()
    conf = app.conf.finalize()
    instance = vars(app)
    changes, variables = dict(conf.changes), {name: os.environ.pop(name, None) for name in _VARIABLES}
    state = {name: instance.pop(name) for name in _STATE if name in instance}
    _reset(app, state)
    swapped = {**_NEUTRAL, "broker_url": broker_url, "result_backend": result_backend, **settings}
    queues = conf.get("dq_queues")
    if queues and not swapped["dq_allocation"]:
        swapped.setdefault("dq_queues", _without_allocation(queues))
    conf.update({_qualified(name, conf.prefix): value for name, value in swapped.items()})
    setup(app)
    try:
        yield app
    finally:
        try:
            _close(app)
        finally:
            for name in _STATE:
                instance.pop(name, None)
            _reset(app, state)
            instance.update(state)
            conf.changes.clear()
            conf.changes.update(changes)
            os.environ.update({name: value for name, value in variables.items() if value is not None})


def _without_allocation(queues: Any) -> Any:
    """Return ``dq_queues`` without the part that contradicts a neutral ``dq_allocation``."""
    if not isinstance(queues, Mapping):
        return queues  # the check of the settings refuses it
    return {
        name: {key: value for key, value in section.items() if key != "allocated"}
        if isinstance(section, Mapping)
        else section
        for name, section in queues.items()
    }


def _qualified(name: str, namespace: str | None) -> str:
    """Return a setting's name with the namespace of the app's configuration.

    Up to Celery 5.6 a value that the project gives with the namespace precedes a change without it.
    """
    qualified = f"{namespace or ''}{name}"
    return qualified.upper() if namespace and namespace.isupper() else qualified


def _reset(app: Any, state: dict[str, Any]) -> None:
    """Set the attributes that a new app has, and remove cached calls of its tasks."""
    vars(app).update(_backend_cache=None, _local=type(state["_local"])())
    for task in app.tasks.values():
        if isinstance(vars(task).get("apply_async"), TaskApplyAsync):
            del task.apply_async


def _close(app: Any) -> None:
    """Send buffered messages, and close the connections to broker and backend."""
    app.dq.buffer.close(CLOSE_S)
    pool, producers, backend = open_parts(app)
    opened = [] if pool is None else [pool]
    if producers is not None:
        opened += [producers, producers.connections]
    for pool in opened:
        pool.force_close_all()
    for group in (pools.producers, pools.connections):
        # Not by the pool's connection: its options, of which kombu makes the key, may have changed since.
        for key in [key for key, pool in group.items() if pool in opened]:
            group.pop(key)
    if backend is not None:
        consumer, client = getattr(backend, "result_consumer", None), vars(backend).get("client")
        if consumer is not None:
            consumer.stop()
        if client is not None and hasattr(client, "connection_pool"):
            client.connection_pool.disconnect()
