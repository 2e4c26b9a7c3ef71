"""``app.dq.quotas``: what tenants may take. In force at once, for the backlog too."""

from __future__ import annotations

from typing import Any

from celery_dq.app.broker import Broker
from celery_dq.inspector.tenants import own_quotas, quota_in_force
from celery_dq.options import Quota
from celery_dq.transport.redis.quotas import place_held_back
from celery_dq.transport.tenant import check_tenant


class Quotas:
    """Live quotas. They are kept in Redis, win over the settings, and outlive restarts."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def get(self, queue: str, tenant: str | int | None = None) -> Quota:
        """The quota in force for a tenant, or without one for tenants that have none of their own."""
        with self._broker.open(queue) as (partition, client):
            return quota_in_force(partition, client, None if tenant is None else check_tenant(tenant))

    def list(self, queue: str) -> dict[str, Quota]:
        """The tenants that have a quota of their own, and which."""
        with self._broker.open(queue) as (partition, client):
            return own_quotas(partition, client)

    def set(self, queue: str, tenant: str | int, **parts: Any) -> Quota:
        """Give a tenant a quota of its own; a part that is not named keeps what is in force for it.

        From then on all parts are the tenant's own: a later change of the default does not reach it.

        Arguments:
            queue: Which queue.
            tenant: Whose quota.
            parts: ``rate`` (``"50/s"``, ``"3000/m"``, a number per second, None for unlimited), ``burst``,
                ``weight``, ``concurrency`` (None for unlimited), ``paused``.

        Returns:
            The quota that is in force now.

        Raises:
            InvalidQuota: A part is unknown or impossible.
            InvalidTenant: The name cannot be a tenant's.
        """
        name = check_tenant(tenant)
        with self._broker.open(queue) as (partition, client):
            base = quota_in_force(partition, client, name)
            quota = Quota.parse(parts, base=base, where=f"quota of tenant {name!r} in {queue!r}")
            partition.set_quota(name, quota.pack()).run(client)
            return quota

    def remove(self, queue: str, tenant: str | int) -> None:
        """Take a tenant's own quota away: the default holds for it again."""
        with self._broker.open(queue) as (partition, client):
            partition.set_quota(check_tenant(tenant), None).run(client)

    def pause(self, queue: str, tenant: str | int) -> Quota:
        """Let nothing of a tenant start; its backlog stays, what runs goes on."""
        return self.set(queue, tenant, paused=True)

    def resume(self, queue: str, tenant: str | int) -> Quota:
        """Undo :meth:`pause`. A quota that then says no more than the default is removed."""
        quota = self.set(queue, tenant, paused=False)
        if quota == self.get(queue):
            self.remove(queue, tenant)
        return quota

    def set_default(self, queue: str, **parts: Any) -> Quota:
        """Set what holds for every tenant without a quota of its own; wins over the settings.

        Takes effect tenant by tenant: the backlog is gone through in chunks before this returns.
        """
        with self._broker.open(queue) as opened:
            base = quota_in_force(*opened, None)
            quota = Quota.parse(parts, base=base, where=f"default quota of {queue!r}")
            opened.partition.set_shared_quota("default", quota.pack()).run(opened.client)
            place_held_back(*opened)
            return quota

    def remove_default(self, queue: str) -> Quota:
        """Let the settings hold again for tenants without a quota of their own."""
        with self._broker.open(queue) as opened:
            opened.partition.set_shared_quota("default", None).run(opened.client)
            place_held_back(*opened)
            return quota_in_force(*opened, None)
