"""Takes wake-ups for a channel, and hands those over to other consumers that it cannot follow.

Other consumers rely on the consumer that took the wake-up of a queue, or keeps its next look. Without a free
slot, before a long callback, and when it stops to consume, it hands them over by a script.
"""

from __future__ import annotations

from celery_dq.transport.redis.consuming.subscriptions import ReadyQueues, Subscription
from celery_dq.transport.redis.consuming.wakeups import WakeupGroups, WakeupListener
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.in_flight.script_pipeline import ScriptPipeline
from celery_dq.transport.redis.store.queue import Queue


class Handovers:
    """The wake-ups of one channel.

    Args:
        process: Consumer identity of the process.
        ready: The consumed queues with their states.
        pipeline: Sends the scripts.
        wakeups: The waits for wake-ups.
    """

    def __init__(
        self,
        process: ConsumerIdentity,
        ready: ReadyQueues,
        pipeline: ScriptPipeline,
        wakeups: WakeupGroups,
    ) -> None:
        self._process = process
        self._ready = ready
        self._pipeline = pipeline
        self._wakeups = wakeups
        #: Queues whose wake-up must be handed over, with the number of handovers.
        self.queued: list[tuple[Queue, int]] = []

    # -- taking ----------------------------------------------------------------

    def read(self, group: WakeupListener) -> list[Subscription]:
        """Read the answer of a wait, and return the queues whose wake-up this process has taken."""
        for source in (sources := group.read_wakeups()):
            self._ready.rely_on(source)
        return sources

    def restart_wait(self, group: WakeupListener) -> bool:
        """Cancel the wait of a group, because its queues have changed or the loop is about to block.

        Returns:
            Whether a ``BLPOP`` was under way.
        """
        if waited := group.cancel_wait():
            # A wake-up may have been lost with the connection.
            for source in group.members.values():
                self._ready.rely_on(source)
        return waited

    # -- handing over ----------------------------------------------------------

    def hand_over(self, source: Subscription, now: float, times: int = 1) -> None:
        """Hand the wake-up and the next look over to another consumer, for lack of a free slot."""
        if not source.queue.token:  # a singleton queue has no other consumer
            self._ready.handed_over(source)
            self._pipeline.hand_over_wakeup(source.queue, now, times)

    def add(self, source: Subscription, times: int = 1) -> None:
        """Let :meth:`send` hand a wake-up over, in the place where a broken connection is handled."""
        if not source.queue.token and self._pipeline.connections():
            self.queued.append((source.queue, times))

    def send(self, now: float) -> None:
        """Send the handovers of the queues that this channel no longer consumes."""
        while self.queued:
            queue, times = self.queued.pop()
            self._pipeline.hand_over_wakeup(queue, now, times)

    def send_before_blocking(self) -> None:
        """Hand all wake-ups and next looks over, because a callback may block the loop for long.

        Raises:
            redis.RedisError: The connection broke.
        """
        now = self._process.clock.monotonic()
        for group in self._wakeups:
            if group.is_waiting and group.is_asking:
                while group.is_waiting:
                    self.read(group)  # the answer comes at once
            elif self.restart_wait(group):
                for source in group.members.values():
                    self.hand_over(source, now, 2)
        for source in self._ready.awaited():
            self.hand_over(source, now)
        if self._pipeline.hands_over_wakeup():
            # The loop stops. A second handover waits for an answer, and one whose script Redis does not know.
            self._pipeline.read_all_answers()

    def close(self) -> None:
        """Forget the handovers that were not sent."""
        self.queued.clear()
