"""Calls a function with the items of a queue, as they come.

Two threads: one takes nodes and calls the function (or hands the node to an executor), the other finishes
what is consumed, so that the next one need not wait for it; whatever is consumed meanwhile is finished
together.

As many nodes are taken at once as the function consumes in 50 ms, by what it took so far; a slow one takes
one at a time. When an item takes longer than that, the nodes behind it are given back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import islice
from typing import Any

from celery_dq.clock import Clock
from celery_dq.curator.decoder import Decoder
from celery_dq.curator.framing import frame
from celery_dq.curator.holding import Holding, Node
from celery_dq.curator.intake import LONGEST_WAIT_S, RETRY_S, Intake
from celery_dq.errors import ZooKeeperUnreachable

__all__ = ["Consumer"]

logger = logging.getLogger(__name__)

#: Nodes that are taken or finished in one request at most.
TOGETHER = 100
#: Seconds of work that are taken ahead.
AHEAD_S = 0.05


class Consumer:
    """Consumes one queue until it is stopped.

    :param consume: called with each item; when it raises, the item has failed.
    :param requeue: whether a failed item is put back last in line; it is deleted otherwise.
    :param executor: calls `consume`; None: the thread of this consumer does.
    :param prefetch: nodes that are held at most.
    :param bell: set when there may be something to take.
    """

    def __init__(
        self,
        intake: Intake,
        holding: Holding,
        decoder: Decoder,
        consume: Callable[[Any], Any],
        bell: threading.Event,
        *,
        name: str,
        requeue: bool,
        executor: Executor | None,
        prefetch: int,
        clock: Clock,
    ) -> None:
        self._intake = intake
        self._holding = holding
        self._decoder = decoder
        self._consume = consume
        self._bell = bell
        self._requeue = requeue
        self._executor = executor
        self._prefetch = prefetch
        self._clock = clock
        self._batch = 1 if executor is None else prefetch
        self._stopping = False
        self._taken = False
        self._abandoned = False
        self._change = threading.Condition()
        #: Held and not begun.
        self._hand: deque[Node] = deque()
        #: How many are being consumed, and since when the only one is.
        self._running = 0
        self._late: list[Node] = []
        self._began = 0.0
        #: Consumed: with None to be finished, with data to be put back.
        self._consumed: deque[tuple[Node, bytes | None]] = deque()
        self._taker = threading.Thread(target=self._take, name=f"dq-take-{name}", daemon=True)
        self._finisher = threading.Thread(target=self._finish, name=f"dq-finish-{name}", daemon=True)

    def start(self) -> None:
        """Begin to consume."""
        self._intake.start()
        self._taker.start()
        self._finisher.start()

    def stop(self, timeout_s: float) -> bool:
        """Begin nothing more and wait for what runs to be finished; False: it is not after `timeout_s`."""
        deadline = self._clock.monotonic() + timeout_s
        self._stopping = True
        self._bell.set()
        with self._change:
            self._change.notify_all()
        for thread in (self._taker, self._finisher):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - self._clock.monotonic()))
        self._intake.stop()
        self._abandoned = True
        with self._change:
            self._change.notify_all()
        return not (self._taker.is_alive() or self._finisher.is_alive())

    # -- the taker

    def _take(self) -> None:
        while not self._stopping:
            self._bell.clear()
            try:
                room = self._batch - len(self._hand) - self._running
                nodes = self._intake.take(min(room, TOGETHER)) if room > 0 else []
            except ZooKeeperUnreachable as error:
                logger.info("Nothing can be taken: %s", error)
                self._bell.wait(RETRY_S)
                continue
            except Exception:
                logger.exception("Nothing could be taken; trying again.")
                self._bell.wait(RETRY_S)
                continue
            if nodes:
                with self._change:
                    self._hand.extend(nodes)
                try:
                    self._work()
                except Exception:
                    logger.exception("Nothing can be consumed; trying again.")
                    self._bell.wait(RETRY_S)
            elif room > 0:
                pause = self._intake.pause_s()
                self._bell.wait(LONGEST_WAIT_S if pause is None else min(pause, LONGEST_WAIT_S))
            else:
                self._bell.wait(LONGEST_WAIT_S)
        with self._change:
            self._taken = True
            self._change.notify_all()

    def _work(self) -> None:
        began, count = self._clock.monotonic(), 0
        while not self._stopping:
            with self._change:
                if not self._hand:
                    break
                node = self._hand.popleft()
                self._running += 1
                self._began = self._clock.monotonic()
                self._change.notify_all()
            if not self._holding.alive(node):
                # Its lock went with the session; somebody else may have it already.
                self._intake.release([node])
                self._end(None)
            elif self._executor is None:
                count += 1
                self._run(node)
            else:
                self._submit(self._executor, node)
        if count:
            self._adapt((self._clock.monotonic() - began) / count)

    def _submit(self, executor: Executor, node: Node) -> None:
        try:
            executor.submit(self._run, node)
        except BaseException:
            # It was shut down.
            with self._change:
                self._late.append(node)
            self._end(None)
            raise

    def _adapt(self, each_s: float) -> None:
        """Take as many at once as fit the time ahead, never more than twice as many as before."""
        fitting = int(AHEAD_S / max(each_s, 1e-6))
        self._batch = max(1, min(self._prefetch, fitting, 2 * self._batch))

    def _run(self, node: Node) -> None:
        result: tuple[Node, bytes | None] = (node, node.data)
        try:
            result = (node, self._consume_items(node))
        finally:
            # Where even the items could not be consumed in order, they are put back whole.
            self._end(result)

    def _consume_items(self, node: Node) -> bytes | None:
        """Consume the items of a node; returns what must be put back."""
        raw = self._decoder.raw(node.data)
        for at, item in enumerate(self._decoder.items(node.data)):
            try:
                self._consume(item)
            except (Exception, SystemExit):  # noqa: PERF203 - each item may fail
                if self._requeue:
                    logger.exception("A consumer failed; the item is put back: %s", node.name)
                    return frame(raw[at:])
                logger.exception("A consumer failed; the item is deleted: %s", node.name)
        return None

    def _end(self, result: tuple[Node, bytes | None] | None) -> None:
        with self._change:
            self._running -= 1
            if result is not None:
                self._consumed.append(result)
            self._change.notify_all()
        if self._executor is not None:
            self._bell.set()

    # -- the finisher

    def _finish(self) -> None:
        while True:
            with self._change:
                while not (self._consumed or self._late or self._idle_for_good() or self._overdue()):
                    self._change.wait(AHEAD_S if self._hand else None)
                batch = list(islice(self._consumed, TOGETHER))
                if self._overdue():
                    self._late += self._hand
                    self._hand.clear()
                if self._abandoned or (not batch and not self._late and self._idle_for_good()):
                    return
            try:
                self._settle(batch)
                self._give_back()
            except ZooKeeperUnreachable as error:
                logger.info("What is consumed stays locked until it can be finished: %s", error)
                self._rest()
            except Exception:
                logger.exception("What is consumed could not be finished; trying again.")
                self._rest()

    def _settle(self, batch: list[tuple[Node, bytes | None]]) -> None:
        done = [node for node, data in batch if data is None]
        if done:
            self._intake.settle(done, self._holding.finish(done))
        self._forget([entry for entry in batch if entry[1] is None])
        for entry in batch:
            node, data = entry
            if data is not None:
                self._intake.settle([node], [self._holding.requeue(node, data)])
                self._forget([entry])

    def _forget(self, entries: list[tuple[Node, bytes | None]]) -> None:
        with self._change:
            for entry in entries:
                self._consumed.remove(entry)

    def _give_back(self) -> None:
        if late := list(self._late):
            self._holding.release(late)
            self._intake.release(late)
            with self._change:
                del self._late[: len(late)]

    def _rest(self) -> None:
        with self._change:
            self._change.wait(RETRY_S)

    def _overdue(self) -> bool:
        """Whether what is held behind a slow item should be given to others."""
        if self._stopping:
            return bool(self._hand)
        if not self._hand or not self._running or self._executor is not None:
            return False
        return self._clock.monotonic() > self._began + AHEAD_S

    def _idle_for_good(self) -> bool:
        return self._stopping and not self._hand and not self._running and self._taken
