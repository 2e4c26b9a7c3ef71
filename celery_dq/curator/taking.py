"""Taking nodes from a queue: free nodes, in order, each by one consumer."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence

from celery_dq.clock import Clock
from celery_dq.curator.item_ownership import ItemOwnership, Node
from celery_dq.curator.listing import Listing
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.shown import shown_logger
from celery_dq.zookeeper.item_locks import FinishOutcome
from celery_dq.zookeeper.session import Session, SessionState

__all__ = ["ItemTaker"]

logger = shown_logger(__name__)

#: Share of requested nodes that are gone or held by others, above which the names are read again.
MISSES = 0.5
#: Seconds between two attempts while ZooKeeper does not answer.
RETRY_S = 0.5
#: Maximum seconds of one wait for new nodes.
LONGEST_WAIT_S = 60.0


class ItemTaker:
    """Takes nodes for one consumer.

    Only one thread at a time may call :meth:`take` and :meth:`peek`; any thread may call the other methods.

    Args:
        session: The session that takes the nodes.
        feed: The listing of the queue's nodes.
        holding: How nodes are owned.
        wake: Set when a call of :meth:`take` may find nodes.
    """

    def __init__(
        self,
        session: Session,
        feed: Listing,
        holding: ItemOwnership,
        wake: threading.Event,
    ) -> None:
        self._session = session
        self._listing = feed
        self._ownership = holding
        self._wake_event = wake
        #: Names whose ownership has ended; appended by any thread.
        self._freed: deque[str] = deque()
        #: Names of consumed nodes; appended by any thread.
        self._settled: deque[str] = deque()
        #: Names whose request for ownership got no answer.
        self._in_doubt: list[str] = []
        self._reconnected = False

    def start(self) -> None:
        """Listen to the session."""
        self._session.add_listener(self._on_session_state)

    def stop(self) -> None:
        """Stop to listen to the session."""
        self._session.remove_listener(self._on_session_state)

    def take(self, count: int) -> list[Node]:
        """Take up to `count` nodes; return an empty list if no node is available now.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        self._catch_up()
        while names := self._listing.hand_out(count):
            if nodes := self._hold(names):
                return nodes
        return []

    def take_within(self, count: int, timeout_s: float | None, clock: Clock) -> list[Node]:
        """Take up to `count` nodes, and wait for at least one.

        Args:
            count: Maximum number of nodes.
            timeout_s: Maximum seconds to wait; None means without a limit.
            clock: Monotonic time for the deadline.

        Returns:
            The nodes; an empty list after the timeout.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer until the timeout.
        """
        deadline = math.inf if timeout_s is None else clock.monotonic() + timeout_s
        while True:
            self._wake_event.clear()
            pause: float | None
            try:
                if nodes := self.take(count):
                    return nodes
                pause = self.pause_s()
            except ZooKeeperUnreachable:
                if clock.monotonic() >= deadline:
                    raise
                pause = RETRY_S
            left = deadline - clock.monotonic()
            if left <= 0:
                return []
            self._wake_event.wait(min(LONGEST_WAIT_S if pause is None else pause, left))

    def peek(self) -> Node | None:
        """Return the first available node without taking it; None if there is none."""
        self._catch_up()
        passed: list[str] = []
        try:
            while names := self._listing.hand_out(1):
                passed += names
                node = self._ownership.read(names[0])
                if node is not None:
                    return node
        finally:
            self._listing.restore_names(passed)
        return None

    def pause_s(self) -> float | None:
        """Seconds after which :meth:`take` may find nodes without a wake-up; None means never."""
        if self._freed or self._in_doubt or self._reconnected:
            return 0.0
        return self._listing.pause_s()

    def settle(self, nodes: Sequence[Node], outcomes: Sequence[FinishOutcome]) -> None:
        """Record the outcomes of nodes that were finished or requeued."""
        for node, outcome in zip(nodes, outcomes, strict=True):
            if outcome is FinishOutcome.LOST:
                logger.warning(
                    "The session expired while node %s was consumed, and another consumer has locked it; its "
                    "items are consumed twice.",
                    node.name,
                    extra={"event": "curator_node_lost"},
                )
                self._freed.append(node.name)
            else:
                self._settled.append(node.name)
        self._wake_event.set()

    def release(self, nodes: Sequence[Node]) -> None:
        """Record nodes that were released."""
        self._freed.extend(node.name for node in nodes)
        self._wake_event.set()

    # -- inside

    def _hold(self, names: list[str]) -> list[Node]:
        self._listing.aside.update(names)
        try:
            grip = self._ownership.take(names)
            if grip.locked:
                free = self._ownership.watch(grip.locked, self._free)
                self._listing.restore_names(free)
        except BaseException:
            self._in_doubt += names
            raise
        missing = set(names).difference(grip.locked, grip.left, (node.name for node in grip.nodes))
        self._listing.aside.difference_update(missing)
        # A node owned by deletion is gone. Its name may appear again, in a folder that was created again.
        self._listing.aside.difference_update(node.name for node in grip.nodes if node.held is None)
        if len(missing) + len(grip.locked) > MISSES * len(names):
            self._listing.doubt()
        return grip.nodes

    def _catch_up(self) -> None:
        if self._reconnected:
            self._reconnected = False
            self._listing.forget()
        if self._in_doubt:
            self._ownership.drop(self._in_doubt)
            self._listing.restore_names(self._in_doubt)
            self._in_doubt = []
        while self._settled:
            self._listing.aside.discard(self._settled.popleft())
        if self._freed:
            freed = []
            while self._freed:
                freed.append(self._freed.popleft())
            try:
                present = self._ownership.present(freed)
            except BaseException:
                self._freed.extend(freed)
                raise
            for name in freed:
                self._listing.aside.discard(name)
            self._listing.restore_names(present)

    def _free(self, name: str) -> None:
        self._freed.append(name)
        self._wake_event.set()

    def _on_session_state(self, state: SessionState) -> None:
        # A broken connection has ended the watches.
        if state is SessionState.CONNECTED:
            self._reconnected = True
        self._wake_event.set()
