"""The live quotas of a queue: read them, compare them, and write them as JSON.

The document is JSON and not YAML, because tenants are often numbers: YAML reads ``007`` as 7 and ``no`` as
False, and a name of a JSON object is always text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from celery_dq.errors import InvalidQuota, InvalidTenant
from celery_dq.inspector.redis_values import Client
from celery_dq.inspector.tenants import own_quotas
from celery_dq.keys import DEFAULT_QUOTA
from celery_dq.options import Quota
from celery_dq.options.quota import quota_of_bytes
from celery_dq.shown import shown_json
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.resource_set import resources_of
from celery_dq.transport.tenant import check_tenant

_PARTS = ("default", "tenants")


@dataclass(frozen=True)
class LiveQuotas:
    """The quotas of a queue that were set live.

    Attributes:
        default: Quota of tenants without their own; None when none is set live.
        tenants: Own quotas of tenants.
    """

    default: Quota | None = None
    tenants: Mapping[str, Quota] = field(default_factory=dict)


@dataclass(frozen=True)
class QuotaChange:
    """One difference between two sets of live quotas.

    Attributes:
        queue: Name of the queue.
        tenant: Name of the tenant; None for the live default.
        before: The present quota; None when there is none.
        after: The new quota; None to remove it.
    """

    queue: str
    tenant: str | None
    before: Quota | None
    after: Quota | None

    def __str__(self) -> str:
        """Return one line of a diff."""
        name = "(default)" if self.tenant is None else self.tenant
        if self.before is None or self.after is None:
            return f"{'+' if self.before is None else '-'} {self.queue}  {name}: {self.after or self.before}"
        return f"~ {self.queue}  {name}: {self.before} -> {self.after}"


def live_quotas(partitions: Sequence[Partition], client: Client) -> LiveQuotas:
    """Read the live quotas of a queue, in chunks."""
    default = client.hget(partitions[0].keys.quotas, DEFAULT_QUOTA)
    own = own_quotas(partitions, client)
    return LiveQuotas(quota_of_bytes(default), dict(sorted(own.items())))


def compare(queue: str, before: LiveQuotas, after: LiveQuotas) -> list[QuotaChange]:
    """Return the changes that make `before` equal to `after`: the default first, then by tenant."""
    pairs: list[tuple[str | None, Quota | None, Quota | None]] = [(None, before.default, after.default)]
    tenants = sorted({*before.tenants, *after.tenants})
    pairs += [(tenant, before.tenants.get(tenant), after.tenants.get(tenant)) for tenant in tenants]
    # Two rates may differ and have one stored form.
    return [QuotaChange(queue, *pair) for pair in pairs if _packed(pair[1]) != _packed(pair[2])]


def _packed(quota: Quota | None) -> bytes | None:
    return None if quota is None else quota.pack()


def written(quotas: Mapping[str, LiveQuotas]) -> str:
    """Return the live quotas of queues as a document for :func:`read_document`, one line per quota."""
    sections = []
    for queue, each in quotas.items():
        tenants = [f"\n      {_json(tenant)}: {_line(quota)}" for tenant, quota in each.tenants.items()]
        inside = ",".join(tenants) + ("\n    " if tenants else "")
        section = f'{{\n    "default": {_line(each.default)},\n    "tenants": {{{inside}}}\n  }}'
        sections.append(f"\n  {_json(queue)}: {section}")
    return "{" + ",".join(sections) + ("\n}" if sections else "}")


def _json(value: Any) -> str:
    return shown_json(value, indent=None)


def _line(quota: Quota | None) -> str:
    if quota is None:
        return "null"
    parts: dict[str, Any] = {"rate": quota.spelled_rate}
    parts |= {"burst": quota.burst, "weight": quota.weight, "concurrency": quota.concurrency}
    if quota.names_bound:
        parts |= {"max_waiting": quota.max_waiting, "when_full": quota.when_full}
    if quota.spread > 1:
        parts["spread"] = quota.spread
    if quota.paused:
        parts["paused"] = True
    whole = {key: int(each) for key, each in parts.items() if isinstance(each, float) and each.is_integer()}
    return _json(parts | whole)


def read_document(text: str | bytes, where: str) -> dict[str, LiveQuotas]:
    """Read and check a whole document of :func:`written`.

    Args:
        text: JSON: queue -> ``default`` (a quota or null) and ``tenants`` (tenant -> quota). A part of a
            quota that is left out has its default.
        where: Name of the document, for the error.

    Raises:
        InvalidQuota: The text is no such document. The error names the line, or the queue, the tenant, the
            part and its value.
    """
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except InvalidQuota as exc:
        raise InvalidQuota(f"{where}: {exc}") from None
    except (ValueError, RecursionError) as exc:
        raise InvalidQuota(f"{where} is not JSON: {exc}; 'celery dq quotas export' writes the form") from None
    return {
        queue: _section(_mapping(section, f"{where}: queue {queue!r}"), f"{where}: queue {queue!r}")
        for queue, section in _mapping(document, where).items()
    }


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidQuota(f"{twice!r} stands twice in one object; remove one of them")
    return found


def _section(section: dict[str, Any], where: str) -> LiveQuotas:
    for key in section:
        if key not in _PARTS:
            close = get_close_matches(key, _PARTS, 1)
            hint = f"did you mean {close[0]!r}?" if close else "known are 'default' and 'tenants'"
            raise InvalidQuota(f"{where}: {key!r} is unknown: {hint}")
    tenants = {}
    for name, quota in _mapping(section.get("tenants", {}), f"{where}: 'tenants'").items():
        try:
            checked = check_tenant(name, where=f"{where}: tenant {name!r}")
        except InvalidTenant as exc:
            raise InvalidQuota(str(exc)) from None
        if resources_of(checked) is not None:
            raise InvalidQuota(f"{where}: tenant {name!r} is a set of resources: give its resources quotas")
        tenants[name] = _quota(quota, f"{where}, tenant {name!r}")
    given = section.get("default")
    default = None if given is None else _quota(given, f"{where}, default")
    if default is not None:
        refuse_default_spread(default, f"{where}, default")
    return LiveQuotas(default, tenants)


def refuse_default_spread(quota: Quota, where: str) -> None:
    """Refuse a spread in a quota of many tenants.

    Args:
        quota: The quota.
        where: Its name, for the error.

    Raises:
        InvalidQuota: It has a spread.
    """
    if quota.spread > 1:
        raise InvalidQuota(
            f"{where}: spread = {quota.spread} belongs to the quota of one tenant: give it to the heavy ones"
        )


def _quota(parts: Any, where: str) -> Quota:
    return Quota.parse(_mapping(parts, where), where=where)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidQuota(f"{where} is {value!r}: give an object, as 'celery dq quotas export' writes it")
    return value
