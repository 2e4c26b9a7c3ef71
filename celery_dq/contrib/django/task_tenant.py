"""The tenant of a task of Django."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

#: The attribute in which :func:`tenant` keeps the name of the tenant on a function.
TENANT = "dq_tenant"


def tenant(name: str) -> Callable[[F], F]:
    """Decorate the function of a task with its tenant. It goes below ``@task``.

    Args:
        name: The tenant, or a template such as ``"{merchant_id}"`` with the name of an argument.
    """

    def decorate(function: F) -> F:
        setattr(function, TENANT, name)
        return function

    return decorate
