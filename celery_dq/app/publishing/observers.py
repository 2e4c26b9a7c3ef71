"""Observers of an app's messages: receivers, monitoring tools, events, and code of the app's own.

Templates skip much of Celery's code. They may do so only as long as no other code has taken its place.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from celery import Celery, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from kombu import Producer

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.amqp import DQAmqp
from celery_dq.compat.kombu_json import json_encoder_is_kombus
from celery_dq.compat.kombu_publishing import publish_prepared

__all__ = ["Observers"]

#: Settings that Celery reads at each call.
_SETTINGS = ("task_default_queue", "task_send_sent_event")

_before, _after, _sent = signals.before_task_publish, signals.after_task_publish, signals.task_sent


class Observers:
    """The observers of one app.

    Args:
        app: a Celery app whose broker is one of celery-dq.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._amqp = app.amqp
        self._router = app.amqp.router
        self._sends_event = bool(app.conf.task_send_sent_event)
        self._settings = [*map(app.conf.changes.get, _SETTINGS)]
        #: None when the app or its class has another one, which has to see each call.
        self._send_task = (
            _original(Celery.send_task, "celery.app.base") if dq_of(app).own_send_task is None else None
        )
        self._publish = _original(Producer.publish, "kombu.messaging")
        self._publish_prepared = _original(publish_prepared(Producer), "kombu.messaging")
        self._stock = self._is_stock()

    def _is_stock(self) -> bool:
        """Whether Celery's own code routes this app's calls and builds their messages."""
        amqp, conf = self._amqp, self._app.conf
        build = amqp.create_task_message
        return (
            getattr(build, "__func__", None) is AMQP.as_task_v2
            and _original(AMQP.as_task_v2, "celery.app.amqp") is not None
            and _definers(type(amqp), "_create_task_sender") == [DQAmqp, AMQP]
            and min(amqp.argsrepr_maxsize, amqp.kwargsrepr_maxsize) >= 1024
            and (conf.task_serializer or "json") == "json"
            and not conf.task_compression
            and all(isinstance(route, MapRoute) for route in amqp.router.routes)
            and json_encoder_is_kombus()
        )

    @property
    def allowed(self) -> bool:
        """Whether a call may use a template now, possibly an observed one."""
        # `amqp.router` would be slow to read: it is a cached property of kombu.
        return (
            self._stock
            and self._amqp.__dict__.get("router") is self._router
            and [*map(self._app.conf.changes.get, _SETTINGS)] == self._settings
        )

    @property
    def send_task_is_replaced(self) -> bool:
        """Whether a tool or a program has replaced ``send_task``, and has to see each call."""
        return type(self._app).send_task is not self._send_task

    @property
    def publish_is_replaced(self) -> bool:
        """Whether a tool has replaced the method of kombu with which a producer reaches its channel."""
        return publish_prepared(Producer) is not self._publish_prepared

    @property
    def task_sender_is_replaced(self) -> bool:
        """Whether a program has replaced ``app.amqp.send_task_message``."""
        amqp = self._amqp.__dict__
        return amqp.get("send_task_message") is not amqp.get("task_sender")

    @property
    def observed(self) -> bool:
        """Whether a receiver, a tool or an event observes calls, so that Celery's sender has to run."""
        amqp = self._amqp.__dict__
        return bool(
            self._sends_event
            or _before.receivers
            or _after.receivers
            or _sent.receivers
            or type(self._app).send_task is not self._send_task
            or Producer.publish is not self._publish
            or amqp.get("send_task_message") is not amqp.get("task_sender")
        )


def _original(method: Any, module: str) -> Any:
    """Return a method that is the one of its library; None when a tool has replaced it."""
    wrapped = hasattr(method, "__wrapped__")
    return (
        method if isinstance(method, FunctionType) and method.__module__ == module and not wrapped else None
    )


def _definers(made: type, name: str) -> list[type]:
    """The classes that define a method, in the order of the MRO."""
    return [each for each in made.__mro__ if name in vars(each)]
