"""The boot step with the checks at the start of a worker, and what they compare.

* A broker without tenants: a warning names the tenants and quotas that it ignores.
* A Redis user without a right that a script needs: the worker ends, because a script that Redis refuses
  midway has done half of its work.
* A queue in ``-Q`` that is probably a typo: a warning names the close one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from celery_dq.context import AppContext
from celery_dq.errors import ServerError
from celery_dq.options import Options
from celery_dq.options.quota import UNLIMITED
from celery_dq.shown import shell_word, shown_logger
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.store.rights import ROLES, denied_commands
from celery_dq.worker.bootsteps import ContextStep

__all__ = ["StartChecksStep", "queues_of_settings", "routed_queues", "unenforced"]

logger = shown_logger(__name__)

#: Number of unnamed queues above which a program chose them, and not a person who may mistype. To compare
#: thousands of names with thousands of others would hold the start of the worker up for minutes.
MOST_TYPED = 20
#: Limit of the names of tasks or queues in one warning.
MOST_NAMES = 5


class StartChecksStep(ContextStep):
    """Checks once, on the open connection, before a consumer starts.

    Raises:
        ServerError: The Redis user of the broker may not send a command that a worker's scripts use.
    """

    requires = ("celery.worker.consumer.connection:Connection",)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Read the settings."""
        self._options: Options | None = context.options
        return True

    def start(self, consumer: Any) -> None:
        """Make the checks that are for this broker."""
        options, self._options = self._options, None
        if options is None:
            return
        if consumer.conninfo.transport_cls not in TENANT_SCHEMES:
            _warn_of_unenforced(consumer, options)
            return
        channel = consumer.connection.default_channel
        _check_rights(channel, options)
        _warn_of_typos(consumer, channel, options)


def _warn_of_unenforced(consumer: Any, options: Options) -> None:
    ignored = unenforced(options, consumer.app.tasks)
    if ignored:
        logger.warning(
            "The broker %s:// has no tenants: %s. Set broker_url to dq-redis://… to enforce them.",
            consumer.conninfo.transport_cls,
            ignored,
            extra={"event": "tenants_not_enforced"},
        )


def unenforced(options: Options, tasks: Any) -> str:
    """Return, in words, the settings and task options that a broker without tenants ignores; "" for none."""
    names = []
    tenants = sorted(name for name in tasks if getattr(tasks[name], "tenant", None) is not None)
    if tenants:
        names.append(f"the tenant of {_listed('task', tenants)} is ignored")
    quotas = sorted(queue.name for queue in options.queues if queue.quota != options.defaults.quota)
    if quotas:
        names.append(f"the quota of {_listed('queue', quotas)} in dq_queues is not enforced")
    if options.defaults.quota != UNLIMITED:
        names.append("dq_default_quota is not enforced")
    if options.inherit_tenant:
        names.append("dq_inherit_tenant is ignored")
    return ", ".join(names)


def _listed(noun: str, names: Iterable[str]) -> str:
    all_names = [*names]
    more = f" and {len(all_names) - MOST_NAMES} more" if len(all_names) > MOST_NAMES else ""
    return f"{noun}{'s' if len(all_names) > 1 else ''} {', '.join(map(repr, all_names[:MOST_NAMES]))}{more}"


def _check_rights(channel: Any, options: Options) -> None:
    worker = next(role for role in ROLES if role.name == "worker")
    denied = denied_commands(channel.pool, worker, options)
    scripted = sorted({*denied} & {command.lower() for command in worker.scripted})
    if scripted:
        raise ServerError(
            f"The Redis user of broker_url may not use {', '.join(scripted)} ({denied[scripted[0]]}), "
            "which a worker's scripts use: grant the rights of role 'worker' in the guide 'Operating'"
        )
    if denied:
        logger.warning(
            "The Redis user of broker_url may not use %s, which a worker sends. Operations that need it "
            "will fail; grant the rights of role 'worker' in the guide 'Operating'.",
            ", ".join(sorted(denied)),
            extra={"event": "redis_rights_missing"},
        )


def _warn_of_typos(consumer: Any, channel: Any, options: Options) -> None:
    """Warn of a queue that never had a message, if the name of another that the broker has is close.

    A queue that a setting, a route or a task names is not a typo. More than 20 others are not compared.
    """
    named = queues_of_settings(consumer.app, options)
    unnamed = [name for name in consumer.app.amqp.queues.consume_from if name not in named]
    if not 0 < len(unnamed) <= MOST_TYPED:
        return
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
    """Yield the queues that routes name, as far as these are not functions."""
    for route in routes if isinstance(routes, (list, tuple)) else (routes,):
        if isinstance(route, dict):
            queues = [each.get("queue") if isinstance(each, dict) else each for each in route.values()]
            yield from _names(queues)


def _names(queues: Iterable[Any]) -> Iterator[str]:
    """Yield the names of queues, which may be given as kombu's ``Queue``."""
    yield from (name for each in queues if isinstance(name := getattr(each, "name", each), str) and name)
