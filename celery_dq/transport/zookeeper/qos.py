"""The prefetch count and the acknowledgements of a channel."""

from __future__ import annotations

from typing import Any, Protocol

from celery_dq.per_process import OwnerProcess
from celery_dq.transport.in_flight.message import PrefetchCount
from celery_dq.transport.zookeeper.in_flight import ItemOutcome, ZooKeeperInFlight


class AckingChannel(Protocol):
    """The channel whose deliveries a ``QoS`` counts and acknowledges."""

    @property
    def in_flight(self) -> ZooKeeperInFlight:
        """The in-flight messages of the connection."""

    @property
    def do_restore(self) -> bool:
        """Whether messages are requeued when the channel ends."""


class QoS(PrefetchCount):
    """Prefetch count and acknowledgements of one channel.

    Acknowledgements may come from any thread. They are queued with the in-flight messages of the connection,
    and the fetcher's thread sends them to the broker.
    """

    channel: AckingChannel

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._owner = OwnerProcess()

    def ack(self, delivery_tag: str) -> None:
        """Delete the message from its queue."""
        self._delivered.pop(delivery_tag, None)
        self.channel.in_flight.add_outcome(ItemOutcome.ACK, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Requeue the message at its place, or delete it."""
        if requeue:
            message = self._delivered.get(delivery_tag)
            crashed = getattr(message, "crashed", False)
            self._return(ItemOutcome.CRASHED if crashed else ItemOutcome.REQUEUE, delivery_tag)
        else:
            self.ack(delivery_tag)

    def _return(self, verb: ItemOutcome, delivery_tag: str) -> None:
        in_flight = self.channel.in_flight
        # Queued before it makes room: the fetcher must not take a later message in between.
        in_flight.add_outcome(verb, delivery_tag)
        self._delivered.pop(delivery_tag, None)
        in_flight.wake()

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Requeue every message that was delivered and not acknowledged."""
        for tag in list(self._delivered):
            self._return(ItemOutcome.REQUEUE, tag)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Like :meth:`restore_unacked`, at channel close or interpreter exit, once."""
        self._on_collect.cancel()
        if self._delivered.restored or not self._owner.is_current:
            # A forked child has inherited this object: the in-flight messages belong to the parent.
            return
        self._delivered.restored = True
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()
