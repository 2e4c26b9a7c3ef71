"""The tenants of calls, by the ``tenant`` options of the tasks."""

from __future__ import annotations

import inspect
from typing import Any

from celery_dq.compat.celery_calls import registered_tasks, running_task
from celery_dq.transport.tenant import Rule, check_tenant, tenant_rule

__all__ = ["TenantRules"]


class TenantRules:
    """The tenants that the tasks of one app name for their calls, compiled at first use."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._compiled: dict[str, tuple[Any, Rule | None]] = {}

    def tenant_of(self, name: str, message: Any) -> str:
        """Return the tenant of a call for which the caller named none.

        A retry keeps the tenant of the run that it repeats. Other calls get it from the task's ``tenant``.

        Raises:
            ConfigurationError: The option cannot be used for this task.
            InvalidTenant: The option's value for this call is not a tenant.
        """
        headers, _, body, _ = message
        if headers.get("retries"):
            inherited = self._of_retried(headers["id"])
            if inherited is not None:
                return inherited
        if isinstance(body, dict):  # task protocol 1
            return self.of_arguments(name, body["args"], body["kwargs"])
        return self.of_arguments(name, body[0], body[1])

    def of_arguments(self, name: str, args: Any, kwargs: Any) -> str:
        """Return the tenant that the task's ``tenant`` names for these arguments; "" without the option.

        The errors are those of :meth:`tenant_of`.
        """
        rule = self.rule(name)
        return "" if rule is None else check_tenant(rule(args, kwargs), where=f"tenant of task {name}")

    def _of_retried(self, task_id: str) -> str | None:
        running = running_task()
        if running is None or running.request.id != task_id:
            return None
        properties = running.request.properties
        return check_tenant(properties.get("tenant")) if properties else None

    def rule(self, name: str) -> Rule | None:
        """Return the compiled ``tenant`` option of the task, None when it has none."""
        app = self._app
        # An app that must not finalize itself has only its registered tasks.
        tasks = app.tasks if app.finalized or app.autofinalize else registered_tasks(app)
        task = tasks.get(name)
        if task is None:  # registered in other processes only
            return None
        known = self._compiled.get(name)
        if known is None or known[0] is not task:
            known = self._compiled[name] = (task, tenant_rule(_option(task), name, task.run))
        return known[1]


def _option(task: Any) -> Any:
    """Return the ``tenant`` option of the task, and a function as a function, not as a bound method."""
    written = inspect.getattr_static(type(task), "tenant", None)
    if inspect.isfunction(written) and next(iter(inspect.signature(written).parameters), "") != "self":
        # `@app.task(tenant=lambda args, kwargs: …)`: Celery makes the option a class attribute.
        return written
    return getattr(task, "tenant", None)
