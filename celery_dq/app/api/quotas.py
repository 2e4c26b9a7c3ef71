"""``app.dq.quotas``: the quotas of tenants. A change is in force at once, for the backlog too.

The spread of a tenant may follow from the rate of its quota, as ``spread_above_per_s`` asks for.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from typing import Any

import redis

from celery_dq.app.api.audit import AuditedChange, OnProgress, ignore_progress
from celery_dq.app.api.broker import BrokerAccess, MapChanged, OpenQueue
from celery_dq.app.api.map_change import begin_change, complete_change, require_complete
from celery_dq.app.api.pauses import pause, resume
from celery_dq.duration import SECOND_US
from celery_dq.errors import InvalidQuota, InvalidRequest
from celery_dq.inspector.live_quotas import (
    LiveQuotas,
    QuotaChange,
    compare,
    live_quotas,
    refuse_default_spread,
)
from celery_dq.inspector.queues import Pause, paused_tenants
from celery_dq.inspector.redis_values import check_seconds
from celery_dq.inspector.tenants import (
    QuotaOrigin,
    SettingsQuota,
    own_quotas,
    quota_in_force,
    quota_origins,
    settings_quota,
    stored_quota,
)
from celery_dq.keys import quota_field
from celery_dq.options import Quota
from celery_dq.options.quota import TENANT_QUOTA_KEYS
from celery_dq.shown import shell_word, shown_logger
from celery_dq.transport.redis.store.quotas import apply_settings, place_held_back
from celery_dq.transport.redis.store.rounds import run_chosen, run_one
from celery_dq.transport.redis.store.script_calls import run_all
from celery_dq.transport.tenant import check_single_tenant, check_tenant

logger = shown_logger(__name__)


class QuotasApi:
    """Live quotas. They are kept in Redis, win over the settings, and outlive restarts."""

    def __init__(self, broker: BrokerAccess, *, is_elsewhere: bool = False) -> None:
        self._broker = broker
        #: Whether this is another environment than that of the app.
        self._is_elsewhere = is_elsewhere

    def get(self, queue: str, tenant: str | int | None = None) -> Quota:
        """The quota in force for a tenant; without a tenant, for all tenants that have no quota of their own.

        For a paused tenant, ``paused`` is True.
        """
        name = None if tenant is None else check_tenant(tenant)
        with self._broker.open(queue) as opened:
            return quota_in_force(opened.of(name)[0], opened.client, name)

    def list(self, queue: str) -> dict[str, Quota]:
        """The tenants that have a quota of their own, and their quotas."""
        with self._broker.open(queue) as opened:
            return own_quotas(*opened)

    def set(self, queue: str, tenant: str | int, *, timeout: float = 60.0, **parts: Any) -> Quota:
        """Give a tenant a quota of its own; a part that is not named keeps what is in force for it.

        From then on all parts are the tenant's own: a later change of the default does not affect it.
        ``paused`` is not stored with the quota: it does the same as :meth:`pause` and :meth:`resume`.

        Args:
            queue: The name of the queue.
            tenant: The tenant that gets the quota.
            timeout: Seconds to wait for the moves of a changed `spread`. The same call goes on with them.
            parts: ``rate`` (``"50/s"``, ``"3000/m"``, a number per second, None for unlimited), ``burst``,
                ``weight``, ``concurrency`` (None for unlimited), ``max_waiting`` (None for unlimited),
                ``when_full``, ``paused``, ``spread`` (the number of
                partitions of the queue in which the tenant lives; without it, the setting
                ``spread_above_per_s`` of the queue may choose it from the rate).

        Returns:
            The quota that is in force now.

        Raises:
            InvalidQuota: A part is unknown or impossible, a burst has no effect because no rate is set,
                ``when_full`` has none because no ``max_waiting`` is, or the queue has fewer partitions than
                the spread.
            InvalidRequest: No part is named, or the spread changes while another change is under way.
            InvalidTenant: The name cannot be a tenant's, or is a set of resources.
            TenantMoving: The quota is in force, but messages of the tenant still move.
        """
        name = check_single_tenant(tenant, what="quota")
        check_seconds("timeout", timeout)
        with self._open_to_store(queue) as opened:
            return self._broker.repeated(opened, lambda found: self._set(found, name, parts, timeout))

    def remove(self, queue: str, tenant: str | int, *, timeout: float = 60.0) -> None:
        """Remove a tenant's own quota: the default holds for it again.

        A spread tenant moves to one partition first, and keeps its quota until it has arrived.

        Args:
            queue: The name of the queue.
            tenant: The tenant.
            timeout: Seconds to wait for its moves. The same call goes on with them.

        Raises:
            TenantMoving: Its messages still move, so that its quota is not removed yet.
        """
        name = check_tenant(tenant)
        check_seconds("timeout", timeout)
        with (
            self._broker.open(queue) as opened,
            self._broker.audit.change(opened.client, "quota_removed", queue, tenant=name) as change,
        ):
            self._broker.repeated(opened, lambda found: self._set_own(found, name, None, change, timeout))

    def pause(self, queue: str, tenant: str | int, *, until: datetime | timedelta | None = None) -> Quota:
        """Start no more tasks of a tenant. Its backlog stays, and its running tasks continue.

        The tenant's quota may be changed during the pause. It holds again after :meth:`resume`.

        Args:
            queue: The name of the queue.
            tenant: The tenant.
            until: When the pause ends by itself, or after which time from now; None: with :meth:`resume`.

        Returns:
            The quota in force now.

        Raises:
            InvalidRequest: `until` is over already, by the clock of the server.
            InvalidTenant: The tenant is a set of resources.
        """
        name = check_single_tenant(tenant, what="pause")
        with self._open_to_store(queue) as opened:
            pause(self._broker, opened, name, until)
        with self._broker.open_home(queue, name) as (home, client):
            return quota_in_force(home, client, name)

    def resume(self, queue: str, tenant: str | int) -> Quota:
        """Undo :meth:`pause`. Returns the quota in force, which may be a default that pauses all tenants."""
        name = check_tenant(tenant)
        with self._broker.open(queue) as opened:
            resume(self._broker, opened, name)
        with self._broker.open_home(queue, name) as (home, client):
            return quota_in_force(home, client, name)

    def paused(self, queue: str) -> dict[str, Pause]:
        """The tenants that :meth:`pause` has paused, with begin and end of the pause, the earliest first."""
        with self._broker.open(queue) as opened:
            return paused_tenants(*opened)

    def set_default(self, queue: str, **parts: Any) -> Quota:
        """Set the quota of every tenant without a quota of its own; it wins over the settings.

        It takes effect tenant by tenant: this call walks the backlog in chunks before it returns.
        """
        with self._open_to_store(queue) as opened:
            base = quota_in_force(opened.partitions[0], opened.client, None)
            quota = _parse(parts, base, f"default quota of {queue!r}")
            with self._broker.audit.change(opened.client, "default_set", queue) as change:
                change.details = str(quota)
                self._broker.repeated(opened, lambda found: self._set_default(found, quota, change))
            return quota

    def remove_default(self, queue: str) -> Quota:
        """Let the settings hold again for tenants without a quota of their own."""
        with self._broker.open(queue) as opened:
            with self._broker.audit.change(opened.client, "default_removed", queue) as change:
                self._broker.repeated(opened, lambda found: self._set_default(found, None, change))
            return quota_in_force(opened.partitions[0], opened.client, None)

    def origins(self, queue: str, *tenants: str | int | None) -> builtins.list[QuotaOrigin]:
        """The user or worker that set the quota in force for each of the tenants, and the time.

        Args:
            queue: The name of the queue.
            tenants: The tenants; None stands for all tenants without a quota of their own.
        """
        names = [None if tenant is None else check_tenant(tenant) for tenant in tenants]
        with self._broker.open(queue) as opened:
            homes = [(opened.of(name)[0], name) for name in names]
            return run_chosen(opened.client, homes, quota_origins)

    def from_settings(self, queue: str) -> SettingsQuota | None:
        """The quota that workers stored from their settings, with worker and time; None if there is none."""
        with self._broker.open(queue) as (partitions, client):
            return run_one(client, settings_quota(partitions[0]))

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
        with self._open_to_store(queue) as opened:
            with self._broker.audit.change(opened.client, "settings_applied", queue) as change:
                by = f"{self._author} (celery dq quotas apply)"
                change.details = str(quota or "no quota")
                self._broker.repeated(opened, lambda found: _apply_settings(found, quota, by))
                change.count = 1
            return quota_in_force(opened.partitions[0], opened.client, None)

    def live(self, queue: str) -> LiveQuotas:
        """The live default and the own quotas of tenants; no quotas of the settings, and no pauses."""
        with self._broker.open(queue) as opened:
            return live_quotas(*opened)

    def changes(self, queue: str, wanted: LiveQuotas) -> builtins.list[QuotaChange]:
        """The changes that would make the live quotas of a queue equal to `wanted`. Changes nothing.

        Raises:
            InvalidQuota: The queue has fewer partitions than the spread of a tenant.
        """
        found = compare(queue, self.live(queue), wanted)
        with self._broker.open(queue) as opened:
            self._check_spreads(opened, found)
        return found

    def make(
        self,
        changes: Iterable[QuotaChange],
        *,
        timeout: float = 60.0,
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """Make changes that :meth:`changes` returned, one by one, and return their number.

        Each is in force at once. After an interruption, compare again: the rest is left.

        Args:
            changes: The changes.
            timeout: Seconds to wait for the moves of each tenant whose `spread` changes.
            on_progress: Called after each change with the number of changes made.

        Raises:
            InvalidQuota: A queue has fewer partitions than the spread of a tenant.
            TenantMoving: Messages of a tenant still move. Compare again.
        """
        check_seconds("timeout", timeout)
        made = 0
        for queue, group in groupby(changes, key=lambda change: change.queue):
            with (
                self._open_to_store(queue) as opened,
                self._broker.audit.change(opened.client, "quotas_made", queue) as audited,
            ):
                changed, chosen, now = [], list(group), opened
                self._check_spreads(opened, chosen)
                for change in chosen:
                    changed.append("default" if change.tenant is None else repr(change.tenant))
                    audited.details = ", ".join(changed[:3]) + (", …" if len(changed) > 3 else "")
                    now = self._broker.repeated(now, partial(self._make, change, audited, timeout))
                    made += 1
                    on_progress(made)
        return made

    @contextmanager
    def in_environment(self, environment: str) -> Iterator[QuotasApi]:
        """Open the quotas of another environment on the same broker, over a connection of its own.

        Args:
            environment: ``online`` or ``sandbox``; not the app's own, ``dq_environment``.

        Raises:
            InvalidRequest: The environment is unknown, or is the app's own.
        """
        with self._broker.in_environment(environment) as there:
            yield QuotasApi(there, is_elsewhere=True)

    def copy(
        self, queue: str, *, to: str, dry_run: bool = False, on_progress: OnProgress = ignore_progress
    ) -> builtins.list[QuotaChange]:
        """Make the live quotas of a queue in another environment equal to those in this one.

        A quota that the queue does not have here is removed there. Quotas of the settings and pauses are not
        copied.

        Args:
            queue: The name of the queue.
            to: The environment that gets the quotas, ``online`` or ``sandbox``.
            dry_run: Change nothing.
            on_progress: Called after each change with the number of changes made.

        Returns:
            The changes, in the order in which they are made.

        Raises:
            InvalidRequest: The environment is unknown or the app's own, or the queue has no live quotas.
        """
        wanted = self.live(queue)
        if wanted == LiveQuotas():
            raise InvalidRequest(f"{queue!r} has no live quotas to copy; in force there: {self.get(queue)}.")
        with self.in_environment(to) as there:
            changes = there.changes(queue, wanted)
            if not dry_run:
                there.make(changes, on_progress=on_progress)
        return changes

    @property
    def _author(self) -> str:
        return self._broker.audit.author

    @contextmanager
    def _open_to_store(self, queue: str) -> Iterator[OpenQueue]:
        """Open a queue that will store something, and register it: commands know only registered queues."""
        with self._broker.open(queue, declare=True) as opened:
            # A full Redis refuses the name, and the tenants of a queue with messages can still be limited.
            with suppress(redis.exceptions.OutOfMemoryError):
                self._broker.declare(opened.client, queue)
            yield opened

    def _set(self, opened: OpenQueue, tenant: str, parts: dict[str, Any], timeout_s: float) -> Quota:
        client, queue = opened.client, opened.name
        base = stored_quota(opened.of(tenant)[0], client, tenant)
        where = f"quota of tenant {tenant!r} in {queue!r}"
        above_per_s = self._broker.options.queue(queue).spread_above_per_s if parts else None
        if above_per_s and "spread" not in parts and follows_rate(opened, tenant, base, above_per_s):
            quota = _parse({**parts, "spread": 1}, base, where)
            quota = replace(quota, spread=spread_by_rate(quota, above_per_s, opened.homes.count))
            log_new_spread(queue, tenant, base, quota, above_per_s)
        else:
            quota = _parse(parts, base, where)
        self._check_spread(opened, tenant, quota)
        pauses = parts.get("paused")
        if pauses:
            pause(self._broker, opened, tenant, None)
            quota = replace(quota, paused=base.paused)
        if quota != base or pauses is None or len(parts) > 1:
            with self._broker.audit.change(client, "quota_set", queue, tenant=tenant) as change:
                change.details = str(quota)
                opened = self._set_own(opened, tenant, quota, change, timeout_s)
        if pauses is False:
            resume(self._broker, opened, tenant)
        return quota_in_force(opened.of(tenant)[0], client, tenant)

    def _make(
        self, change: QuotaChange, audited: AuditedChange, timeout_s: float, opened: OpenQueue
    ) -> OpenQueue:
        if change.tenant is None:
            self._set_default(opened, change.after, audited)
            return opened
        tenant = check_single_tenant(change.tenant, what="quota")
        return self._set_own(opened, tenant, change.after, audited, timeout_s)

    def _set_own(
        self, opened: OpenQueue, tenant: str, quota: Quota | None, change: AuditedChange, timeout_s: float
    ) -> OpenQueue:
        """Set the own quota of a tenant, or with None remove it; return the queue with its new map."""
        before, queue, client = opened.homes, opened.name, opened.client
        spread = 1 if quota is None else quota.spread
        changes_spread = spread != len(before.partitions(tenant))
        if changes_spread:
            require_complete(queue, before)
        # A tenant keeps its divided quota until the last of its shares is empty.
        is_kept = quota is None and tenant in before.spreads
        if not is_kept:
            opened.set_quota(tenant, quota, by=self._author)
            change.count += 1
        if changes_spread:
            # The quota comes first: a process that completes this change divides it among the new shares.
            opened = opened.at(before.begin_spread(tenant, spread))
            begin_change(opened.partitions, client, self._broker.options, before)
        if tenant in opened.homes.spreads and opened.homes.moves(tenant):
            complete_change(opened.partitions, client, self._broker.options, timeout_s)
            opened = opened.at(opened.homes.end())
        if is_kept:
            opened.set_quota(tenant, None)
            change.count += 1
        return opened

    def _set_default(self, opened: OpenQueue, quota: Quota | None, change: AuditedChange) -> None:
        """Set the live default of each partition, or remove it; a repetition completes an interruption."""
        if quota is not None:
            refuse_default_spread(quota, f"default quota of {opened.name!r}")
        packed = None if quota is None else quota.pack()
        by = self._author
        calls = [each.set_default_quota(packed, by=by) for each in opened.partitions]
        is_set = run_all(calls, opened.client)
        if not all(is_set):
            raise MapChanged.of(opened.name)
        change.count += 1
        place_held_back(*opened)

    def _check_spreads(self, opened: OpenQueue, changes: Iterable[QuotaChange]) -> None:
        for change in changes:
            if change.tenant is not None:
                self._check_spread(opened, change.tenant, change.after)

    def _check_spread(self, opened: OpenQueue, tenant: str, quota: Quota | None) -> None:
        """Refuse a spread over more partitions than the queue has, or will have when it is stored."""
        keys, options = opened.partitions[0].keys, self._broker.options
        if quota is None or quota.spread <= opened.homes.count:
            return
        queue, spread, count = keys.queue, quota.spread, opened.homes.count
        if opened.client.exists(keys.state):
            remedy = f"first run celery dq partitions {shell_word(queue)} --set {spread}"
            remedy += f" with dq_environment = {options.environment!r}" if self._is_elsewhere else ""
        else:
            count = options.queue(queue).partitions
            remedy = f"set dq_queues[{queue!r}]['partitions'] = {spread} in the settings"
        if spread > count:
            have = "1 partition" if count == 1 else f"{count} partitions"
            raise InvalidQuota(
                f"quota of tenant {tenant!r} in {queue!r}: spread = {spread}, but the queue has {have}: "
                f"give a spread up to {count}, or {remedy}"
            )


def _apply_settings(opened: OpenQueue, quota: Quota | None, by: str) -> None:
    brought = run_one(opened.client, apply_settings(*opened, quota, by, force=True))
    if any(each.status == "moved" for each in brought):
        raise MapChanged.of(opened.name)


def _parse(parts: dict[str, Any], base: Quota, where: str) -> Quota:
    """Return `base` with changed parts; refuse a burst that would have no effect."""
    if not parts:
        raise InvalidRequest(f"{where}: name at least one of {', '.join(TENANT_QUOTA_KEYS)}")
    quota = Quota.parse(parts, base=base, where=where)
    if without_effect := quota.without_effect(base):
        raise InvalidQuota(f"{where}: {without_effect}")
    return quota


def spread_by_rate(quota: Quota, above_per_s: int, count: int) -> int:
    """Return the number of partitions for a quota: one for each `above_per_s` of its rate.

    Args:
        quota: The quota; without a rate, the number is 1.
        above_per_s: The setting ``spread_above_per_s``.
        count: Number of partitions of the queue, which bounds it, as burst, concurrency and max_waiting do.
    """
    if quota.rate is None:
        return 1
    bounds = (count, math.floor(quota.burst), quota.concurrency or count, quota.max_waiting or count)
    # The broker stores the interval, from which a rate is read that may be a little lower.
    return min(-(-SECOND_US // (quota.interval_us * above_per_s)), *bounds)


def follows_rate(opened: OpenQueue, tenant: str, base: Quota, above_per_s: int) -> bool:
    """Return whether a tenant has the spread of its rate; else a user has chosen another one.

    Args:
        opened: The queue.
        tenant: The tenant.
        base: The quota in force for it.
        above_per_s: The setting ``spread_above_per_s``.
    """
    client: Any = opened.client
    if not client.hexists(opened.of(tenant)[0].keys.quotas, quota_field(tenant)):
        return True
    return base.spread == spread_by_rate(base, above_per_s, opened.homes.count)


def log_new_spread(queue: str, tenant: str, before: Quota, after: Quota, above_per_s: int) -> None:
    """Log that the rate of a tenant changes its spread; nothing if it does not."""
    if after.spread != before.spread:
        logger.info(
            "Tenant %r of queue %s gets %d partitions instead of %d: its rate is %s, and "
            "dq_queues[%r]['spread_above_per_s'] is %d.",
            tenant,
            queue,
            after.spread,
            before.spread,
            after.rate_text,
            queue,
            above_per_s,
            extra={"event": "tenant_spread_by_rate", "queue": queue, "tenant": tenant},
        )
