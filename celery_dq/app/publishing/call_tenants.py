"""The tenants of the calls of an app, with those that ``dq_inherit_tenant`` lets calls inherit.

The worker of a chord's last header task calls the body. That task may have another tenant than the run that
has called the chord. So a chord notes the tenant of its caller as an option of the body, which groups, chains
and chords pass on like any other.
"""

from __future__ import annotations

from functools import cached_property, wraps
from typing import Any

from celery import chord
from celery.canvas import maybe_signature

from celery_dq.app.api.api import dq_of
from celery_dq.app.tenant_rules import TenantRules, tenant_of_run
from celery_dq.compat.celery_calls import UNLOCKS_CHORD, calling_request
from celery_dq.protocols import INHERITED_HEADER
from celery_dq.transport.tenant import NO_TENANT, check_tenant

#: The option of a chord's body with the tenant of the chord's caller.
CALLERS_TENANT = "dq_callers_tenant"


class CallTenants(TenantRules):
    """Finds the tenants of the calls of one app."""

    @cached_property
    def inherits(self) -> bool:
        """Whether a call for which no tenant is named has the one of its caller."""
        dq = dq_of(self._app)
        return bool(dq.options.inherit_tenant and dq.serves_queues())

    def of_call(
        self, name: str, tenant: Any, args: Any, kwargs: Any, headers: Any = None, noted: Any = None
    ) -> str:
        """Return the tenant of a call.

        Args:
            name: The task.
            tenant: The tenant that the call names; None when it names none.
            args: The positional arguments of the task.
            kwargs: The named arguments of the task.
            headers: The headers of the message, which get a mark when the tenant is inherited.
            noted: The option :data:`CALLERS_TENANT` of the call.

        Raises:
            ConfigurationError: The option of the task cannot be used.
            InvalidTenant: A value is not a tenant.
        """
        named = self.named(name, tenant, args, kwargs, headers)
        if named is not None:
            return named
        # The runs of the polling task would use up the rate.
        if not self.inherits or name == UNLOCKS_CHORD:
            return NO_TENANT
        found = tenant_of_caller(headers or {}) if noted is None else check_tenant(noted)
        if found and headers is not None:
            headers[INHERITED_HEADER] = True
        return found


def tenant_of_caller(headers: Any) -> str:
    """Return the tenant of the run that makes a call here; ``""`` outside of runs.

    Args:
        headers: The headers of the message; empty before there is one.
    """
    request = calling_request()
    if request is None:
        return NO_TENANT
    body = request.chord and request.chord["options"]
    # A header task calls the errbacks of its chord, too, with the id of the body as that of their parent.
    if body and CALLERS_TENANT in body and body.get("task_id") == headers.get("parent_id"):
        return check_tenant(body[CALLERS_TENANT])
    return tenant_of_run(request)


def note_callers_of_chords() -> None:
    """Let each chord note the tenant of its caller in its body. Idempotent."""
    kind: Any = chord
    if hasattr(kind, CALLERS_TENANT):
        return
    setattr(kind, CALLERS_TENANT, True)
    apply_async = kind.apply_async

    @wraps(apply_async)
    def noting(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        app, body = self.app, maybe_signature((kwargs or {}).get("body") or self.body)
        if body and CALLERS_TENANT not in body.options and "dq" in vars(app) and CallTenants(app).inherits:
            noted: Any = {CALLERS_TENANT: tenant_of_caller({})}
            kwargs = dict(kwargs or {}, body=body.clone(**noted))
        return apply_async(self, args, kwargs, *more, **options)

    kind.apply_async = noting
