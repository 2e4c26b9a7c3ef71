"""The tenants of calls, by the ``tenant`` options of the tasks."""

from __future__ import annotations

import inspect
from typing import Any

from celery_dq.compat.celery_calls import continued_run, task_named
from celery_dq.transport.tenant import Rule, check_tenant, tenant_rule


class TenantRules:
    """The tenants that the tasks of one app name for their calls, compiled at first use."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._compiled: dict[str, tuple[Any, Rule | None]] = {}

    def named(self, name: str, tenant: Any, args: Any, kwargs: Any, headers: Any = None) -> str | None:
        """Return the tenant that a call names, or else the task's option; None when neither names one.

        A retry keeps the tenant of the run that it repeats, which the `headers` of its message tell.

        Raises:
            ConfigurationError: The option cannot be used for this task.
            InvalidTenant: The value is not a tenant.
        """
        if tenant is not None:
            return check_tenant(tenant, where=f"{name}: tenant")
        if headers and headers.get("retries"):
            run = continued_run(headers["id"])
            if run is not None and run.request.properties:
                return tenant_of_run(run.request)
        rule = self.rule(name)
        named = None if rule is None else rule(args, kwargs)
        return None if named is None else check_tenant(named, where=f"tenant of task {name}")

    def rule(self, name: str) -> Rule | None:
        """Return the compiled ``tenant`` option of the task, None when it has none."""
        task = task_named(self._app, name)
        if task is None:
            return None
        known = self._compiled.get(name)
        if known is None or known[0] is not task:
            known = self._compiled[name] = (task, tenant_rule(_option(task), name, task.run))
        return known[1]


def tenant_of_run(request: Any) -> str:
    """Return the tenant of the message that a task runs, by its request.

    Raises:
        InvalidTenant: Another program has given the message an invalid tenant.
    """
    return check_tenant(request.properties.get("tenant"))


def _option(task: Any) -> Any:
    """Return the ``tenant`` option of the task, and a function as a function, not as a bound method."""
    written = inspect.getattr_static(type(task), "tenant", None)
    if inspect.isfunction(written) and next(iter(inspect.signature(written).parameters), "") != "self":
        # `@app.task(tenant=lambda args, kwargs: …)`: Celery makes the option a class attribute.
        return written
    return getattr(task, "tenant", None)
