"""The prefetch count of a channel."""

from __future__ import annotations

from typing import Any

from celery_dq.transport.bases import VirtualQoS

__all__ = ["PrefetchCount"]


class PrefetchCount(VirtualQoS):
    """The prefetch count of one channel, and the messages that count against it.

    Unlike kombu's ``QoS``, this class does not track acknowledgements, which may come from any thread.
    """

    def can_consume(self) -> bool:
        """Return whether the prefetch count allows one more message."""
        limit = self.prefetch_count
        return not limit or len(self._delivered) < limit

    def can_consume_max_estimate(self) -> int | None:
        """Return how many more messages the prefetch count allows; None without a limit."""
        limit: int = self.prefetch_count
        return max(limit - len(self._delivered), 0) if limit else None

    def append(self, message: Any, delivery_tag: str) -> None:
        """Count a delivered message."""
        self._delivered[delivery_tag] = message
