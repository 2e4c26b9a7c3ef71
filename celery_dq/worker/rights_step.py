"""The boot step that ends a worker without the necessary rights in Redis.

The check is made at the start, because a script that Redis refuses midway has done half of its work.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps

from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.errors import ServerError
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.store.rights import ROLES, denied_commands

__all__ = ["RightsStep"]

logger = logging.getLogger(__name__)


class RightsStep(bootsteps.StartStopStep):
    """Checks once which commands of a worker the Redis user of the broker may not send.

    Raises:
        ServerError: a script uses one of these commands.
    """

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        context = consumer.conninfo.transport_options.get(APP_CONTEXT)
        ours = isinstance(context, AppContext) and consumer.conninfo.transport_cls in TENANT_SCHEMES
        self._options = context.options if ours else None

    def start(self, consumer: Any) -> None:
        """Check the rights on the open connection, before a consumer starts."""
        if self._options is None:
            return
        worker = next(role for role in ROLES if role.name == "worker")
        denied = denied_commands(consumer.connection.default_channel.pool, worker, self._options)
        self._options = None
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
