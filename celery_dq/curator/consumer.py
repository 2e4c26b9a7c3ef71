"""Calls a function with the items of a queue.

The *taker* thread takes nodes and calls the function, or submits nodes to an executor. The *finisher* thread
finishes consumed nodes, several at a time, so that the function does not wait for ZooKeeper.

The taker takes as many nodes at once as the function consumes in about 50 ms, estimated from earlier nodes;
for a slow function, it takes one node at a time. If an item takes longer, the nodes behind it are released.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import islice
from typing import Any

from celery_dq.curator.framing import frame
from celery_dq.curator.item_ownership import ItemOwnership, Node, QueueFolder
from celery_dq.curator.taking import LONGEST_WAIT_S, RETRY_S, ItemTaker
from celery_dq.daemon_threads import start_daemon
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger

__all__ = ["Consumer"]

logger = shown_logger(__name__)

#: Maximum number of nodes that one request takes or finishes.
TOGETHER = 100
#: Seconds of work to take ahead.
AHEAD_S = 0.05


class Consumer:
    """Consumes one queue until it is stopped.

    Args:
        folder: The folder of the queue.
        item_taker: Takes nodes.
        holding: Finishes, requeues and releases nodes.
        consume: Called with each item; an exception means that the item has failed.
        wake: Set when nodes may be available.
        requeue: Whether a failed item is moved to the end of the queue; otherwise it is deleted.
        executor: Calls `consume`; None means that the taker thread does.
        prefetch: Maximum number of nodes that are held.
    """

    def __init__(
        self,
        folder: QueueFolder,
        item_taker: ItemTaker,
        holding: ItemOwnership,
        consume: Callable[[Any], Any],
        wake: threading.Event,
        *,
        requeue: bool,
        executor: Executor | None,
        prefetch: int,
    ) -> None:
        self._name = folder.path
        self._decoder = folder.decoder
        self._clock = clock = folder.clock
        self._taking = Outage(logger, "curator_take", clock)
        self._finishing = Outage(logger, "curator_finish", clock)
        self._item_taker = item_taker
        self._ownership = holding
        self._consume = consume
        self._wake_event = wake
        self._requeue = requeue
        self._executor = executor
        self._prefetch = prefetch
        self._batch = 1 if executor is None else prefetch
        self._stopping = False
        self._taken = False
        self._abandoned = False
        self._change = threading.Condition()
        #: Nodes that were taken and not started.
        self._handler_thread: deque[Node] = deque()
        #: Number of nodes that are being consumed.
        self._running = 0
        #: Nodes to be released.
        self._late: list[Node] = []
        #: Start of the last node, in monotonic seconds.
        self._began = 0.0
        #: Consumed nodes, each with None to be finished, or with the data to requeue.
        self._consumed: deque[tuple[Node, bytes | None]] = deque()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start to consume."""
        self._item_taker.start()
        try:
            for run, name in ((self._take, "take"), (self._finish, "finish")):
                self._threads.append(start_daemon(run, f"dq-{name}-{self._name}"))
        except RuntimeError:
            self.stop(0.0)
            raise

    def stop(self, timeout_s: float) -> bool:
        """Start no more nodes and wait for the running ones.

        Args:
            timeout_s: Maximum seconds to wait.

        Returns:
            Whether all nodes were finished in time.
        """
        deadline = self._clock.monotonic() + timeout_s
        self._stopping = True
        self._wake_event.set()
        with self._change:
            self._change.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - self._clock.monotonic()))
        self._item_taker.stop()
        self._abandoned = True
        with self._change:
            self._change.notify_all()
        return not any(thread.is_alive() for thread in self._threads)

    # -- the taker

    def _take(self) -> None:
        while not self._stopping:
            self._wake_event.clear()
            try:
                room = self._batch - len(self._handler_thread) - self._running
                nodes = self._item_taker.take(min(room, TOGETHER)) if room > 0 else []
                if nodes:
                    with self._change:
                        self._handler_thread.extend(nodes)
                    self._work()
            except ZooKeeperUnreachable as error:
                logger.info(
                    "Consumer %s can take no nodes (%s); it tries again.",
                    self._name,
                    error,
                    extra={"event": "curator_take_delayed"},
                )
                self._wake_event.wait(RETRY_S)
                continue
            except Exception as error:
                self._taking.began(
                    "Consumer %s cannot take or start nodes (%r); it tries again every %g s.",
                    self._name,
                    error,
                    RETRY_S,
                    exc_info=error,
                )
                self._wake_event.wait(RETRY_S)
                continue
            if room > 0:
                self._taking.over("Consumer %s takes nodes again.", self._name)
            if not nodes:
                pause = self._item_taker.pause_s() if room > 0 else None
                self._wake_event.wait(LONGEST_WAIT_S if pause is None else min(pause, LONGEST_WAIT_S))
        with self._change:
            self._taken = True
            self._change.notify_all()

    def _work(self) -> None:
        began, count = self._clock.monotonic(), 0
        while not self._stopping:
            with self._change:
                if not self._handler_thread:
                    break
                node = self._handler_thread.popleft()
                self._running += 1
                self._began = self._clock.monotonic()
                self._change.notify_all()
            if not self._ownership.alive(node):
                # The lock ended with its session, and another consumer may have taken the node.
                self._item_taker.release([node])
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
            # The executor was shut down.
            with self._change:
                self._late.append(node)
            self._end(None)
            raise

    def _adapt(self, each_s: float) -> None:
        """Set the number of nodes to take at once; it at most doubles with each call."""
        fitting = int(AHEAD_S / max(each_s, 1e-6))
        self._batch = max(1, min(self._prefetch, fitting, 2 * self._batch))

    def _run(self, node: Node) -> None:
        result: tuple[Node, bytes | None] = (node, node.data)
        try:
            result = (node, self._consume_items(node))
        finally:
            # After any other error, such as a decoding error, the whole node is requeued.
            self._end(result)

    def _consume_items(self, node: Node) -> bytes | None:
        """Consume the items of a node; return the data to requeue, or None."""
        raw = self._decoder.raw(node.data)
        for at, item in enumerate(self._decoder.items(node.data)):
            try:
                self._consume(item)
            except (Exception, SystemExit):  # noqa: PERF203 - each item may fail
                if self._requeue:
                    self._log_failure("The item is requeued at the end of the queue.", node, at)
                    return frame(raw[at:])
                self._log_failure("The item is deleted.", node, at)
        return None

    def _log_failure(self, consequence: str, node: Node, at: int) -> None:
        logger.exception(
            "The consumer of queue %s raised an error for item %d of node %s. %s",
            self._name,
            at,
            node.name,
            consequence,
            extra={"event": "curator_item_failed"},
        )

    def _end(self, result: tuple[Node, bytes | None] | None) -> None:
        with self._change:
            self._running -= 1
            if result is not None:
                self._consumed.append(result)
            self._change.notify_all()
        if self._executor is not None:
            self._wake_event.set()

    # -- the finisher

    def _finish(self) -> None:
        while True:
            with self._change:
                while not (self._consumed or self._late or self._idle_for_good() or self._overdue()):
                    self._change.wait(AHEAD_S if self._handler_thread else None)
                batch = list(islice(self._consumed, TOGETHER))
                if self._overdue():
                    self._late += self._handler_thread
                    self._handler_thread.clear()
                if self._abandoned or (not batch and not self._late and self._idle_for_good()):
                    return
            try:
                self._settle(batch)
                self._release_taken()
            except ZooKeeperUnreachable as error:
                logger.info(
                    "Consumer %s cannot finish nodes (%s); they stay locked, and it tries again.",
                    self._name,
                    error,
                    extra={"event": "curator_finish_delayed"},
                )
                self._pause()
            except Exception as error:
                self._finishing.began(
                    "Consumer %s cannot finish nodes (%r); they stay locked, and it tries again.",
                    self._name,
                    error,
                    exc_info=error,
                )
                self._pause()
            else:
                self._finishing.over("Consumer %s finishes nodes again.", self._name)

    def _settle(self, batch: list[tuple[Node, bytes | None]]) -> None:
        done = [node for node, data in batch if data is None]
        if done:
            self._item_taker.settle(done, self._ownership.finish(done))
        self._forget([entry for entry in batch if entry[1] is None])
        for entry in batch:
            node, data = entry
            if data is not None:
                self._item_taker.settle([node], [self._ownership.requeue(node, data)])
                self._forget([entry])

    def _forget(self, entries: list[tuple[Node, bytes | None]]) -> None:
        with self._change:
            for entry in entries:
                self._consumed.remove(entry)

    def _release_taken(self) -> None:
        if late := list(self._late):
            self._ownership.release(late)
            self._item_taker.release(late)
            with self._change:
                del self._late[: len(late)]

    def _pause(self) -> None:
        with self._change:
            self._change.wait(RETRY_S)

    def _overdue(self) -> bool:
        """Whether the nodes behind a slow item should be released to other consumers."""
        if self._stopping:
            return bool(self._handler_thread)
        if not self._handler_thread or not self._running or self._executor is not None:
            return False
        return self._clock.monotonic() > self._began + AHEAD_S

    def _idle_for_good(self) -> bool:
        return self._stopping and not self._handler_thread and not self._running and self._taken
