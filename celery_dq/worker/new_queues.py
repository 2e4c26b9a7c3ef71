"""The boot step that warns of a queue in ``-Q`` that is probably a typo."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from celery import bootsteps

from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.options import Options
from celery_dq.shown import shell_word
from celery_dq.transport.aliases import TENANT_SCHEMES

__all__ = ["NewQueuesStep", "queues_of_settings", "routed_queues"]

logger = logging.getLogger(__name__)

#: Number of unnamed queues above which a program chose them, and not a person who may mistype. To compare
#: thousands of names with thousands of others would hold the start of the worker up for minutes.
MOST_TYPED = 20


class NewQueuesStep(bootsteps.StartStopStep):
    """Warns, at the start, of a queue that never had a message, if the name of another is close.

    A queue that a setting, a route or a task names is no typo. More than 20 others are not compared.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        context = consumer.conninfo.transport_options.get(APP_CONTEXT)
        ours = isinstance(context, AppContext) and consumer.conninfo.transport_cls in TENANT_SCHEMES
        self._options = context.options if ours else None

    def start(self, consumer: Any) -> None:
        """Compare the names of the consumed queues with those of the others that the broker has."""
        options, self._options = self._options, None
        if options is None:
            return
        named = queues_of_settings(consumer.app, options)
        unnamed = [name for name in consumer.app.amqp.queues.consume_from if name not in named]
        if not 0 < len(unnamed) <= MOST_TYPED:
            return
        channel = consumer.connection.default_channel
        stored = channel.client.smembers(channel.context.registry_key)
        others = ({each.decode("utf-8", "replace") for each in stored} | named).difference(unnamed)
        for name in unnamed:
            whole, _, number = name.rpartition("/")
            close = [] if whole in others and number.isdecimal() else get_close_matches(name, others, 1)
            if close and not _had_messages(channel, name):
                logger.warning(
                    "Worker %s consumes queue %r, which never had a message, and which no setting names. Did "
                    "you mean %r? If so, stop the worker, and remove the queue: celery dq queues %s --forget",
                    consumer.hostname,
                    name,
                    close[0],
                    shell_word(name),
                    extra={"event": "queue_name_doubtful", "queue": name},
                )


def _had_messages(channel: Any, queue: str) -> bool:
    """Return whether a message was ever pushed to a queue."""
    with channel.client.pipeline(transaction=False) as pipe:
        for partition in channel.partitions(queue):
            pipe.hget(partition.keys.state, "pushed")
        return any(int(count or 0) for count in pipe.execute())


def queues_of_settings(app: Any, options: Options) -> set[str]:
    """Return the names of the queues that the settings, the routes or the tasks of an app name."""
    names = routed_queues(app)
    names.update(_names(app.conf.task_queues or ()))  # a dictionary has names as its keys
    names.update(section.name for section in options.queues)
    names.update(section.name for section in options.singletons)
    return names


def routed_queues(app: Any) -> set[str]:
    """Return the names of the queues to which the default, the routes or the tasks of an app send calls."""
    names: set[str] = {app.conf.task_default_queue}
    names.update(_routed(app.conf.task_routes))
    names.update(_names(getattr(task, "queue", None) for task in app.tasks.values()))
    return names


def _routed(routes: Any) -> Iterator[str]:
    """Yield the queues that routes name, as far as these are no functions."""
    for route in routes if isinstance(routes, (list, tuple)) else (routes,):
        if isinstance(route, dict):
            found = [each.get("queue") if isinstance(each, dict) else each for each in route.values()]
            yield from _names(found)


def _names(queues: Iterable[Any]) -> Iterator[str]:
    """Yield the names of queues, which may be given as kombu's ``Queue``."""
    yield from (name for each in queues if isinstance(name := getattr(each, "name", each), str) and name)
