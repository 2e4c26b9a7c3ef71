"""The boot step that warns if the broker of a worker does not enforce the tenants and quotas of its app."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from celery import bootsteps

from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.options import Options
from celery_dq.options.quota import UNLIMITED
from celery_dq.transport.aliases import TENANT_SCHEMES

__all__ = ["UnenforcedStep", "unenforced"]

logger = logging.getLogger(__name__)
#: Limit of the names of tasks or queues in one warning.
MOST_NAMES = 5


class UnenforcedStep(bootsteps.Step):
    """Warns once. Does nothing on the tenant broker, and if the app uses neither tenants nor quotas."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        context = consumer.conninfo.transport_options.get(APP_CONTEXT)
        scheme = consumer.conninfo.transport_cls
        if isinstance(context, AppContext) and scheme not in TENANT_SCHEMES:
            ignored = unenforced(context.options, consumer.app.tasks)
            if ignored:
                logger.warning(
                    "The broker %s:// has no tenants: %s. Set broker_url to dq-redis://… to enforce them.",
                    scheme,
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
    return ", ".join(names)


def _listed(noun: str, names: Iterable[str]) -> str:
    all_names = [*names]
    more = f" and {len(all_names) - MOST_NAMES} more" if len(all_names) > MOST_NAMES else ""
    return f"{noun}{'s' if len(all_names) > 1 else ''} {', '.join(map(repr, all_names[:MOST_NAMES]))}{more}"
