"""Taking nodes out of a queue: what is free, in order, once."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence

from celery_dq.clock import Clock
from celery_dq.curator.feed import Feed
from celery_dq.curator.holding import Holding, Node
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.zookeeper.custody import Outcome
from celery_dq.zookeeper.session import Session, State

__all__ = ["Intake"]

logger = logging.getLogger(__name__)

#: Where more of what was asked for is gone or held by others, the names are read again.
MISSES = 0.5
#: Seconds between two tries while ZooKeeper does not answer.
RETRY_S = 0.5
#: Seconds that nobody waits longer for the bell.
LONGEST_WAIT_S = 60.0


class Intake:
    """Feeds one consumer. :meth:`take` belongs to one thread; the others may be called by any.

    :param bell: set when it is worth calling :meth:`take` again.
    """

    def __init__(
        self,
        session: Session,
        feed: Feed,
        holding: Holding,
        bell: threading.Event,
    ) -> None:
        self._session = session
        self._feed = feed
        self._holding = holding
        self._bell = bell
        #: Names that nobody holds any more, and names that are done with; from other threads.
        self._freed: deque[str] = deque()
        self._settled: deque[str] = deque()
        #: An attempt to hold these got no answer.
        self._in_doubt: list[str] = []
        self._reconnected = False

    def start(self) -> None:
        """Listen to the session."""
        self._session.listen(self._hear)

    def stop(self) -> None:
        """Do not listen any more."""
        self._session.unlisten(self._hear)

    def take(self, count: int) -> list[Node]:
        """Hold and return up to `count` nodes; none when there are none to be had now.

        Raises:
            ZooKeeperUnreachable: Call it again.
        """
        self._catch_up()
        while names := self._feed.hand_out(count):
            if nodes := self._hold(names):
                return nodes
        return []

    def take_within(self, count: int, timeout_s: float | None, clock: Clock) -> list[Node]:
        """As :meth:`take`, and wait until there is something: `timeout_s` seconds at most, None: for ever."""
        deadline = math.inf if timeout_s is None else clock.monotonic() + timeout_s
        while True:
            self._bell.clear()
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
            self._bell.wait(min(LONGEST_WAIT_S if pause is None else pause, left))

    def peek(self) -> Node | None:
        """The node that :meth:`take` would return first, unheld."""
        self._catch_up()
        passed: list[str] = []
        try:
            while names := self._feed.hand_out(1):
                passed += names
                node = self._holding.read(names[0])
                if node is not None:
                    return node
        finally:
            self._feed.put_back(passed)
        return None

    def pause_s(self) -> float | None:
        """Seconds after which :meth:`take` is worth calling although the bell was silent; None: never."""
        if self._freed or self._in_doubt or self._reconnected:
            return 0.0
        return self._feed.pause_s()

    def settle(self, nodes: Sequence[Node], outcomes: Sequence[Outcome]) -> None:
        """These were finished or requeued."""
        for node, outcome in zip(nodes, outcomes, strict=True):
            if outcome is Outcome.LOST:
                logger.warning(
                    "The session expired while %s was consumed, and another consumer has it now: "
                    "it is consumed twice.",
                    node.name,
                )
                self._freed.append(node.name)
            else:
                self._settled.append(node.name)
        self._bell.set()

    def release(self, nodes: Sequence[Node]) -> None:
        """These were given back."""
        self._freed.extend(node.name for node in nodes)
        self._bell.set()

    # -- inside

    def _hold(self, names: list[str]) -> list[Node]:
        self._feed.aside.update(names)
        try:
            grip = self._holding.take(names)
            if grip.locked:
                free = self._holding.watch(grip.locked, self._free)
                self._feed.put_back(free)
        except BaseException:
            self._in_doubt += names
            raise
        missing = set(names).difference(grip.locked, grip.left, (node.name for node in grip.nodes))
        self._feed.aside.difference_update(missing)
        # What was deleted to be held is gone; its name may come again, in a folder that was made anew.
        self._feed.aside.difference_update(node.name for node in grip.nodes if node.held is None)
        if len(missing) + len(grip.locked) > MISSES * len(names):
            self._feed.doubt()
        return grip.nodes

    def _catch_up(self) -> None:
        if self._reconnected:
            self._reconnected = False
            self._feed.forget()
        if self._in_doubt:
            self._holding.drop(self._in_doubt)
            self._feed.put_back(self._in_doubt)
            self._in_doubt = []
        while self._settled:
            self._feed.aside.discard(self._settled.popleft())
        if self._freed:
            freed = []
            while self._freed:
                freed.append(self._freed.popleft())
            try:
                present = self._holding.present(freed)
            except BaseException:
                self._freed.extend(freed)
                raise
            for name in freed:
                self._feed.aside.discard(name)
            self._feed.put_back(present)

    def _free(self, name: str) -> None:
        self._freed.append(name)
        self._bell.set()

    def _hear(self, state: State) -> None:
        # Watches go with the connection.
        if state is State.CONNECTED:
            self._reconnected = True
        self._bell.set()
