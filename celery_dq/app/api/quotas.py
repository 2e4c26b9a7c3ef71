"""``app.dq.quotas``: the quotas of tenants. A change is in force at once, for the backlog too."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from getpass import getuser
from socket import gethostname
from typing import Any

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.errors import InvalidQuota
from celery_dq.inspector.live_quotas import LiveQuotas, QuotaChange, compare, live_quotas
from celery_dq.inspector.tenants import (
    QuotaOrigin,
    SettingsQuota,
    own_quotas,
    paused_tenants,
    quota_in_force,
    quota_origins,
    settings_quota,
    stored_quota,
)
from celery_dq.options import Quota
from celery_dq.transport.redis.store.quotas import apply_settings, place_held_back
from celery_dq.transport.tenant import check_tenant


class QuotasApi:
    """Live quotas. They are kept in Redis, win over the settings, and outlive restarts."""

    def __init__(self, broker: BrokerAccess) -> None:
        self._broker = broker

    def get(self, queue: str, tenant: str | int | None = None) -> Quota:
        """The quota in force for a tenant; without a tenant, for all tenants that have no quota of their own.

        For a paused tenant, ``paused`` is True.
        """
        with self._broker.open(queue) as (partition, client):
            return quota_in_force(partition, client, None if tenant is None else check_tenant(tenant))

    def list(self, queue: str) -> dict[str, Quota]:
        """The tenants that have a quota of their own, and their quotas."""
        with self._broker.open(queue) as (partition, client):
            return own_quotas(partition, client)

    def set(self, queue: str, tenant: str | int, **parts: Any) -> Quota:
        """Give a tenant a quota of its own; a part that is not named keeps what is in force for it.

        From then on all parts are the tenant's own: a later change of the default does not affect it.
        ``paused`` is not stored with the quota: it does the same as :meth:`pause` and :meth:`resume`.

        Args:
            queue: The name of the queue.
            tenant: The tenant that gets the quota.
            parts: ``rate`` (``"50/s"``, ``"3000/m"``, a number per second, None for unlimited), ``burst``,
                ``weight``, ``concurrency`` (None for unlimited), ``paused``.

        Returns:
            The quota that is in force now.

        Raises:
            InvalidQuota: A part is unknown or impossible, or a burst has no effect because no rate is set.
            InvalidTenant: The name cannot be a tenant's.
        """
        name = check_tenant(tenant)
        with self._broker.open(queue) as (partition, client):
            base = stored_quota(partition, client, name)
            quota = _parse(parts, base, f"quota of tenant {name!r} in {queue!r}")
            pause = parts.get("paused")
            if pause:
                partition.pause(name).run(client)
                quota = replace(quota, paused=base.paused)
            if quota != base or pause is None or len(parts) > 1:
                partition.set_quota(name, quota.pack(), by=_author()).run(client)
            if pause is False:
                partition.resume(name).run(client)
            return quota_in_force(partition, client, name)

    def remove(self, queue: str, tenant: str | int) -> None:
        """Remove a tenant's own quota: the default holds for it again."""
        with self._broker.open(queue) as (partition, client):
            partition.set_quota(check_tenant(tenant), None).run(client)

    def pause(self, queue: str, tenant: str | int) -> Quota:
        """Start no more tasks of a tenant. Its backlog stays, and its running tasks continue.

        The tenant's quota may be changed during the pause. It holds again after :meth:`resume`.

        Returns:
            The quota in force now.
        """
        name = check_tenant(tenant)
        with self._broker.open(queue) as (partition, client):
            partition.pause(name).run(client)
            return quota_in_force(partition, client, name)

    def resume(self, queue: str, tenant: str | int) -> Quota:
        """Undo :meth:`pause`. Returns the quota in force, which may be a default that pauses all tenants."""
        name = check_tenant(tenant)
        with self._broker.open(queue) as (partition, client):
            partition.resume(name).run(client)
            return quota_in_force(partition, client, name)

    def paused(self, queue: str) -> dict[str, datetime]:
        """The tenants that :meth:`pause` has paused, and the time of the pause, the earliest first."""
        with self._broker.open(queue) as (partition, client):
            return paused_tenants(partition, client)

    def set_default(self, queue: str, **parts: Any) -> Quota:
        """Set the quota of every tenant without a quota of its own; it wins over the settings.

        It takes effect tenant by tenant: this call walks the backlog in chunks before it returns.
        """
        with self._broker.open(queue) as opened:
            base = quota_in_force(*opened, None)
            quota = _parse(parts, base, f"default quota of {queue!r}")
            opened.partition.set_default_quota(quota.pack(), by=_author()).run(opened.client)
            place_held_back(*opened)
            return quota

    def remove_default(self, queue: str) -> Quota:
        """Let the settings hold again for tenants without a quota of their own."""
        with self._broker.open(queue) as opened:
            opened.partition.set_default_quota(None).run(opened.client)
            place_held_back(*opened)
            return quota_in_force(*opened, None)

    def origins(self, queue: str, *tenants: str | int | None) -> builtins.list[QuotaOrigin]:
        """The user or worker that set the quota in force for each of the tenants, and the time.

        Args:
            queue: The name of the queue.
            tenants: The tenants; None stands for all tenants without a quota of their own.
        """
        names = [None if tenant is None else check_tenant(tenant) for tenant in tenants]
        with self._broker.open(queue) as (partition, client):
            return quota_origins(partition, client, names)

    def from_settings(self, queue: str) -> SettingsQuota | None:
        """The quota that workers stored from their settings, with worker and time; None if there is none."""
        with self._broker.open(queue) as (partition, client):
            return settings_quota(partition, client)

    def apply_settings(self, queue: str) -> Quota:
        """Store the quota of this process' settings, as a worker does when it begins to consume.

        It replaces a quota that workers have stored since, as after a rollback. Where the settings name no
        quota, the stored one is removed. Live quotas are not changed, and win.

        Args:
            queue: The name of the queue.

        Returns:
            The quota in force for tenants without a quota of their own.
        """
        options = self._broker.options.queue(queue)
        quota = options.quota if options.names_quota else None
        with self._broker.open(queue) as opened:
            apply_settings(*opened, quota, f"{_author()} (celery dq quotas apply)", force=True)
            return quota_in_force(*opened, None)

    def live(self, queue: str) -> LiveQuotas:
        """The live default and the own quotas of tenants; no quotas of the settings, and no pauses."""
        with self._broker.open(queue) as (partition, client):
            return live_quotas(partition, client)

    def changes(self, queue: str, wanted: LiveQuotas) -> builtins.list[QuotaChange]:
        """The changes that would make the live quotas of a queue equal to `wanted`. Changes nothing."""
        return compare(queue, self.live(queue), wanted)

    def make(self, changes: Iterable[QuotaChange]) -> int:
        """Make changes that :meth:`changes` returned, one by one, and return their number.

        Each is in force at once. After an interruption, compare again: the rest is left.
        """
        made = 0
        for change in changes:
            packed = None if change.after is None else change.after.pack()
            with self._broker.open(change.queue) as opened:
                if change.tenant is None:
                    opened.partition.set_default_quota(packed, by=_author()).run(opened.client)
                    place_held_back(*opened)
                else:
                    opened.partition.set_quota(change.tenant, packed, by=_author()).run(opened.client)
            made += 1
        return made


def _parse(parts: dict[str, Any], base: Quota, where: str) -> Quota:
    """Return `base` with changed parts; refuse a burst that would have no effect."""
    quota = Quota.parse(parts, base=base, where=where)
    if quota.rate is None and parts.get("burst", 1) != 1:
        raise InvalidQuota(
            f"{where}: burst = {quota.burst:g} has no effect without a rate: set a rate, too (--rate)"
        )
    return quota


def _author() -> str:
    """Return the user and the host of this process."""
    try:
        user = getuser()
    except (KeyError, OSError):  # A user without an entry in the system's list, as in some containers.
        user = f"uid {os.getuid()}"
    return f"{user}@{gethostname()}"
