"""One worker as a member: it registers, and serves the partitions of the published assignment.

One thread talks to ZooKeeper. The transport reads :meth:`Follower.served` from its own threads, and changes
its consumers when :attr:`Follower.version` has changed.

* A new assignment takes effect in two steps: partitions that go are released at once, and partitions that
  come are served :data:`GAIN_DELAY_S` later, when their former workers have released them. Claims are atomic,
  so two workers may serve one partition for a moment.
* Without an answer of ZooKeeper, the last assignment stays. A worker that has read no assignment since its
  start serves all of its partitions after one session. A queue that got more partitions keeps its first one
  until a generation assigns them.
* A worker whose broker does not answer withdraws: it removes its node, so that other workers get its
  partitions. It registers again after the next answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from celery_dq.allocation.assignment import RunningWorker
from celery_dq.allocation.nodes import Generation, PublishedAssignment, Registration
from celery_dq.clock import Clock, SystemClock
from celery_dq.daemon_threads import start_daemon
from celery_dq.errors import DQError
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger
from celery_dq.znodes import AllocationNodes
from celery_dq.zookeeper.session import Session

__all__ = ["GAIN_DELAY_S", "Follower"]

logger = shown_logger(__name__)

#: Seconds from the release of the partitions that go to the first claim from those that come.
GAIN_DELAY_S = 0.25
#: Looks per session at the worker's own state, without a request.
LOOKS = 6
#: Seconds after which the generation is read again although no watch has fired.
READ_EVERY_S = 30.0


class Follower:
    """The partitions that one worker serves; see ``PartitionAllocation`` in ``celery_dq.protocols``.

    Args:
        session: The session of the worker.
        nodes: The nodes of the allocation.
        worker: Name of the worker.
        is_allocated: Returns whether the worker consumes the queue with this number of partitions, and its
            partitions are allocated.
        silence_s: Seconds without an answer of the broker after which the worker withdraws.
        clock: Wall and monotonic time.
    """

    def __init__(
        self,
        session: Session,
        nodes: AllocationNodes,
        worker: str,
        *,
        is_allocated: Callable[[str, int], bool],
        silence_s: float,
        clock: Clock | None = None,
    ) -> None:
        self.worker = worker
        self._session = session
        self._nodes = nodes
        self._published = PublishedAssignment(session, nodes)
        self._is_allocated = is_allocated
        self._silence_s = silence_s
        self._clock: Clock = clock or SystemClock()
        self._outage = Outage(logger, "allocation_outage", self._clock)
        self._listeners: list[Callable[[], None]] = []
        self._counts: dict[str, int] = {}
        #: What the worker served of a queue before its partitions were allocated.
        self._before: dict[str, frozenset[int]] = {}
        #: What the worker serves of each queue that a generation has assigned; None before the first one.
        self._served: dict[str, frozenset[int]] | None = None
        self._version = 0
        self._wake = threading.Event()
        self._registration = Registration(session, nodes, worker, self._wake.set)
        self._flipped = True
        self._thread: threading.Thread | None = None
        self._closing = False
        #: The assignment whose new partitions are served from a monotonic time on.
        self._coming: tuple[float, dict[str, frozenset[int]]] | None = None
        self._answered_at = self._read_at = self._clock.monotonic()
        #: Since when the worker consumes an allocated queue; None before.
        self._started_at: float | None = None
        self._serves_all = False
        self._withdrawn = False
        #: Whether the worker gives its partitions away.
        self.draining = False
        #: The generation that the worker follows; None before the first one.
        self.generation: Generation | None = None

    # -- for the transport and the worker

    @property
    def version(self) -> int:
        """A number that changes with the answers of :meth:`served`."""
        return self._version

    def consumes(self, queue: str, count: int) -> None:
        """Note the number of partitions of a queue, as the broker has it."""
        self._answered_at = self._clock.monotonic()
        if self._started_at is None and self._is_allocated(queue, count):
            self._started_at = self._answered_at
        former = self._counts.get(queue)
        if former != count:
            if former is not None and not self._is_allocated(queue, former):
                self._before = {**self._before, queue: frozenset(range(former))}
                self._flipped = True
            self._counts = {**self._counts, queue: count}
        self._wake.set()

    def served(self, queue: str) -> frozenset[int] | None:
        """Return the numbers of the partitions to serve; None means all of them."""
        if self._serves_all or not self._is_allocated(queue, self._counts.get(queue, 1)):
            return None
        return self._known().get(queue, frozenset())

    def broker_answered(self) -> None:
        """Note that the broker has answered a heartbeat."""
        self._answered_at = self._clock.monotonic()
        if self._withdrawn:
            self._wake.set()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in the thread of this object, when :attr:`version` has changed."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Undo :meth:`add_listener`."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def drain(self) -> None:
        """Give all partitions away, until the worker ends."""
        self.draining = True
        self._wake.set()
        logger.info(
            "Worker %s drains: other workers get its partitions; it continues to serve those that no other "
            "worker consumes.",
            self.worker,
            extra={"event": "allocation_draining"},
        )

    def running(self, timeout_s: float) -> set[str]:
        """Return the names of the workers that share partitions.

        Args:
            timeout_s: Seconds to wait for a connection, and then for the answer.

        Raises:
            ZooKeeperUnreachable: No answer came.
        """
        return set(map(self._nodes.worker_of, self._session.children(self._nodes.running, timeout_s)))

    def report(self) -> dict[str, Any]:
        """Return what the worker serves, for remote control."""
        served = {queue: sorted(numbers) for queue, numbers in (self._served or {}).items() if numbers}
        return {
            "generation": self.generation.number if self.generation else 0,
            "draining": self.draining,
            "all": self._serves_all,
            "partitions": served,
        }

    # -- life

    def open(self) -> None:
        """Start to take part. Idempotent."""
        if self._thread is None:
            self._closing = False
            self._session.add_listener(self._look_soon)
            self._thread = start_daemon(self._run, "dq-allocation")

    def close(self, timeout_s: float) -> None:
        """Leave: other workers get the partitions at once.

        Args:
            timeout_s: Maximum seconds to wait.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing = True
            self._session.remove_listener(self._look_soon)
            self._wake.set()
            thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._take_part()
            except (OSError, DQError) as error:
                self._outage.began(
                    "Worker %s cannot follow the allocation (%s); it serves what it served before, and tries "
                    "again.",
                    self.worker,
                    error,
                )
            except Exception:
                logger.exception(
                    "Worker %s cannot follow the allocation after an error; it serves what it served before, "
                    "and tries again.",
                    self.worker,
                    extra={"event": "allocation_failed"},
                )
            self._apply_coming()
            self._serve_all_without_assignment()
            self._wake.wait(self._wait_s())
            self._wake.clear()
        try:
            self._registration.remove()
        except (OSError, DQError) as error:
            logger.warning(
                "Worker %s could not leave the allocation (%s); its partitions go to other workers when its "
                "session ends, in %g s.",
                self.worker,
                error,
                self._session.timeout_s,
                extra={"event": "allocation_not_left"},
            )

    def _wait_s(self) -> float:
        wait_s = self._session.timeout_s / LOOKS
        if self._coming is not None:
            wait_s = min(wait_s, max(self._coming[0] - self._clock.monotonic(), 0.0))
        return wait_s

    def _look_soon(self, _event: Any) -> None:
        """Read the generation again: the connection has changed, or the generation has."""
        self._flipped = True
        self._wake.set()

    def _known(self) -> dict[str, frozenset[int]]:
        """Return the partitions of each allocated queue that the worker serves, assigned or kept."""
        return {**self._before, **(self._served or {})}

    # -- the thread

    def _take_part(self) -> None:
        now = self._clock.monotonic()
        if self._is_silent(now):
            self._withdraw()
            return
        self._withdrawn = False
        queues = {queue: count for queue, count in self._counts.items() if self._is_allocated(queue, count)}
        if not (queues or self._registration.may_exist):
            return
        self._registration.write(RunningWorker(self.worker, queues, self.draining))
        if self._flipped or now - self._read_at > READ_EVERY_S:
            # A flip during the reading is read next.
            self._flipped = False
            try:
                self._read()
            except BaseException:
                self._flipped = True
                raise
            self._read_at = now
        self._outage.over("Worker %s follows the allocation again.", self.worker)

    def _is_silent(self, now: float) -> bool:
        """Whether the broker has not answered for so long that other workers had better serve."""
        # Without a partition there is no heartbeat. A worker that has withdrawn waits for an answer.
        serves = self._withdrawn or self._serves_all or any((self._served or {}).values())
        return serves and now - self._answered_at > self._silence_s

    def _withdraw(self) -> None:
        if not self._withdrawn:
            logger.warning(
                "Worker %s gives its partitions away, because the broker has not answered it for %g s. It "
                "returns when the broker answers.",
                self.worker,
                self._silence_s,
                extra={"event": "allocation_withdrawn"},
            )
            self._withdrawn = True
        if self._registration.may_exist:
            self._registration.remove()
        self._flipped = True

    def _read(self) -> None:
        generation = self._published.generation(self._look_soon)
        served = self._served or {}
        waiting = self._before.keys() - served.keys()
        if generation is None or (generation == self.generation and not waiting):
            return
        lists = self._published.served_by(self.worker, generation.number)
        assigned = self._before.keys() & served.keys()
        if waiting - lists.keys():
            # The generation is older than the partitions of these queues, or gives them to other workers.
            assigned |= waiting & {queue for queue, _ in self._published.read(generation.number).servers}
        self.generation = generation
        nothing = dict.fromkeys(assigned, frozenset[int]())
        self._follow({**nothing, **{queue: frozenset(numbers) for queue, numbers in lists.items()}})

    def _follow(self, target: Mapping[str, frozenset[int]]) -> None:
        """Release what goes, and plan what comes."""
        assert self.generation is not None
        former = self._known()
        kept = {queue: former.get(queue, frozenset()) & numbers for queue, numbers in target.items()}
        gained = _size(target) - _size(kept)
        self._coming = (self._clock.monotonic() + GAIN_DELAY_S, dict(target)) if gained else None
        self._serves_all = False
        self._serve(kept)
        released = _size(former) - _size(self._known())
        logger.log(
            logging.INFO if released or gained else logging.DEBUG,
            "Worker %s serves %d partitions from generation %d of the allocation on: %d come, %d go.",
            self.worker,
            _size(target),
            self.generation.number,
            gained,
            released,
            extra={"event": "allocation_changed", "generation": self.generation.number},
        )

    def _apply_coming(self) -> None:
        if self._coming is not None and self._coming[0] <= self._clock.monotonic():
            target, self._coming = self._coming[1], None
            self._expect_heartbeats()
            self._serve(target)

    def _serve_all_without_assignment(self) -> None:
        if self._served is not None or self._serves_all or self._started_at is None:
            return
        waited_s = self._clock.monotonic() - self._started_at
        if waited_s > self._session.timeout_s:
            logger.warning(
                "Worker %s serves all of its partitions, because it has found no assignment for %g s: is "
                "ZooKeeper at dq_election reachable?",
                self.worker,
                waited_s,
                extra={"event": "allocation_missing"},
            )
            self._serves_all = True
            self._expect_heartbeats()
            self._changed()

    def _expect_heartbeats(self) -> None:
        """Count a silence of the broker from now on: the first heartbeat comes after the first claim."""
        self._answered_at = max(self._answered_at, self._clock.monotonic())

    def _serve(self, served: dict[str, frozenset[int]]) -> None:
        if self._served != served:
            self._served = served
            self._changed()

    def _changed(self) -> None:
        self._version += 1
        for listener in tuple(self._listeners):
            listener()


def _size(served: Mapping[str, frozenset[int]]) -> int:
    return sum(map(len, served.values()))
