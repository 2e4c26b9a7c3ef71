"""What the rooms of this package hand to each other without importing each other.

A Celery app (``celery_dq.wiring``) puts one :class:`Wires` object into the
``transport_options`` of every connection it opens, under :data:`WIRES`. The
transport finds there the resolved options, the gate of the worker it runs in, and
a place for what must outlive a reconnect. A plain kombu user has no app and so no
wires: the transport then makes its own, with default options.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

#: The message header that carries the fencing token of the leader; written anew at every delivery.
TOKEN = "dq_token"  # noqa: S105 - the name of a header
#: The message header that carries the name of the queue beside the token.
QUEUE = "dq_queue"
#: The message header that says how many workers were lost with the message so far; on what comes back only.
DELIVERIES = "dq_deliveries"
#: The key of the :class:`Wires` object in kombu's ``transport_options``.
WIRES = "dq"

_T = TypeVar("_T")


#: The property of a message that carries its :class:`DedupTicket` to the transport.
DEDUP = "dq_dedup"


#: The header in which a call tells a worker on another broker what its dedup key is.
CLAIM_HEADER = "dq_claim"


class DedupTicket(Protocol):
    """What a call hands to the transport of a tenant broker, to get a verdict on it."""

    #: The dedup section of the record, packed by the transport's own rules.
    section: bytes

    def told(self, status: str, message_id: str, covering: str, replaced: str) -> None:
        """Say what the push script answered (see ``Pushed`` of the transport)."""


class Undertaker(Protocol):
    """Who tells Celery of messages that will not run."""

    def deliver_discard(self, message: Any, reason: str) -> bool:
        """Do Celery's bookkeeping for a message that will not run (expired, cancelled, dead).

        Returns False when it cannot be done (an unknown task): the transport then finishes it silently.
        """


class WorkerGate(Undertaker, Protocol):
    """What the transport must know about the worker that it feeds.

    Every method is called from the thread that claims, often, and must not block.
    """

    #: The pool runs a task inside the event loop (solo), so nothing else turns meanwhile.
    blocking: bool

    @property
    def in_turn(self) -> int:
        """How many messages of a led queue it takes at most.

        More than one where each begins only if ``may_start`` of the transport allows it then.
        """

    @property
    def has_next(self) -> bool:
        """Something that waited for the end of another message may begin."""

    def awaits(self, tag: str) -> bool:
        """Something waits for the end of the message with this delivery tag."""

    def start_next(self) -> None:
        """Let what may begin do so."""

    @property
    def closing(self) -> bool:
        """The worker shuts down: nothing new may start."""

    def room(self) -> int | None:
        """How many pool slots are free; None when no limit is known."""

    def ahead(self) -> int:
        """How many messages more than free slots may be claimed now."""

    def running_tags(self) -> frozenset[str]:
        """Delivery tags of the messages whose tasks run: they outlive a lost connection."""

    def started_tags(self) -> frozenset[str]:
        """Those of :meth:`running_tags` that have begun: they go on even when the lease was lost."""


class Consumption(Protocol):
    """What the transport tells of the led queues that it consumes; from any thread."""

    def busy(self, queue: str, token: int) -> bool:
        """Whether something of that term is held, or not told yet."""

    def cut_off(self, queue: str, token: int) -> bool:
        """Whether the broker has been silent for a whole lease: what was held may be with others."""


class Permit(Protocol):
    """One term of office."""

    @property
    def firm(self) -> bool:
        """Whether the next message may start now. For ever False when the term is over."""


class Terms(Protocol):
    """Which queues have one leader, and whether it is this process.

    The transport asks from the thread that fetches, often; nothing here blocks.
    """

    def governs(self, queue: str) -> bool:
        """Whether the queue is consumed by its leader only."""

    def term(self, queue: str) -> int:
        """The fencing token of our term, once its messages may be executed; 0 when we do not lead."""

    def firm(self, queue: str) -> bool:
        """Whether the next message may start now."""

    def stands(self, queue: str, token: int) -> bool:
        """Whether the next message may start now, in the term with this token."""

    def permit(self, queue: str, token: int) -> Permit | None:
        """The term with this token, to be asked before each message; None when it is over."""

    def refused(self, queue: str, token: int) -> None:
        """The broker knows a later leader than `token`."""

    def doubt(self, queue: str, token: int) -> None:
        """Nobody knows what the term with this token holds: it is to end in good order."""

    def attach(self, queue: str, consumption: Consumption) -> None:
        """From now on this one consumes the queue."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever an answer to the above has changed, from any thread."""

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Do not call it any more."""


class _Forked:
    """The state of one process: recognises by its pid that it was inherited over a fork."""

    __slots__ = ("coordinator", "gate", "lock", "pid", "process", "terms", "undertaker")

    def __init__(self) -> None:
        self.pid = os.getpid()
        # A lock of its own: one that is inherited may be held by a thread that does not exist here.
        self.lock = threading.Lock()
        self.gate: WorkerGate | None = None
        self.terms: Terms | None = None
        self.undertaker: Undertaker | None = None
        self.process: Any = None
        self.coordinator: Any = None


class Wires(str):
    """What an app hands to its transport: options, worker gate, the process's own state.

    It is a ``str`` (its value is its ``repr``) because ``transport_options`` travel: kombu
    keys its connection pools by their ``repr``, and ``celery inspect stats`` sends them with
    whatever serializer the app uses.

    Arguments:
        label: Names the owner, in logs and in ``inspect stats``. Two owners need two labels:
            kombu shares pooled connections between equal ones.
        resolve: Called once, at first need, to obtain the options (``celery_dq.options``).
    """

    _resolve: Callable[[], Any]
    _options: Any
    _own: _Forked

    def __new__(cls, label: str, resolve: Callable[[], Any]) -> Wires:
        """Make the wires of one owner; see the class."""
        self = super().__new__(cls, label)
        self._resolve = resolve
        self._options = None
        self._own = _Forked()
        return self

    @property
    def options(self) -> Any:
        """The resolved options.

        Raises:
            ConfigurationError: An option is unknown, of the wrong type, or contradicts another.
        """
        if self._options is None:
            self._options = self._resolve()
        return self._options

    def _of_this_process(self) -> _Forked:
        own = self._own
        if own.pid != os.getpid():
            own = self._own = _Forked()
        return own

    @property
    def gate(self) -> WorkerGate | None:
        """The gate of the worker in this process; None in a producer and in a pool child."""
        return self._of_this_process().gate

    @gate.setter
    def gate(self, gate: WorkerGate | None) -> None:
        self._of_this_process().gate = gate

    @property
    def undertaker(self) -> Undertaker | None:
        """Who, in the worker of this process, does the bookkeeping where there is no gate; or None."""
        return self._of_this_process().undertaker

    @undertaker.setter
    def undertaker(self, undertaker: Undertaker | None) -> None:
        self._of_this_process().undertaker = undertaker

    @property
    def terms(self) -> Terms | None:
        """The leaderships that the worker in this process volunteers for; None without any."""
        return self._of_this_process().terms

    @terms.setter
    def terms(self, terms: Terms | None) -> None:
        self._of_this_process().terms = terms

    @property
    def coordinator(self) -> Any:
        """What gives verdicts to the worker of this process, if nobody outside can be asked; else None."""
        return self._of_this_process().coordinator

    @coordinator.setter
    def coordinator(self, coordinator: Any) -> None:
        self._of_this_process().coordinator = coordinator

    @property
    def process(self) -> Any:
        """What the transport keeps for this process across reconnects; None after a fork."""
        return self._of_this_process().process

    @process.setter
    def process(self, state: Any) -> None:
        self._of_this_process().process = state

    def in_process(self, make: Callable[[], _T]) -> _T:
        """Return :attr:`process`, made by `make` when there is none yet; safe between threads."""
        own = self._of_this_process()
        with own.lock:
            if own.process is None:
                own.process = make()
            made: _T = own.process
            return made

    def __reduce__(self) -> tuple[Any, ...]:
        # Resolved options travel, the process's own state does not.
        return _restored, (str(self), self.options)

    def __copy__(self) -> Wires:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Wires:
        return self


def _restored(label: str, options: Any) -> Wires:
    return Wires(label, lambda: options)
