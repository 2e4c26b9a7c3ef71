"""What is wrong with a set-up: for ``celery dq doctor`` and Django's checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kombu.exceptions import OperationalError

from celery_dq.app.amqp import TenantRules
from celery_dq.app.broker import Broker
from celery_dq.app.face import dq_of
from celery_dq.errors import ConfigurationError, DQError, ServerError
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.fitness import check_server as refuse_unfit


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    :param level: ``ok``, ``warning`` or ``error``.
    :param code: ``E001`` …, stable: Django's ``SILENCED_SYSTEM_CHECKS`` names it.
    :param remedy: what to do; "" when nothing.
    """

    level: Literal["ok", "warning", "error"]
    code: str
    problem: str
    remedy: str = ""


def check_settings(app: Any) -> list[Finding]:
    """Check the ``dq_*`` settings, the broker's scheme and the tenant option of every task. Opens nothing."""
    findings = [_options(app), _scheme(app)]
    rules = TenantRules(app)
    findings += filter(None, (_tenant_option(rules, name) for name in sorted(app.tasks)))
    return findings


def check_server(app: Any) -> list[Finding]:
    """Check that the server can be reached, is new enough, and keeps what it is given."""
    try:
        face = dq_of(app)
        options = face.options
        if not Broker(app, face.wires).serves_queues():
            return []
        with Broker(app, face.wires).channel() as channel:
            refuse_unfit(channel.client, options.allow_eviction)
            client = channel.client
            info = client.info("server") | client.info("memory") | client.info("persistence")
    except ConfigurationError:
        return []  # check_settings says so
    except ServerError as exc:
        return [Finding("error", "E010", str(exc))]
    except OperationalError as exc:
        return [
            Finding("error", "E011", f"The broker cannot be reached: {exc}", "Start it, or mend broker_url.")
        ]
    findings = [
        Finding("ok", "I010", f"The server runs Redis {info.get('redis_version')}, policy {_policy(info)}.")
    ]
    if not int(info.get("aof_enabled", 0)):
        findings.append(
            Finding(
                "warning",
                "W012",
                "The server keeps no append-only file: what it holds in memory is lost when it dies.",
                "Set appendonly yes on the Redis server.",
            )
        )
    return findings


def _tenant_option(rules: TenantRules, name: str) -> Finding | None:
    try:
        rules.rule(name)
    except (DQError, TypeError, ValueError) as exc:
        return Finding("error", "E003", str(exc), "Mend the task's tenant option.")
    return None


def _options(app: Any) -> Finding:
    try:
        options = dq_of(app).options
    except ConfigurationError as exc:
        return Finding("error", "E001", str(exc), "Mend the setting.")
    return Finding("ok", "I001", f"The dq_* settings are valid; environment {options.environment}.")


def _scheme(app: Any) -> Finding:
    url = str(app.conf.broker_write_url or "")
    scheme = url.partition("://")[0]
    known = TENANT_SCHEMES
    if scheme in known:
        return Finding("ok", "I002", f"The broker's scheme is {scheme}.")
    return Finding(
        "warning",
        "W002",
        f"The broker's scheme is {scheme or 'not set'}: tenant queues, quotas and app.dq.queues need one of"
        f" {', '.join(known)}.",
        "Set broker_url to dq-redis://host:port/db.",
    )


def _policy(info: dict[str, Any]) -> str:
    return str(info.get("maxmemory_policy", "noeviction"))
