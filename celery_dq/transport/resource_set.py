"""Sets of resources: the tenants of messages that any one of several tenants may take.

Pure: knows names only. ``include/resource_sets.lua`` reads the same names.
"""

from __future__ import annotations

from typing import Any, Final

from celery_dq.errors import InvalidTenant

__all__ = ["AnyOf", "resources_of"]

#: The name of a set begins and ends with these, and has its resources between them, with commas.
_BEGIN: Final = "any_of("
_END: Final = ")"

#: What is wrong with a tenant that :func:`is_unclosed`.
UNCLOSED: Final = "begins like a set of resources, and has no ')' at its end: add it, or give AnyOf('a', 'b')"


class AnyOf(str):
    """The tenant of a message that any one of these tenants, its resources, may take.

    It is the name ``any_of(gpu-1,gpu-2)``, with the resources in alphabetical order, so it can be written
    wherever a tenant is named. With one resource it is that resource.

    Args:
        resources: Names of tenants, or ints.

    Raises:
        InvalidTenant: There is no resource; or one is neither a str nor an int, is empty or a set, holds a
            comma, or begins or ends with a blank.
    """

    __slots__ = ()

    def __new__(cls, *resources: Any) -> AnyOf:
        """Return the name of the set."""
        names = sorted({_checked(each, resources) for each in resources})
        if not names:
            raise InvalidTenant("AnyOf() names no resource: give those that can do the task, AnyOf('a', 'b')")
        return super().__new__(cls, names[0] if len(names) == 1 else f"{_BEGIN}{','.join(names)}{_END}")

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the resources, in alphabetical order."""
        return resources_of(self) or (str(self),)

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(repr, self.resources))})"

    def __reduce__(self) -> tuple[type[AnyOf], tuple[str, ...]]:
        return AnyOf, self.resources


def resources_of(tenant: str) -> tuple[str, ...] | None:
    """Return the resources of a set by its name; None for a tenant that is not a set."""
    if not (tenant.startswith(_BEGIN) and tenant.endswith(_END)):
        return None
    return tuple(str.__str__(tenant)[len(_BEGIN) : -len(_END)].split(","))


def named_set(tenant: str) -> str:
    """Return the name of a set as :class:`AnyOf` writes it; any other tenant as it is.

    Raises:
        InvalidTenant: The tenant has the form of a set, or its beginning, but is none.
    """
    if not tenant.startswith(_BEGIN):
        return tenant
    resources = resources_of(tenant)
    if resources is None:
        raise InvalidTenant(f"{tenant!r} {UNCLOSED}")
    return str.__str__(AnyOf(*(each.strip() for each in resources)))


def is_unclosed(tenant: str) -> bool:
    """Return whether a tenant, or the template of one, begins as a set and does not end as one."""
    return tenant.startswith(_BEGIN) and not tenant.endswith(_END)


def _checked(resource: Any, resources: tuple[Any, ...]) -> str:
    if isinstance(resource, int) and not isinstance(resource, bool):
        return str(int(resource))
    if not isinstance(resource, str):
        problem = f"is of type {type(resource).__name__}; a resource is a tenant, a str or an int"
    elif not resource:
        problem = "is empty; a resource has a name"
    elif resource != resource.strip():
        problem = "begins or ends with a blank, which would make it another tenant's name: strip it"
    elif resources_of(resource) is not None:
        problem = "is a set itself; name its resources"
    elif "," in resource:
        problem = "holds a comma, which stands between the resources of a set: rename it"
    else:
        return str.__str__(resource)
    raise InvalidTenant(f"AnyOf{resources!r}: {resource!r} {problem}")
