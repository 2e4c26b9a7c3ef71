"""Reading many nodes in few requests.

ZooKeeper has a request for this since 3.6, which kazoo does not implement. One request per node would cost
ten times the client's processor time. An older server refuses the request; then each node is read by its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kazoo.exceptions import EXCEPTIONS, KazooException, NoNodeError, UnimplementedError
from kazoo.protocol.serialization import GetData, MultiHeader, int_struct, multiheader_struct

from celery_dq.compat.kazoo_connection import path_of, send_request
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import ask_all

__all__ = ["begin_reading", "read_all", "readings"]

#: Maximum number of nodes in one request; the answer holds the data of all of them.
TOGETHER = 25
ERROR = -1
#: Bytes of a stat.
STAT_SIZE = 68


class MultiRead:
    """The request in the form that kazoo's connection sends."""

    type = 22

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def serialize(self) -> bytearray:
        """Return the request in bytes."""
        request = bytearray()
        for path in self.paths:
            request += MultiHeader(GetData.type, False, -1).serialize() + GetData(path, None).serialize()
        request += multiheader_struct.pack(-1, True, -1)
        return request

    @classmethod
    def deserialize(cls, answer: bytes, offset: int) -> list[Any]:
        """Parse the answer: for each path its data and stat, or an exception."""
        found: list[Any] = []
        header, offset = MultiHeader.deserialize(answer, offset)
        while not header.done:
            if header.type == ERROR:
                (code,) = int_struct.unpack_from(answer, offset)
                offset += int_struct.size
                found.append(EXCEPTIONS[code]())
            else:
                data, stat = GetData.deserialize(answer, offset)
                # Skip the length, the data and the stat.
                offset += int_struct.size + len(data or b"") + STAT_SIZE
                found.append((data or b"", stat))
            header, offset = MultiHeader.deserialize(answer, offset)
        return found


def begin_reading(client: Any, paths: Sequence[str]) -> list[Any]:
    """Send the requests for the nodes; their results are for :func:`readings`."""
    results = []
    for at in range(0, len(paths), TOGETHER):
        result = client.handler.async_result()
        send_request(client, MultiRead([path_of(client, path) for path in paths[at : at + TOGETHER]]), result)
        results.append(result)
    return results


def readings(session: Session, paths: Sequence[str], answers: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return for each path its data and stat, or its exception, from the answers to :func:`begin_reading`."""
    if any(isinstance(answer, UnimplementedError) for answer in answers):
        return ask_all(
            session,
            lambda client: [client.get_async(path) for path in paths],
            timeout_s,
        )
    found: list[Any] = []
    for at, answer in enumerate(answers):
        if isinstance(answer, KazooException):
            found += [answer] * len(paths[at * TOGETHER : (at + 1) * TOGETHER])
        else:
            found += answer
    return found


def existing(names: Iterable[str], answers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names of nodes with the answers, without nodes that do not exist; raise any other error."""
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, Exception) and not isinstance(answer, NoNodeError):
            raise answer
        if not isinstance(answer, Exception):
            yield name, answer


def read_all(session: Session, paths: Sequence[str], timeout_s: float) -> list[Any]:
    """Read nodes; return for each path its data and stat, or the exception that refused it.

    Raises:
        ZooKeeperUnreachable: ZooKeeper did not answer within `timeout_s` seconds.
    """
    answers = ask_all(session, lambda client: begin_reading(client, paths), timeout_s)
    return readings(session, paths, answers, timeout_s)
