"""A request that kazoo has not: reading many nodes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kazoo.exceptions import NoNodeError
from kazoo.protocol.paths import _prefix_root
from kazoo.protocol.serialization import GetData, MultiHeader, int_struct, multiheader_struct

__all__ = ["read_each", "read_many"]

#: Bytes of a node's stat, in ZooKeeper's own format.
STAT_SIZE = 68


@dataclass(frozen=True)
class MultiRead:
    """Read many nodes in one request; ZooKeeper has it since 3.6."""

    paths: Sequence[str]

    #: kazoo asks for the type of a request.
    type: ClassVar[int] = 22

    def serialize(self) -> bytearray:
        """The request as kazoo sends it."""
        packed = bytearray()
        for path in self.paths:
            read = GetData(path, None)
            packed.extend(MultiHeader(read.type, False, -1).serialize() + read.serialize())
        packed.extend(multiheader_struct.pack(-1, True, -1))
        return packed

    @classmethod
    def deserialize(cls, received: bytes, offset: int) -> list[tuple[bytes, Any] | None]:
        """For every path its data and stat; None where there is no such node."""
        read: list[tuple[bytes, Any] | None] = []
        header, offset = MultiHeader.deserialize(received, offset)
        while not header.done:
            if header.type == GetData.type:
                data, stat = GetData.deserialize(received, offset)
                offset += int_struct.size + len(data or b"") + STAT_SIZE
                read.append((data or b"", stat))
            else:
                offset += int_struct.size
                read.append(None)
            header, offset = MultiHeader.deserialize(received, offset)
        return read


def read_many(client: Any, paths: Sequence[str]) -> Any:
    """Ask for many nodes at once; kazoo's asynchronous result of :meth:`MultiRead.deserialize`.

    Raises:
        kazoo.exceptions.UnimplementedError: The server is older than 3.6; from the result's ``get``.
    """
    answer = client.handler.async_result()
    client._call(MultiRead([_prefix_root(client.chroot, path) for path in paths]), answer)
    return answer


def read_each(client: Any, paths: Sequence[str], timeout_s: float) -> list[tuple[bytes, Any] | None]:
    """The same, one by one, for servers older than 3.6."""
    answers = [client.get_async(path) for path in paths]
    read: list[tuple[bytes, Any] | None] = []
    for answer in answers:
        try:
            read.append(answer.get(timeout=timeout_s))
        except NoNodeError:  # noqa: PERF203 - each has an answer of its own
            read.append(None)
    return read
