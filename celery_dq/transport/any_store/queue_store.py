"""The protocol of a store of queues."""

from __future__ import annotations

from typing import Protocol, TypeVar

from celery_dq.transport.partition_store import PartitionStore
from celery_dq.transport.threaded_channel import BindingTable, QueueDirectory

__all__ = ["QueueStore", "StoreClient"]


class StoreClient(Protocol):
    """A connection to a store, for one thread at a time."""

    def close(self) -> None:
        """Close the connection."""


Client = TypeVar("Client", bound=StoreClient)


class QueueStore(Protocol[Client]):
    """A store of queues, as one process uses it. It opens nothing before :meth:`connect`."""

    @property
    def look_every_s(self) -> float:
        """Seconds between two looks of an idle consumer at :meth:`version`."""

    def connect(self) -> Client:
        """Open a connection. The fetcher has one, and each other user of the transport."""

    def version(self, client: Client) -> object:
        """Return a value that differs when another connection has changed the store since the last look."""

    def partition(self, queue: str) -> PartitionStore[Client]:
        """Return the calls on a queue."""

    def queues(self, client: Client) -> QueueDirectory:
        """Return the queues of the store, for the user of this client."""

    def bindings(self, client: Client) -> BindingTable:
        """Return the bindings of the store, for the user of this client."""
