"""Nodes that clients without credentials may change, because they are older than the credentials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kazoo.exceptions import NoNodeError

from celery_dq.errors import ConfigurationError
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import ask_all, failure_of

__all__ = ["close_nodes", "open_nodes"]

#: Nodes that are asked for at once.
CHUNK = 500


def open_nodes(session: Session, path: str, timeout_s: float, *, most: int | None = None) -> Iterator[str]:
    """Yield the nodes at `path` and below that give every client more rights than a new node would.

    Args:
        session: The session that reads, with the credentials of the nodes' owner.
        path: The topmost node.
        timeout_s: Seconds to wait for each answer.
        most: Maximum number of nodes to look at, the topmost first; default all.

    Raises:
        ZooKeeperUnreachable: ZooKeeper did not answer.
    """
    granted = _rights_of_all(session.open(timeout_s).default_acl or ())
    waiting, seen = [path], 0
    while waiting and (most is None or seen < most):
        chunk, waiting = waiting[:CHUNK], waiting[CHUNK:]
        seen += len(chunk)
        acls = _asked(session, "get_acls_async", chunk, timeout_s)
        for each, answer in zip(chunk, acls, strict=True):
            # A node that denies this session, or is gone, is not open.
            if not isinstance(answer, Exception) and _rights_of_all(answer[0]) & ~granted:
                yield each
        folders = _asked(session, "get_children_async", chunk, timeout_s)
        for each, answer in zip(chunk, folders, strict=True):
            if not isinstance(answer, Exception):
                waiting += [f"{each.rstrip('/')}/{name}" for name in answer]


def close_nodes(session: Session, path: str, timeout_s: float) -> int:
    """Give the open nodes at `path` and below the ACL of new nodes; return how many there were.

    Raises:
        ZooKeeperUnreachable: ZooKeeper did not answer; some nodes may have been closed.
        ConfigurationError: The session has no credentials.
        AccessDenied: The session may not change the ACL of a node.
    """
    acl = session.open(timeout_s).default_acl
    if not acl:
        raise ConfigurationError(
            f"ZooKeeper at {session.hosts}: no credentials are set for it, so its nodes are open: set them "
            "in broker_url or dq_election_options, restart all programs, and then close the nodes"
        )
    paths = list(open_nodes(session, path, timeout_s))
    closed = 0
    for start in range(0, len(paths), CHUNK):
        chunk = paths[start : start + CHUNK]
        answers = _asked(session, "set_acls_async", chunk, timeout_s, acl)
        for each, answer in zip(chunk, answers, strict=True):
            if isinstance(answer, Exception) and not isinstance(answer, NoNodeError):
                raise failure_of("close", each, answer)
            closed += not isinstance(answer, NoNodeError)
    return closed


def _asked(session: Session, method: str, paths: list[str], timeout_s: float, *arguments: Any) -> list[Any]:
    return ask_all(
        session, lambda client: [getattr(client, method)(each, *arguments) for each in paths], timeout_s
    )


def _rights_of_all(acl: Any) -> int:
    """Return the rights of clients without credentials, as a set of bits."""
    rights = 0
    for each in acl:
        if (each.id.scheme, each.id.id) == ("world", "anyone"):
            rights |= each.perms
    return rights
