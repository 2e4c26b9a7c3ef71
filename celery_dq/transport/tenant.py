"""The rules for the tenant and the priority of a message.

Pure: uses task signatures and values, neither Celery nor Redis.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple

from celery_dq.errors import ConfigurationError, InvalidPriority, InvalidTenant
from celery_dq.transport.resource_set import UNCLOSED, is_unclosed, named_set, resources_of

#: The tenant of a message without a named tenant.
NO_TENANT = ""

#: Longest tenant name, in bytes of UTF-8.
MAX_TENANT_BYTES = 255

#: 0 is the least urgent (and the default), 9 the most.
MIN_PRIORITY, MAX_PRIORITY = 0, 9

_REMEDY = "make it serve every form of a call, or name the tenant in the call, as in apply_async(…, tenant=…)"

# C0 and C1 controls, DEL, and the two separators that also break lines in logs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

#: From the arguments of a call to the value of the tenant (not yet checked).
Rule = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def check_tenant(value: Any, *, where: str = "tenant") -> str:
    """Return the tenant's name as str.

    Args:
        value: A str or an int; None, for a call without a tenant, becomes ``""``. The name of a set of
            resources, as ``any_of(b, a)``, becomes that of :class:`~celery_dq.AnyOf`.
        where: Name of the option or the task, for the error.

    Raises:
        InvalidTenant: Another type, more than 255 bytes of UTF-8, control characters, or
            text that UTF-8 cannot hold, or a set of resources that is none.
    """
    if value is None:
        return NO_TENANT
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))  # an IntEnum's own str() is its name on some Pythons
    if not isinstance(value, str):
        raise InvalidTenant(
            f"{where}: {_short(value)} is of type {type(value).__name__}; a tenant is a str or an int,"
            " for example str(merchant.pk)"
        )
    if _CONTROL.search(value):
        raise InvalidTenant(
            f"{where}: {_short(value)} holds control characters or line breaks; strip them,"
            " or use an identifier instead of a displayed name"
        )
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as exc:
        raise InvalidTenant(
            f"{where}: {_short(value)} is not valid Unicode ({exc.reason}); decode it with its encoding"
        ) from exc
    if size > MAX_TENANT_BYTES:
        raise InvalidTenant(
            f"{where}: {_short(value)} has {size} bytes; a tenant has at most {MAX_TENANT_BYTES}."
            " Use an identifier or a digest of the name"
        )
    try:
        return named_set(str.__str__(value))  # an Enum's own str() is its name
    except InvalidTenant as exc:
        raise InvalidTenant(f"{where}: {exc}") from exc


def check_single_tenant(value: Any, *, what: str) -> str:
    """Return the tenant's name as :func:`check_tenant`, for a part of a tenant that a set does not have.

    Args:
        value: The tenant.
        what: The part, for the error: ``quota`` or ``pause``.

    Raises:
        InvalidTenant: As there, or it is a set of resources.
    """
    name = check_tenant(value)
    resources = resources_of(name)
    if resources is not None:
        raise InvalidTenant(
            f"tenant: {name!r} is a set of resources, which has no {what} of its own: "
            f"give one to each of {', '.join(map(repr, resources))}"
        )
    return name


def check_priority(value: Any, *, where: str = "priority") -> int:
    """Return the priority, 0 for None.

    Raises:
        InvalidPriority: Not a whole number from 0 to 9.
    """
    if value is None:
        return MIN_PRIORITY
    if isinstance(value, bool) or not isinstance(value, int) or not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidPriority(
            f"{where}: {_short(value)} is not a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}"
            f" ({MAX_PRIORITY} is the most urgent)"
        )
    return value


class _Argument(NamedTuple):
    """Where a call carries one argument of the task."""

    position: int | None  # None: by keyword only
    default: Any  # inspect.Parameter.empty when the call must give it


class TenantTemplate:
    """A format template over the bound arguments of a task, defaults included.

    ``"{merchant_id}"``, ``"{order.merchant.id}"``, ``"{order[merchant]}"``, ``"eu-{merchant_id:04d}"``.
    If the value of a field is None, the call has no tenant.

    Args:
        template: The template.
        task: Name of the task, for errors.
        signature: Signature of the task.

    Raises:
        ConfigurationError: The template is malformed, has an unnamed field, or names an argument
            that the task does not take.
    """

    def __init__(self, template: str, task: str, signature: inspect.Signature) -> None:
        self.template = template
        self.task = task
        self._arguments: dict[str, _Argument] = {}
        self._rest: tuple[int, str | None, str | None] = (0, None, None)
        self._fields: list[tuple[str, str, str, str]] = []  # literal before, field, spec, conversion
        self._read_signature(signature)
        self._parse()
        # The common case, "{merchant_id}", needs no formatter at all.
        self._only = self.template[1:-1] if self.template == "{" + self.template[1:-1] + "}" else None
        if self._only not in self._arguments:
            self._only = None

    def _read_signature(self, signature: inspect.Signature) -> None:
        position = 0
        rest_args = rest_kwargs = None
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest_args = name
            elif parameter.kind is parameter.VAR_KEYWORD:
                rest_kwargs = name
            elif parameter.kind is parameter.KEYWORD_ONLY:
                self._arguments[name] = _Argument(None, parameter.default)
            else:
                self._arguments[name] = _Argument(position, parameter.default)
                position += 1
        self._rest = (position, rest_args, rest_kwargs)

    def _parse(self) -> None:
        try:
            parts = list(Formatter().parse(self.template))
        except ValueError as exc:
            raise self._error(f"is not a format template ({exc})") from exc
        if is_unclosed(self.template):
            raise self._error(UNCLOSED)
        pending = ""
        for literal, field, spec, conversion in parts:
            pending += literal
            if field is None:  # the end, or a doubled brace
                continue
            name = re.split(r"[.\[]", field, maxsplit=1)[0]
            if not name or name.isdigit():
                raise self._error("has a field without a name; name the argument, as in {merchant_id}")
            if not self._takes(name):
                known = ", ".join([*self._arguments, *(rest for rest in self._rest[1:] if rest)])
                raise self._error(f"names {name!r}, which the task does not take: {known or 'nothing'}")
            self._fields.append((pending, field, spec or "", conversion or ""))
            pending = ""
        self._tail = pending

    def _takes(self, name: str) -> bool:
        return name in self._arguments or name in self._rest[1:] or self._rest[2] is not None

    def _error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"task {self.task}: the tenant template {self.template!r} {problem}")

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the tenant's value for a call.

        Raises:
            InvalidTenant: The call lacks an argument of the template, or a field cannot be formatted.
        """
        if self._only is not None:
            return self._argument(self._only, args, kwargs)
        formatter = Formatter()
        bound = _Lookup(self, args, kwargs)
        text = []
        try:
            for literal, field, spec, conversion in self._fields:
                value, _ = formatter.get_field(field, (), bound)
                if value is None:
                    return None
                if conversion:
                    value = formatter.convert_field(value, conversion)
                text += [literal, format(value, spec)]
        except InvalidTenant:
            raise
        except Exception as exc:  # attributes and items of the arguments may run any code
            raise self._unusable(f"cannot be filled from this call ({exc!r})") from exc
        return "".join(text) + self._tail

    def _unusable(self, problem: str) -> InvalidTenant:
        return InvalidTenant(f"task {self.task}: the tenant template {self.template!r} {problem}: {_REMEDY}")

    def _argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        argument = self._arguments.get(name)
        if argument is not None:
            if argument.position is not None and argument.position < len(args):
                return args[argument.position]
            value = kwargs.get(name, argument.default)
            if value is not inspect.Parameter.empty:
                return value
        else:
            positions, rest_args, rest_kwargs = self._rest
            if name == rest_args:
                return args[positions:]
            if name == rest_kwargs:
                return {key: value for key, value in kwargs.items() if key not in self._arguments}
            if name in kwargs:
                return kwargs[name]
        raise self._unusable(f"needs the argument {name!r}, which this call does not give")


class _CallableRule:
    """A tenant rule given as a callable ``(args, kwargs)``. Errors of the callable name the task."""

    def __init__(self, option: Rule, task: str) -> None:
        self._option = option
        self._task = task

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the tenant's value for a call.

        Raises:
            InvalidTenant: The callable raised an error, which is the cause.
        """
        try:
            return self._option(args, kwargs)
        except Exception as exc:
            name = getattr(self._option, "__qualname__", type(self._option).__qualname__)
            raise InvalidTenant(
                f"task {self._task}: the tenant callable {name} failed for this call ({exc!r}): {_REMEDY}"
            ) from exc


class _Lookup(Mapping[str, Any]):
    """The arguments of one call by name, looked up lazily."""

    def __init__(self, template: TenantTemplate, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._template, self._args, self._kwargs = template, args, kwargs

    def __getitem__(self, name: str) -> Any:
        return self._template._argument(name, self._args, self._kwargs)

    def __iter__(self) -> Any:
        return iter(self._template._arguments)

    def __len__(self) -> int:
        return len(self._template._arguments)


def tenant_rule(option: Any, task: str, run: Callable[..., Any]) -> Rule | None:
    """Compile the ``tenant`` option of a task.

    Args:
        option: A template, a callable ``(args, kwargs)``, an int (a constant), or None.
        task: The task's name, for errors.
        run: The task's function, with its ``self`` bound.

    Raises:
        ConfigurationError: The option is of another type, or names an unknown argument.
    """
    if option is None:
        return None
    if isinstance(option, str):
        if "{" not in option and "}" not in option:
            return _constant(option, task)
        return TenantTemplate(option, task, inspect.signature(run))
    if isinstance(option, int) and not isinstance(option, bool):
        return _constant(option, task)
    if callable(option):
        _check_arity(option, task)
        return _CallableRule(option, task)
    raise ConfigurationError(
        f"task {task}: tenant={_short(option)} is of type {type(option).__name__}; give a template over the"
        " arguments such as '{merchant_id}', or a callable (args, kwargs) that returns a str"
    )


def _check_arity(option: Callable[..., Any], task: str) -> None:
    try:
        signature = inspect.signature(option)
    except (TypeError, ValueError):  # built-ins may have no signature
        return
    try:
        signature.bind((), {})
    except TypeError as exc:
        name = getattr(option, "__name__", type(option).__name__)
        raise ConfigurationError(
            f"task {task}: the tenant callable {name}{signature} cannot be called with (args, kwargs): {exc};"
            " give it these two parameters, such as lambda args, kwargs: args[0]"
        ) from None


def _constant(value: Any, task: str) -> Rule:
    checked = check_tenant(value, where=f"tenant of task {task}")
    return lambda args, kwargs: checked


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
