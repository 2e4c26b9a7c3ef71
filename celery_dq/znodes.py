"""The paths of all nodes of celery-dq in ZooKeeper. No other module spells a path.

Paths are relative to the chroot of the host list (``host:2181/shop``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from celery_dq.errors import ConfigurationError

__all__ = [
    "AllocationNodes",
    "AllocatorNodes",
    "BeatNodes",
    "JOURNALS",
    "PRESENCES",
    "BrokerNodes",
    "LeadershipNodes",
    "QueueNodes",
    "ROOT",
    "guid_of",
    "leaderships",
    "sequence_of",
    "serial_distance",
    "serial_order",
]

ROOT = "/dq"
#: Persistent children, one for each writer whose transactions must take effect once.
JOURNALS = f"{ROOT}/journals"
#: Ephemeral children, one for each consumer that holds items in a session.
PRESENCES = f"{ROOT}/presences"
#: ZooKeeper numbers the children of a folder by a signed counter of 32 bits.
SEQUENCE_SPAN = 2**32


def leaderships(environment: str) -> str:
    """Return the folder with one folder per leadership."""
    return f"{ROOT}/{environment}/leaders"


class _Node(property):
    """A child of the folder :attr:`path` with the name of its attribute."""

    def __init__(self, holds: str) -> None:
        self._holds = holds

    def __set_name__(self, owner: type, name: str) -> None:
        super().__init__(lambda nodes: f"{nodes.path}/{name}")
        self.__doc__ = self._holds

    if TYPE_CHECKING:

        def __get__(self, nodes: Any, owner: Any = None) -> str: ...  # type: ignore[override]


@dataclasses.dataclass(frozen=True)
class LeadershipNodes:
    """The nodes of one leadership.

    Attributes:
        environment: ``online`` or ``sandbox``.
        name: Name of the leadership, for example of a queue; percent-encoded in the path.

    Raises:
        ConfigurationError: The name is empty.
    """

    environment: str
    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("the name of a leadership is empty: give the name of the queue")

    @property
    def path(self) -> str:
        """The folder of this leadership."""
        return f"{leaderships(self.environment)}/{_quoted(self.name)}"

    @staticmethod
    def name_of(folder: str) -> str:
        """Return the name of the leadership whose folder is called `folder`."""
        return unquote(folder)

    @property
    def candidates(self) -> str:
        """Folder of the candidates, which are ephemeral sequential children; the lowest one leads."""
        return f"{self.path}/candidates"

    epoch = _Node(
        "Persistent node with the last fencing token and its owner; without it tokens would repeat."
    )

    def candidate_prefix(self, guid: str) -> str:
        """Return the path before the sequence. The GUID identifies a node whose creation got no answer."""
        return f"{self.candidates}/c-{guid}-"

    def candidate(self, node: str) -> str:
        """Return the path of the child called `node`."""
        return f"{self.candidates}/{node}"


@dataclasses.dataclass(frozen=True)
class AllocatorNodes(LeadershipNodes):
    """The nodes of the election of the allocator, which is not a leadership of a queue."""

    name: str = "allocator"

    @property
    def path(self) -> str:
        """The folder of the election."""
        return f"{AllocationNodes(self.environment).path}/{self.name}"


@dataclasses.dataclass(frozen=True)
class AllocationNodes:
    """The nodes of the allocation of partitions to workers.

    Attributes:
        environment: ``online`` or ``sandbox``.
    """

    environment: str

    @property
    def path(self) -> str:
        """Folder of the allocation."""
        return f"{ROOT}/{self.environment}/allocation"

    @property
    def running(self) -> str:
        """Folder of the running workers, which are ephemeral children with their queues."""
        return f"{self.path}/running"

    def member(self, worker: str, session_id: int) -> str:
        """Return the path of a running worker in one session: a restarted worker has another node."""
        return f"{self.running}/{_quoted(worker)}|{session_id & (1 << 64) - 1:x}"

    @staticmethod
    def worker_of(node: str) -> str:
        """Return the name of the worker that has this child of :attr:`running` or of a generation."""
        return unquote(node.partition("|")[0])

    generation = _Node("Persistent node with the number of the generation in force. Workers watch it.")
    serverlist = _Node("Folder with one folder per generation, which has one child per worker.")

    def lists(self, generation: int) -> str:
        """Return the folder with the lists of one generation."""
        return f"{self.serverlist}/{generation:010d}"

    def list_of(self, generation: int, worker: str) -> str:
        """Return the path of the list of the partitions that a worker serves."""
        return f"{self.lists(generation)}/{_quoted(worker)}"


@dataclasses.dataclass(frozen=True)
class BeatNodes:
    """The nodes of the elected beats with one name.

    Attributes:
        environment: ``online`` or ``sandbox``.
        name: Name of the schedule; percent-encoded in the path.
    """

    environment: str
    name: str

    @property
    def path(self) -> str:
        """Folder with one node per entry of the schedule."""
        return f"{ROOT}/{self.environment}/beat/{_quoted(self.name)}"

    def entry(self, name: str) -> str:
        """Return the path of the entry called `name`; percent-encoded in the path."""
        return f"{self.path}/{_quoted(name)}"

    @staticmethod
    def entry_of(node: str) -> str:
        """Return the name of the entry with this node."""
        return unquote(node)


def sequence_of(node: str) -> int:
    """Return the sequence after a candidate's GUID; it becomes negative after 2³¹ children."""
    return int(node.split("-", 2)[2])


def guid_of(node: str) -> str:
    """Return the GUID in the name of a candidate."""
    return node.split("-", 2)[1]


def serial_order(nodes: list[str], sequence: Callable[[str], int] = sequence_of) -> list[str]:
    """Return `nodes` by age. The comparison is serial (RFC 1982), because the counter rolls over.

    Args:
        nodes: Names that end in a sequence. No two of them are 2³¹ creations apart.
        sequence: Reads the sequence from a name.
    """
    if not nodes:
        return []
    first = sequence(nodes[0])
    return sorted(nodes, key=lambda node: serial_distance(sequence(node), first))


def serial_distance(sequence: int, start: int) -> int:
    """Return how many creations after `start` the node with `sequence` was created; negative for before."""
    away = (sequence - start) % SEQUENCE_SPAN
    return away - SEQUENCE_SPAN if away >= SEQUENCE_SPAN // 2 else away


@dataclasses.dataclass(frozen=True)
class QueueNodes:
    """The nodes of one queue of the ``dq-zookeeper`` broker.

    Items have the names of Curator's priority and delay queues, so that Java peers can share them.

    Attributes:
        path: Folder of the queue, see :meth:`BrokerNodes.queue`.
    """

    path: str

    @property
    def ready(self) -> str:
        """Folder of the items that may be served, the most urgent and oldest first."""
        return f"{self.path}/ready"

    delayed = _Node("Folder of the items that are not due yet.")
    locks = _Node(
        "Folder of the locks: ephemeral nodes, each with the name of the item that its owner holds."
    )
    unreadable = _Node("Folder of the items that could not be read.")
    suspects = _Node(
        "Folder of nodes that name items of lost consumers; their data name the consumer. Made on demand."
    )
    dead = _Node("Folder of the dead letters, by message id. Made on demand.")

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that each queue has, in the order of their creation."""
        return self.ready, self.delayed, self.locks, self.unreadable

    def ready_prefix(self, priority: int) -> str:
        """Return the path before the sequence. Curator serves low numbers first, so priority 9 becomes 0."""
        return f"{self.ready}/queue-1{9 - priority:08X}"

    def delayed_prefix(self, due_ms: int) -> str:
        """Return the path before the sequence. `due_ms` is in milliseconds since 1970."""
        return f"{self.delayed}/queue-|{due_ms:X}|"

    def item(self, name: str) -> str:
        """Return the path of the ready item called `name`."""
        return f"{self.path}/ready/{name}"

    def lock(self, name: str) -> str:
        """Return the path of the lock of an item."""
        return f"{self.path}/locks/{name}"

    def suspect(self, name: str) -> str:
        """Return the path of the node that names the lost consumer of an item."""
        return f"{self.path}/suspects/{name}"

    def dead_letter(self, message_id: str) -> str:
        """Return the path of the dead letter with this id; percent-encoded in the path."""
        return f"{self.path}/dead/{_quoted(message_id)}"

    @staticmethod
    def dead_id(node: str) -> str:
        """Return the message id of the dead letter in this node."""
        return unquote(node)


def due_ms_of(name: str) -> int:
    """Return when a delayed item is due, in milliseconds since 1970.

    An item that a failing Curator consumer put back has lost its due time with its name; it is due at once.

    Raises:
        ValueError: The name is not that of a delayed item.
    """
    if name.removeprefix("queue-").isdigit():
        return 0
    return int(name.split("|")[1], 16)


def served_in_order(names: list[str]) -> list[str]:
    """Return the names of ready items in the order of their service."""
    if not any("-" in name[15:] for name in names):
        return sorted(names)
    # The counter of the folder rolls over after 2³¹ changes, so sequences of one priority are compared
    # serially.
    urgencies: dict[str, list[str]] = {}
    for name in names:
        urgencies.setdefault(name[:15] if _has_sequence(name) else name, []).append(name)
    ordered: list[str] = []
    for urgency in sorted(urgencies):
        ordered += serial_order(urgencies[urgency], lambda name: int(name[15:]) if _has_sequence(name) else 0)
    return ordered


def _has_sequence(name: str) -> bool:
    return name[15:].removeprefix("-").isdigit()


@dataclasses.dataclass(frozen=True)
class BrokerNodes:
    """The nodes of the ``dq-zookeeper`` broker.

    Attributes:
        environment: ``online`` or ``sandbox``.
    """

    environment: str

    @property
    def path(self) -> str:
        """Folder of all nodes of the broker."""
        return f"{ROOT}/{self.environment}/broker"

    @property
    def queues(self) -> str:
        """Folder with one folder per queue."""
        return f"{self.path}/queues"

    def queue(self, name: str) -> QueueNodes:
        """Return the nodes of the queue called `name`."""
        return QueueNodes(f"{self.queues}/{_quoted(name)}")

    @property
    def transients(self) -> str:
        """Folder with one folder per transient queue, which is removed with its last user."""
        return f"{self.path}/transient"

    def transient(self, queue: str) -> str:
        """Return the folder of the users of a transient queue, which are ephemeral nodes."""
        return f"{self.transients}/{_quoted(queue)}"

    @staticmethod
    def queue_called(folder: str) -> str:
        """Return the name of the queue whose folder is called `folder`."""
        return unquote(folder)

    def bindings(self, exchange: str) -> str:
        """Return the folder of the bindings of an exchange; the names of its nodes hold the bindings."""
        return f"{self.path}/bindings/{_quoted(exchange)}"

    def binding(self, exchange: str, queue: str, routing_key: str, owner: str) -> str:
        """Return the path of a binding.

        Args:
            exchange: Name of the exchange.
            queue: Name of the queue.
            routing_key: Routing key.
            owner: GUID of the connection with which the binding ends; "" for a lasting binding.
        """
        return f"{self.bindings(exchange)}/{_quoted(queue)}|{_quoted(routing_key)}|{owner}"


def binding_of(name: str) -> tuple[str, str, bool]:
    """Return queue, routing key, and whether the queue is transient.

    Raises:
        ValueError: The name is not that of a binding.
    """
    queue, routing_key, owner = name.split("|")
    return unquote(queue), unquote(routing_key), bool(owner)


def _quoted(name: str) -> str:
    # ZooKeeper reserves names that consist of dots only.
    return quote(name, safe="").replace(".", "%2E")
