"""``app.dq``: everything that a program can ask of, or tell, its queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_dq.app.broker import Broker
from celery_dq.app.buffer import Buffer
from celery_dq.app.claims import Claims
from celery_dq.app.dead_letters import DeadLetterQueues
from celery_dq.app.punctual import Deadline
from celery_dq.app.queues import Queues
from celery_dq.app.quotas import Quotas
from celery_dq.app.senders import AppSender
from celery_dq.errors import InvalidRequest
from celery_dq.hooks import Wires
from celery_dq.inspector.explain import Explanation, explain_message, explain_unknown
from celery_dq.inspector.messages import MessageSnapshot, find
from celery_dq.options import Options, resolve
from celery_dq.producer.sender import Sender

#: Ids in one call of the ``cancel`` script.
_CHUNK = 100


def dq_of(app: Any) -> DQ:
    """Return ``app.dq``, made at first need (an unpickled app has none yet)."""
    face: DQ | None = app.__dict__.get("dq")
    if face is None:
        face = app.__dict__.setdefault("dq", DQ(app))
    return face


class DQ:
    """The face of celery-dq on a Celery app.

    Making it reads no settings and opens nothing.

    Attributes:
        queues: ``app.dq.queues["push"]``: depth, peek, find, cancel, move, purge, explain.
        quotas: ``app.dq.quotas.set("push", "42", rate="50/s")``.
        dead_letters: ``app.dq.dead_letters["push"].replay()``.
        dedup: ``app.dq.dedup["cache"].list()``.
        buffer: ``app.dq.buffer.flush(timeout=5)``: messages on their way to the broker.
    """

    def __init__(self, app: Any) -> None:
        self.wires = Wires(f"{app.main or '__main__'} at {id(self):#x}", lambda: resolve(app.conf))
        self._broker = Broker(app, self.wires)
        self.queues = Queues(self._broker, self.wires)
        self.quotas = Quotas(self._broker)
        self.dead_letters = DeadLetterQueues(self._broker, self.wires)
        self.dedup = Claims(app, self._broker, self.wires)
        #: ``setup`` has put dedup and the buffer before the app's ``send_task``.
        self.calls_are_wrapped = False
        #: Of calls that are not buffered.
        self.deadline = Deadline()
        self.buffer = Buffer(app, self.wires, self.make_sender)

    def __repr__(self) -> str:
        return f"<dq of {self.wires}>"

    def serves_queues(self) -> bool:
        """Whether the app's broker is one of celery-dq. Opens nothing."""
        return self._broker.serves_queues()

    def make_sender(self, app: Any) -> Sender:
        """What sends the buffered messages of the app; one per process."""
        return AppSender(app, partitioned=self._broker.serves_queues(), step_s=self.options.publishing.step_s)

    @property
    def options(self) -> Options:
        """The checked ``dq_*`` settings.

        Raises:
            ConfigurationError: One is unknown, of the wrong type, or contradicts another.
        """
        options: Options = self.wires.options
        return options

    def find(self, task_id: str) -> list[MessageSnapshot]:
        """Where a task is: one snapshot per queue that has it, none when it has finished or never was."""
        found = []
        names = self._broker.queue_names()
        with self._broker.channel() as channel:
            for name in names:
                message = find(channel.partition(name), channel.client, task_id)
                if message is not None:
                    found.append(message)
        # A revoke leaves its mark in every queue; that says nothing when the task is in one of them.
        there = [message for message in found if message.state != "cancelled"]
        return there or found[:1]

    def explain(
        self, *, tenant: str | int | None = None, queue: str | None = None, task_id: str | None = None
    ) -> Explanation:
        """Why it is waiting, and until when.

        Arguments:
            tenant: Whose work, together with `queue`.
            queue: Which queue.
            task_id: Which task, in whatever queue it is.

        Raises:
            InvalidRequest: Neither a task nor a tenant with its queue is named.
        """
        if task_id is not None and tenant is None:
            for message in self.find(task_id):
                if queue is None or message.queue == queue:
                    with self._broker.open(message.queue) as (partition, client):
                        return explain_message(partition, client, message)
            return explain_unknown(task_id, [queue] if queue else self._broker.queue_names())
        if tenant is None or queue is None or task_id is not None:
            raise InvalidRequest("explain: give either task_id=…, or tenant=… together with queue=…")
        return self.queues[queue].explain(tenant)

    def revoke(self, task_ids: Sequence[str], connection: Any = None) -> None:
        """Cancel tasks in whatever queue they are, now or when they are published.

        Does nothing on a broker that is not of celery-dq. What a worker has claimed is not reached
        here: ``app.control.revoke`` calls this first, and then tells the workers.
        """
        if not self._broker.serves_queues():
            return
        names = self._broker.queue_names()
        ttl_ms = self.options.tombstone_ttl_us // 1000
        with self._broker.channel(connection) as channel:
            # Every queue gets the tombstone: where a task will be published is not known.
            for name in names:
                partition = channel.partition(name)
                for start in range(0, len(task_ids), _CHUNK):
                    ids = task_ids[start : start + _CHUNK]
                    partition.cancel(ids, reason="cancelled", tombstone_ttl_ms=ttl_ms).run(channel.client)
