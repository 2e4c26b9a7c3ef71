"""Every path that celery-dq keeps in ZooKeeper is spelled here, and nowhere else.

Paths are relative to the chroot of the host list (``host:2181/shop``).
"""

from __future__ import annotations

import dataclasses
from urllib.parse import quote

from celery_dq.errors import ConfigurationError

__all__ = ["LeadershipNodes", "beat_entry", "sequence_of", "serial_order"]

ROOT = "/dq"
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


def beat_entry(environment: str, entry: str) -> str:
    """What elected beats share about one entry of their schedule; percent-encoded in the path."""
    return f"{ROOT}/{environment}/beat/{quote(entry, safe='').replace('.', '%2E')}"


def sequence_of(node: str) -> int:
    """The sequence behind a candidate's GUID; it turns negative after 2³¹ children."""
    return int(node.split("-", 2)[2])


def serial_order(nodes: list[str]) -> list[str]:
    """`nodes` by age. Sequences are compared serially: the counter rolls over, and later is still later.

    :param nodes: names that end in a sequence; no two of them are 2³¹ births apart.
    """
    if not nodes:
        return []
    first = sequence_of(nodes[0])

    def distance(node: str) -> int:
        away = (sequence_of(node) - first) % SEQUENCE_SPAN
        return away - SEQUENCE_SPAN if away >= SEQUENCE_SPAN // 2 else away

    return sorted(nodes, key=distance)
