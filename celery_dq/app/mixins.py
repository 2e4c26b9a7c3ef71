"""Mix behaviour into the classes from which a Celery app makes its parts.

Celery makes ``app.amqp`` and ``app.control`` from ``app.amqp_cls`` and ``app.control_cls``, each a class or
the name of one. Users put their own classes there. The mixin is therefore put over the class that is found
when the part is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery.utils.imports import symbol_by_name


@dataclass(frozen=True)
class MixedIn:
    """A callable in the place where Celery expects the class of a part.

    It is not a class made at run time, because a pickled app contains ``amqp_cls`` and ``control_cls``.

    Attributes:
        base: The app's own class, or its name.
        mixin: The class to mix over it.
    """

    base: Any
    mixin: type

    def __call__(self, app: Any) -> Any:
        """Make the part."""
        base: Any = symbol_by_name(self.base)
        made: Any = base if issubclass(base, self.mixin) else mixed_class(base, self.mixin)
        return made(app=app)


def mixed_class(base: type, mixin: type) -> type:
    """Return a class of the name of `base` with `mixin` in front of it."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def mix_into(app: Any, part: str, mixin: type) -> None:
    """Mix `mixin` into the part of `app`, also when the part exists already. Idempotent.

    Args:
        app: A Celery app.
        part: ``"amqp"`` or ``"control"``: the cached property of the app.
        mixin: The class to mix in.
    """
    attribute = f"{part}_cls"
    base = getattr(app, attribute)
    if not (isinstance(base, MixedIn) and base.mixin is mixin):
        setattr(app, attribute, MixedIn(base, mixin))
    made = app.__dict__.get(part)  # Celery's cached_property keeps it there
    if made is not None and not isinstance(made, mixin):
        made.__class__ = mixed_class(type(made), mixin)
        # Celery builds its sender once; the next publish builds it again, through the mixin.
        made.__dict__.pop("send_task_message", None)
