"""The checks of a set-up, for ``celery dq doctor`` and Django's checks.

A check is a function of the app that yields findings. A new check goes into one of the lists below.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import redis

from celery_dq.app.checks import queue_checks, server_checks, settings_checks
from celery_dq.app.checks.finding import Finding
from celery_dq.errors import ConfigurationError
from celery_dq.transport.redis.store.server_errors import BrokerRefused

#: Checks that open no connection.
SETTINGS_CHECKS = (
    settings_checks.client_libraries,
    settings_checks.key_prefix,
    settings_checks.library_versions,
    settings_checks.tenant_options,
    settings_checks.dedup_keys,
    settings_checks.misspelt_options,
    settings_checks.tenants_and_quotas,
    settings_checks.elections,
    settings_checks.dedup,
    settings_checks.buffer_folder,
)
#: Checks that each open a connection, and close it.
SERVER_CHECKS = {
    "The server of dq_election": server_checks.election_server,
    "The Redis of the dedup locks": server_checks.dedup_server,
}
#: Checks of the tenant broker, which are called with the app and a channel after the broker was reached.
BROKER_CHECKS = (
    server_checks.redis_server,
    server_checks.clock_offset,
    server_checks.replicas,
    server_checks.rights,
    server_checks.stock_messages,
    server_checks.settings_quotas,
    queue_checks.partitions,
    queue_checks.nodes,
    queue_checks.unreadable_fields,
    queue_checks.unused_queues,
    queue_checks.unrouted_quotas,
    queue_checks.former_singleton_queues,
)


def check_settings(app: Any) -> list[Finding]:
    """Check the ``dq_*`` settings, the broker's scheme and the options of every task. Opens no connection."""
    found = settings_checks.options(app)
    if found.level == "error":
        # The other checks read the settings.
        return [found]
    broker = list(settings_checks.broker_url(app))
    if any(each.level == "error" for each in broker):
        # They would take the wrong URL for another broker.
        return [found, *broker]
    return [found, *broker, *(each for check in SETTINGS_CHECKS for each in check(app))]


def check_server(app: Any, on_step: Callable[[str], object] = lambda server: None) -> list[Finding]:
    """Check that all servers can be reached, and that the broker's server has the settings that it needs.

    Args:
        app: A Celery app.
        on_step: Called with the name of each server before it is asked.
    """
    findings: list[Finding] = []
    try:
        for server, look in SERVER_CHECKS.items():
            on_step(server)
            findings += look(app)
        on_step("The broker")
        with server_checks.broker(app, findings) as channel:
            if channel is not None:
                for check in BROKER_CHECKS:
                    # The check of the rights reports what this user may not read.
                    with suppress(redis.exceptions.NoPermissionError, BrokerRefused):
                        findings += check(app, channel)
    except ConfigurationError as exc:
        # The transport checks a part of broker_url when it connects, the server another one.
        if str(exc) not in {each.problem for each in check_settings(app)}:
            findings.append(Finding("E002", str(exc), "Mend the setting."))
    return findings
