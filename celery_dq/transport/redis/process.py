"""What one process is to one broker: a consumer with one lease per partition.

The lease is the *process's*, not a channel's or a connection's: a connection may
break and a loop may be blocked by a long task without any message being taken
away. A :class:`~celery_dq.transport.redis.keeper.Keeper` renews it.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable

from celery_dq.clock import Clock, SystemClock
from celery_dq.scripts.loader import ScriptSet
from celery_dq.transport.redis.doubt import Doubts
from celery_dq.transport.redis.keeper import Keeper
from celery_dq.transport.redis.ledger import Ledger
from celery_dq.transport.redis.partition import load_scripts
from celery_dq.transport.redis.queue import Queue

logger = logging.getLogger(__name__)


class Process:
    """The state that a process keeps for one broker across reconnects.

    Arguments:
        lease_s: how long a dead process's messages stay with it, in seconds.
        clock: injectable, for tests.
    """

    def __init__(self, lease_s: float, clock: Clock | None = None) -> None:
        self.pid = os.getpid()
        #: Names the process in the leases; unique, readable in ``explain``.
        self.consumer = f"{socket.gethostname()}:{self.pid}:{uuid.uuid4().hex[:12]}"
        self.clock: Clock = clock or SystemClock()
        self.lease_s = lease_s
        self.lease_ms = int(lease_s * 1000)
        self.ledger = Ledger(self.clock, lease_s)
        self.doubts = Doubts()
        #: Set by the worker: which deliveries run or are about to.
        self.running_tags: Callable[[], frozenset[str]] = frozenset
        self.keeper = Keeper(self)
        #: The Lua scripts, read from their files once per process.
        self.scripts: ScriptSet = load_scripts()
        #: How often in a row the watchdog found that nothing is claimed beside a backlog.
        self.strikes = 0
        #: Told of a queue that has another leader than this process.
        self.on_fenced: Callable[[Queue], None] | None = None
        self._fenced: set[str] = set()
        #: Servers found fit for use, so that each is asked once.
        self.fit_servers: set[str] = set()

    def lease_was_lost(self, partition: str, last_claim: int | None = None) -> None:
        """A claim or renewal found no lease: let go of what was held under it and has not begun.

        Arguments:
            partition: name of the partition.
            last_claim: number of the last claim before that was found; what was claimed meanwhile is ours.
        """
        if self.ledger.holds_of(partition, last_claim):
            lost = self.ledger.lose(partition, self.running_tags(), last_claim)
            logger.warning(
                "The lease of %s on %s had run out, and what it held may be with others now; %d messages "
                "that had not begun are let go. Either the broker was away for longer than dq_lease, or this "
                "machine stood still: a longer dq_lease, or a less loaded machine, avoids this.",
                self.consumer,
                partition,
                lost,
            )

    def fenced_out(self, queue: Queue) -> None:
        """The broker knows a later leader of *queue*: let go of what has not begun."""
        lost = self.ledger.lose(queue.key, self.running_tags())
        known = queue.key in self._fenced
        self._fenced.add(queue.key)
        logger.log(
            logging.DEBUG if known else logging.WARNING,
            "%s does not lead the queue %s any more, or does not know that it is led; %d messages that had "
            "not begun are let go.",
            self.consumer,
            queue.name,
            lost,
        )
        if self.on_fenced is not None:
            self.on_fenced(queue)
