"""The context that an app hands to its transport: options, the worker's capacity, the state of the process.

A Celery app (``celery_dq.wiring``) puts one :class:`AppContext` into the ``transport_options`` of each
connection that it opens, under :data:`APP_CONTEXT`. The transport finds the resolved options there, the
capacity of the worker that it runs in, and a place for state that must outlive a reconnect. A plain kombu
user has no app: the transport then makes a context of its own, with default options.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from celery_dq.errors import ConfigurationError
from celery_dq.per_process import PerProcess
from celery_dq.protocols import DiscardHandler, Leaderships, PartitionAllocation, WorkerCapacity

#: The key of the :class:`AppContext` object in kombu's ``transport_options``.
APP_CONTEXT = "dq"

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class ProcessState:
    """Objects that an app keeps for its transport in one process.

    The attributes are those of :class:`AppContext`.
    """

    # A new lock, because a thread of the parent may hold the inherited one.
    lock: threading.Lock = field(default_factory=threading.Lock)
    capacity: WorkerCapacity | None = None
    consumed_queues: Callable[[Any], Iterable[Any]] | None = None
    leaderships: Leaderships | None = None
    allocation: PartitionAllocation | None = None
    discard_handler: DiscardHandler | None = None
    process: Any = None
    coordinator: Any = None
    worker: str = ""


class _OfProcess(Generic[_T]):
    """An attribute of the state of the running process, as one of the context."""

    def __set_name__(self, owner: type[AppContext], name: str) -> None:
        self._name = name

    def __get__(self, context: AppContext, owner: type[AppContext]) -> _T:
        value: _T = getattr(context.in_this_process(), self._name)
        return value

    def __set__(self, context: AppContext, value: _T) -> None:
        setattr(context.in_this_process(), self._name, value)


class AppContext(str):
    """The context of an app for its transport: options, worker capacity, and the state of the process.

    It is a ``str`` because ``transport_options`` are copied and serialized: kombu uses their ``repr`` as the
    key of its connection pools, and ``celery inspect stats`` sends them with the serializer of the app.

    Args:
        label: Name of the owner, in logs and in ``inspect stats``. Each owner needs its own label, because
            kombu shares pooled connections between equal options.
        resolve: Returns the options (``celery_dq.options``). Called once, at their first use.

    Attributes:
        queue_named: Returns the app's kombu queue with a name; None for a queue that it does not know.
    """

    queue_named: Callable[[Any], Any]

    #: The capacity of the worker in this process; None in a producer and in a pool child.
    capacity = _OfProcess[WorkerCapacity | None]()
    #: Returns the kombu queues that the worker consumes over a connection; None without a worker.
    consumed_queues = _OfProcess[Callable[[Any], Iterable[Any]] | None]()
    #: The discard handler of the worker in this process when it has no capacity object; else None.
    discard_handler = _OfProcess[DiscardHandler | None]()
    #: The leaderships that the worker in this process is a candidate for; None without any.
    leaderships = _OfProcess[Leaderships | None]()
    #: The partitions that the worker in this process serves; None where they are not allocated.
    allocation = _OfProcess[PartitionAllocation | None]()
    #: The dedup coordinator inside the worker of this process; None where verdicts come from outside.
    coordinator = _OfProcess[Any]()
    #: Celery's name of the worker in this process; "" without one.
    worker = _OfProcess[str]()
    #: The state that the transport keeps for this process across reconnects; None after a fork.
    process = _OfProcess[Any]()

    _resolve: Callable[[], Any]
    _options: Any
    _state: PerProcess[ProcessState]

    def __new__(cls, label: str, resolve: Callable[[], Any]) -> AppContext:
        """Make the context of one owner; see the class."""
        self = super().__new__(cls, label)
        self._resolve = resolve
        self._options = None
        self._state = PerProcess(ProcessState)
        self.queue_named = lambda name: None
        return self

    @classmethod
    def of(cls, connection: Any) -> AppContext | None:
        """Return the context of a kombu connection that an app has opened; None in plain kombu.

        Raises:
            ConfigurationError: The transport option has another value.
        """
        context = connection.transport_options.get(APP_CONTEXT)
        if context is None or isinstance(context, cls):
            return context
        raise ConfigurationError(f"transport_options[{APP_CONTEXT!r}] is celery-dq's own: remove {context!r}")

    @property
    def options(self) -> Any:
        """The resolved options.

        Raises:
            ConfigurationError: An option is unknown, has the wrong type, or contradicts another one.
        """
        if self._options is None:
            self._options = self._resolve()
        return self._options

    def in_this_process(self) -> ProcessState:
        """Return the state of this process, for objects that no other process may use."""
        return self._state.get()

    def in_process(self, make: Callable[[], _T]) -> _T:
        """Return :attr:`process`, after making it by `make` if there is none. Thread-safe."""
        own = self._state.get()
        with own.lock:
            if own.process is None:
                own.process = make()
            made: _T = own.process
            return made

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process gets the resolved options, but not the state of this process.
        return _restored, (str(self), self.options)

    def __copy__(self) -> AppContext:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AppContext:
        return self


def _restored(label: str, options: Any) -> AppContext:
    return AppContext(label, lambda: options)
