"""Deleting a whole chroot at once while processes use it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import TransactionRefused, delete, transact


def delete_chroot(server: ZooKeeperServer, hosts: str) -> None:
    """Delete the chroot of a host list in one transaction.

    Without a transaction, a process that uses the chroot would create parts of it again.
    """

    def is_deleted() -> bool:
        try:
            transact(session, [delete(path) for path in subtree(client, "/" + hosts.partition("/")[2])], 30)
        except TransactionRefused:
            return False
        return True

    session = Session(server.hosts, timeout_s=30)
    client = session.open()
    with closing(session):
        wait_until(is_deleted)


def subtree(client: Any, path: str) -> list[str]:
    """Return the paths of a node and all its descendants, children first."""
    below = [each for name in client.get_children(path) for each in subtree(client, f"{path}/{name}")]
    return [*below, path]
