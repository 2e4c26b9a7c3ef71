"""Every path that celery-dq keeps in ZooKeeper is spelled here, and nowhere else.

Paths are relative to the chroot of the host list (``host:2181/shop``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from urllib.parse import quote

from celery_dq.errors import ConfigurationError

__all__ = ["JOURNALS", "PRESENCES", "LeadershipNodes", "sequence_of", "serial_distance", "serial_order"]

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
        # ZooKeeper reserves names that are nothing but dots.
        name = quote(self.name, safe="").replace(".", "%2E")
        return f"{ROOT}/{self.environment}/leaders/{name}"

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
