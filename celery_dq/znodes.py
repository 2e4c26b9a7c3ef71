"""Every path that celery-dq keeps in ZooKeeper is spelled here, and nowhere else.

Paths are relative to the chroot of the host list (``host:2181/shop``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from urllib.parse import quote, unquote

from celery_dq.errors import ConfigurationError

__all__ = [
    "JOURNALS",
    "PRESENCES",
    "BrokerNodes",
    "LeadershipNodes",
    "QueueNodes",
    "beat_entry",
    "sequence_of",
    "serial_distance",
    "serial_order",
]

ROOT = "/dq"
#: Persistent children, one for each writer whose transactions must happen once.
JOURNALS = f"{ROOT}/journals"
#: Ephemeral children, one for each consumer that holds items in a session.
PRESENCES = f"{ROOT}/presences"
#: ZooKeeper counts the children of a folder in a signed number of 32 bits.
SEQUENCE_SPAN = 2**32


@dataclasses.dataclass(frozen=True)
class LeadershipNodes:
    """The nodes of one leadership.

    :param environment: ``online`` or ``sandbox``.
    :param name: what is led, a queue for instance; percent-encoded in the path.
    """

    environment: str
    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("a leadership needs a name, and '' is none: give the name of the queue")

    @property
    def path(self) -> str:
        """The folder of this leadership."""
        return f"{ROOT}/{self.environment}/leaders/{_quoted(self.name)}"

    @property
    def candidates(self) -> str:
        """Its ephemeral sequential children stand for election; the lowest one leads."""
        return f"{self.path}/candidates"

    @property
    def epoch(self) -> str:
        """Persistent: the last fencing token and who has it. Never deleted, or tokens would repeat."""
        return f"{self.path}/epoch"

    def candidate_prefix(self, guid: str) -> str:
        """What the sequence is appended to; the GUID finds a node whose creation got no answer."""
        return f"{self.candidates}/c-{guid}-"

    def candidate(self, node: str) -> str:
        """The path of the child called `node`."""
        return f"{self.candidates}/{node}"


def beat_entry(environment: str, name: str, entry: str) -> str:
    """What elected beats of one name share about one entry of their schedule; percent-encoded in the path."""
    return f"{ROOT}/{environment}/beat/{_quoted(name)}/{_quoted(entry)}"


def sequence_of(node: str) -> int:
    """The sequence behind a candidate's GUID; it turns negative after 2³¹ children."""
    return int(node.split("-", 2)[2])


def serial_order(nodes: list[str], sequence: Callable[[str], int] = sequence_of) -> list[str]:
    """`nodes` by age. Sequences are compared serially: the counter rolls over, and later is still later.

    :param nodes: names that end in a sequence; no two of them are 2³¹ births apart.
    :param sequence: reads the sequence from a name.
    """
    if not nodes:
        return []
    first = sequence(nodes[0])
    return sorted(nodes, key=lambda node: serial_distance(sequence(node), first))


def serial_distance(sequence: int, start: int) -> int:
    """How many births after `start` (negative: before it) the node with `sequence` was born."""
    away = (sequence - start) % SEQUENCE_SPAN
    return away - SEQUENCE_SPAN if away >= SEQUENCE_SPAN // 2 else away


@dataclasses.dataclass(frozen=True)
class QueueNodes:
    """The nodes of one queue of the ``dq-zookeeper`` broker.

    Items are named as Curator's priority and delay queues name theirs, so that Java peers can share them.

    :param path: the folder of the queue, see :meth:`BrokerNodes.queue`.
    """

    path: str

    @property
    def ready(self) -> str:
        """Items that may be served, the most urgent and oldest first."""
        return f"{self.path}/ready"

    @property
    def delayed(self) -> str:
        """Items before their time."""
        return f"{self.path}/delayed"

    @property
    def locks(self) -> str:
        """Ephemeral, named as the items that their owners hold."""
        return f"{self.path}/locks"

    @property
    def unreadable(self) -> str:
        """Items that nobody could read."""
        return f"{self.path}/unreadable"

    @property
    def suspects(self) -> str:
        """Named as items whose consumers were lost; the data says who had them last. Made at need."""
        return f"{self.path}/suspects"

    @property
    def dead(self) -> str:
        """Dead letters, by their message ids. Made at need."""
        return f"{self.path}/dead"

    @property
    def folders(self) -> tuple[str, ...]:
        """Those that every queue has, in the order in which they are made."""
        return self.ready, self.delayed, self.locks, self.unreadable

    def ready_prefix(self, priority: int) -> str:
        """What the sequence is appended to. Low numbers come first in Curator: 9, the most urgent, is 0."""
        return f"{self.ready}/queue-1{9 - priority:08X}"

    def delayed_prefix(self, due_ms: int) -> str:
        """What the sequence is appended to; `due_ms` are milliseconds since the epoch."""
        return f"{self.delayed}/queue-|{due_ms:X}|"

    def item(self, name: str) -> str:
        """The path of the served item called `name`."""
        return f"{self.path}/ready/{name}"

    def lock(self, name: str) -> str:
        """The path of its lock."""
        return f"{self.path}/locks/{name}"

    def suspect(self, name: str) -> str:
        """The path of what is known of its last consumer."""
        return f"{self.path}/suspects/{name}"

    def dead_letter(self, message_id: str) -> str:
        """The path of the dead letter with this id; percent-encoded."""
        return f"{self.path}/dead/{_quoted(message_id)}"

    @staticmethod
    def dead_id(node: str) -> str:
        """The message id of the dead letter in this node."""
        return unquote(node)


def due_ms_of(name: str) -> int:
    """When a delayed item is due, in milliseconds since the epoch. ValueError: it is no such name."""
    return int(name.split("|")[1], 16)


def served_in_order(names: list[str]) -> list[str]:
    """The names of served items, in the order in which they are to be served."""
    if not any("-" in name[15:] for name in names):
        return sorted(names)
    # The counter of the folder rolls over after 2³¹ changes: within a priority, later is still later.
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

    :param environment: ``online`` or ``sandbox``.
    """

    environment: str

    @property
    def path(self) -> str:
        """The folder of everything below."""
        return f"{ROOT}/{self.environment}/broker"

    @property
    def queues(self) -> str:
        """A folder for each queue."""
        return f"{self.path}/queues"

    def queue(self, name: str) -> QueueNodes:
        """The nodes of the queue called `name`."""
        return QueueNodes(f"{self.queues}/{_quoted(name)}")

    @property
    def transients(self) -> str:
        """The names of queues that go with their users."""
        return f"{self.path}/transient"

    def transient(self, queue: str) -> str:
        """Its children are ephemeral: who uses the queue. Without any for a while, it is removed."""
        return f"{self.transients}/{_quoted(queue)}"

    @staticmethod
    def queue_called(folder: str) -> str:
        """The name of the queue whose folder is called `folder`."""
        return unquote(folder)

    def bindings(self, exchange: str) -> str:
        """The bindings of an exchange, as names of nodes."""
        return f"{self.path}/bindings/{_quoted(exchange)}"

    def binding(self, exchange: str, queue: str, routing_key: str, owner: str) -> str:
        """A binding; `owner` is the GUID of the connection that it goes with, "" when it stays."""
        return f"{self.bindings(exchange)}/{_quoted(queue)}|{_quoted(routing_key)}|{owner}"


def binding_of(name: str) -> tuple[str, str, bool]:
    """Queue, routing key, and whether the queue is transient. ValueError: it is no such name."""
    queue, routing_key, owner = name.split("|")
    return unquote(queue), unquote(routing_key), bool(owner)


def _quoted(name: str) -> str:
    # ZooKeeper reserves names that are nothing but dots.
    return quote(name, safe="").replace(".", "%2E")
