"""The consumer threads of a process: one on one server, one for each master of a Redis Cluster.

On one server the *main* thread has everything. On a cluster it has what belongs to no single master:
singleton queues, whose order one thread keeps, broadcasts, and transient queues. Each other partition is with
the thread of the master that serves its slot: its lease, its acks, and its claims. So a master that hangs
blocks its own thread only.

When a slot gets another master, the thread that had its partitions hands them over, between two trips. Until
then the cluster's redirections bring its calls to their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from celery_dq.native import unpatched
from celery_dq.transport.in_flight import InFlightMessage
from celery_dq.transport.redis.consuming.consumer_thread import (
    EXIT_TIMEOUT_S,
    ConsumerThread,
    answer_timeout_of,
)
from celery_dq.transport.redis.store.partition import Queue
from celery_dq.transport.redis.store.slot_map import NodeAddress

if TYPE_CHECKING:
    import redis

    from celery_dq.transport.redis.consumer_identity import ConsumerIdentity


class ConsumerThreads:
    """The consumer threads of a process. All methods may be called from any thread.

    Args:
        identity: The process as a consumer.
    """

    def __init__(self, identity: ConsumerIdentity) -> None:
        self._identity = identity
        self._checks: list[Callable[[float], None]] = []
        self.main = ConsumerThread(identity, self._follow_slots, self._checks)
        self._of_masters: dict[NodeAddress, ConsumerThread] = {}
        #: Held while a lease begins, ends or moves. A thread takes the lock of its leases after this one.
        self._lock = unpatched("_thread", "allocate_lock")()
        #: Monotonic time until which the exit of the process waits for its threads.
        self._exit_at: float | None = None

    @property
    def all(self) -> tuple[ConsumerThread, ...]:
        """All threads, the main one first; some may not run."""
        return (self.main, *tuple(self._of_masters.values())) if self._of_masters else (self.main,)

    def of(self, queue: Queue) -> ConsumerThread:
        """Return the thread that is to have a queue."""
        slots = self._identity.slots
        if slots is None or queue.token:
            return self.main
        node = slots.node_of(queue.partition.keys.slot)
        if node is None:
            return self.main
        if node not in self._of_masters:
            for gone, thread in tuple(self._of_masters.items()):  # an address may change with each restart
                if gone not in slots.masters and not thread.is_running:
                    self._of_masters.pop(gone, None)
        # Atomic: of two new ones, both callers get the one that is kept.
        return self._of_masters.get(node) or self._of_masters.setdefault(
            node, ConsumerThread(self._identity, self._follow_slots, self._checks, node)
        )

    def _leaseholder(self, queue: Queue) -> ConsumerThread | None:
        """Return the thread that has the lease of a queue; None without a lease."""
        return next((thread for thread in self.all if queue.key in thread.queues), None)

    # -- leases --------------------------------------------------------------------

    @property
    def queues(self) -> dict[str, Queue]:
        """The queues with a lease, by :attr:`Queue.key`."""
        if not self._of_masters:
            return self.main.queues
        return {key: queue for thread in self.all for key, queue in tuple(thread.queues.items())}

    @property
    def answer_timeout_s(self) -> float:
        """Seconds to wait for an answer, so short that one dead connection does not cost the lease."""
        return answer_timeout_of(self._identity.lease_s)

    def keep_lease(self, queue: Queue, clients: Callable[[], Callable[[], redis.Redis]]) -> ConsumerThread:
        """Keep a lease on a partition from now on; :meth:`drop_lease` must be called as often.

        Args:
            queue: The queue that the caller begins to consume.
            clients: Returns a function that makes a client which outlives the caller's connection.

        Returns:
            The thread that keeps it.
        """
        with self._lock:
            wanted = self.of(queue)
            thread = self._leaseholder(queue) or wanted
            if thread is not wanted:
                thread.follow_slots_soon()
            thread.keep_lease(queue, clients)
            return thread

    def drop_lease(self, queue: Queue, soon: bool = True) -> None:
        """End the caller's use of a lease, which ends with the last message that is in flight.

        Args:
            queue: The queue that the caller has consumed.
            soon: End the lease now if possible; else with the next round, because the caller may consume
                again by then.
        """
        with self._lock:
            (self._leaseholder(queue) or self.main).drop_lease(queue, soon)

    def end_leases_soon(self) -> None:
        """End the leases that are not used any more."""
        for thread in self.all:
            thread.end_leases_soon()

    def renew_now(self) -> None:
        """Begin a round of renewals now."""
        for thread in self.all:
            thread.renew_now()

    def add_check(self, check: Callable[[float], None]) -> None:
        """Call *check* with the monotonic time after every round of renewals of a thread, in that thread."""
        self._checks.append(check)

    def remove_check(self, check: Callable[[float], None]) -> None:
        """Undo :meth:`add_check`."""
        if check in self._checks:
            self._checks.remove(check)

    def _follow_slots(self, thread: ConsumerThread) -> None:
        """Hand the leases over that another thread is to have. In the thread that has them."""
        for queue in tuple(thread.queues.values()):
            wanted = self.of(queue)
            if wanted is not thread:
                with self._lock:
                    if queue.key in thread.queues:
                        wanted.take_lease(queue, thread.leases.give(queue), thread.twin_clients)

    # -- turns -----------------------------------------------------------------------

    def wake(self) -> None:
        """Let each thread begin its next turn now; callable from signal handlers."""
        for thread in self.all:
            thread.wake()

    def request(self, action: Callable[[], object]) -> None:
        """Run an action in the main thread, between two trips."""
        self.main.request(action)

    def run_between_trips(self, action: Callable[[], None], timeout_s: float) -> bool:
        """Run an action in the main thread, and wait for its end; return whether it came in time."""
        return self.main.run_between_trips(action, timeout_s)

    def flush(self, timeout_s: float, held: InFlightMessage | None = None) -> bool:
        """Wait until the broker has confirmed the acks that are pending now.

        Args:
            timeout_s: Seconds to wait at most.
            held: The message whose ack is waited for; None for all.

        Returns:
            Whether the broker has confirmed them.
        """
        in_flight, clock = self._identity.in_flight, self._identity.clock
        deadline = clock.monotonic() + timeout_s
        waiting = in_flight.pending_messages(held)
        while True:
            with self._lock:  # a lease that another thread takes is in neither for a moment
                threads = [thread for thread in self.all if thread.has_acks(held)]
            if not threads:
                return not waiting
            left_s = deadline - clock.monotonic()
            if not self.wait_for_all([thread.begin_flush(held) for thread in threads], left_s):
                return False
            if not waiting:
                return True
            # The thread that has taken a lease meanwhile may have these acks under way.
            waiting &= in_flight.pending_messages(held)

    def has_acks_under_way(self, key: str) -> bool:
        """Return whether a trip has acks of the queue with this key; callable from any thread."""
        return any(key in thread.acks_under_way for thread in self.all)

    def wait_for_all(self, waits: Sequence[Callable[[float], bool]], timeout_s: float) -> bool:
        """Wait for what has begun in several threads, so that masters that hang are waited for together.

        Args:
            waits: Each waits for so many seconds at most, and returns whether that was enough.
            timeout_s: Seconds to wait at most, for all together.
        """
        clock = self._identity.clock
        deadline = clock.monotonic() + timeout_s
        return all([wait(max(deadline - clock.monotonic(), 0.0)) for wait in waits])  # noqa: C419 - each waits

    def begin_exit(self) -> float:
        """Let all threads end, at interpreter exit; return the seconds left to wait for them together."""
        now = self._identity.clock.monotonic()
        if self._exit_at is None:
            self._exit_at = now + EXIT_TIMEOUT_S
            for thread in self.all:
                thread.exit_soon()
        return max(self._exit_at - now, 0.0)

    def new_client(self) -> redis.Redis:
        """Return the client of the main thread."""
        return self.main.new_client()
