"""What all channels of one connection share."""

from __future__ import annotations

import os
from typing import Any

import redis

from celery_dq.errors import ConfigurationError
from celery_dq.hooks import WIRES, Terms, Wires, WorkerGate
from celery_dq.keys import PartitionKeys, queue_registry
from celery_dq.options.resolve import resolve
from celery_dq.options.sections import Options
from celery_dq.transport.redis.address import identity
from celery_dq.transport.redis.fitness import check_server
from celery_dq.transport.redis.partition import STRICT_PRIORITY_US, Partition
from celery_dq.transport.redis.poller import Poller
from celery_dq.transport.redis.process import Process
from celery_dq.transport.redis.queue import Queue


class Session:
    """One transport's view of its app and its process.

    Arguments:
        connection: the kombu connection, whose options may hold the app's wires.
    """

    def __init__(self, connection: Any) -> None:
        prefix = connection.transport_options.get("global_keyprefix")
        if prefix:
            raise ConfigurationError(
                f"broker_transport_options['global_keyprefix'] = {prefix!r} would reach only some of the "
                "keys: set dq_key_prefix instead"
            )
        self._wires = _wires(connection)
        #: Whether an app with settings stands behind; plain kombu has only defaults.
        self.has_settings = WIRES in connection.transport_options
        self.options: Options = self._wires.options
        self.address = identity(connection)
        processes = self._wires.in_process(dict[str, Process])
        process = processes.get(self.address)
        if process is None:
            process = processes[self.address] = Process(self.options.lease_us / 1e6)
        self.process: Process = process
        process.running_tags = self._running_tags
        self.poller = Poller(process.clock)

    @property
    def gate(self) -> WorkerGate | None:
        """The worker in this process, if there is one."""
        return self._wires.gate

    @property
    def terms(self) -> Terms | None:
        """The leaderships of the worker in this process, if there are any."""
        return self._wires.terms

    def _running_tags(self) -> frozenset[str]:
        gate = self.gate
        return frozenset() if gate is None else gate.started_tags()

    def check_server(self, client: redis.Redis) -> None:
        """Ask the server, once per process, whether it may be trusted with messages.

        Raises:
            ServerError: it may not.
        """
        process = self.process
        if self.address not in process.fit_servers:
            check_server(client, self.options.allow_eviction)
            process.fit_servers.add(self.address)

    def refuse_inherited(self) -> None:
        """A forked child has inherited this connection, with the parent's identity and sockets.

        Raises:
            redis.ConnectionError: this is that child.
        """
        if self.process.pid != os.getpid():
            raise redis.ConnectionError(
                "This connection was opened before a fork: open a new one in the child process"
            )

    def attend(self) -> None:
        """From now on this connection tells the broker what the ledger has for it."""
        self.process.ledger.listen(self.poller.wake)

    def leave(self) -> None:
        """Undo :meth:`attend`."""
        self.process.ledger.unlisten(self.poller.wake)

    @property
    def broadcast_prefix(self) -> str:
        """What separates our broadcasts and bindings from those of others on the same database.

        Empty in the plain case, so that monitors made for kombu find a worker where they look.
        """
        options = self.options
        if options.environment == "online" and not options.key_prefix:
            return ""
        return f"{options.key_prefix}{options.environment}/"

    @property
    def registry_key(self) -> str:
        """SET: names of the ordinary queues that were declared."""
        return queue_registry(self.options.environment, self.options.key_prefix)

    @property
    def list_prefix(self) -> str:
        """What the keys of transient queues begin with."""
        return f"{self.options.key_prefix}dq:{self.options.environment}:"

    def queue(self, name: str) -> Queue:
        """Return the queue called *name* as the options describe it."""
        options = self.options.queue(name)
        keys = PartitionKeys(self.options.environment, name, 0, self.options.key_prefix)
        aging = options.priority_aging_us
        return Queue(
            name,
            Partition(keys, self.process.scripts),
            max_deliveries=options.max_deliveries,
            head_start_us=STRICT_PRIORITY_US if aging is None else aging,
        )

    @staticmethod
    def depth(client: redis.Redis, partition: Partition) -> int:
        """Return how many messages wait: not those in workers' hands, before their time, or cancelled."""
        keys = partition.keys
        with client.pipeline(transaction=True) as pipe:
            pipe.hlen(keys.messages)
            pipe.zcard(keys.delayed)
            pipe.zcard(keys.discards)
            pipe.hget(keys.state, "held")
            stored, delayed, discards, held = pipe.execute()
        return max(int(stored) - int(delayed) - int(discards) - int(held or 0), 0)


def _wires(connection: Any) -> Wires:
    wires = connection.transport_options.get(WIRES)
    if wires is None:
        # Plain kombu: the connection object outlives its transports, so it keeps them.
        wires = connection.__dict__.get("_dq_wires")
        if wires is None:
            wires = connection.__dict__["_dq_wires"] = Wires("dq", lambda: resolve({}))
    if not isinstance(wires, Wires):
        raise ConfigurationError(f"transport_options[{WIRES!r}] is celery-dq's own: remove {wires!r}")
    return wires
