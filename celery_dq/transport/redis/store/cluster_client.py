"""Clients and connection pools for a Redis Cluster, with the interfaces of redis-py for one server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import redis
from redis.client import PubSub

from celery_dq.shown import shown_logger
from celery_dq.transport.redis.store.cluster_connection import BROADCAST_SLOT, ClusterConnection
from celery_dq.transport.redis.store.slot_map import NodeAddress, SlotMap

logger = shown_logger(__name__)

#: Longest time in seconds to connect to a node while an event loop waits.
CONNECT_TIMEOUT_S = 1.0
#: Seconds after a failed connection until the next attempt, and more where the attempt itself took long.
RECONNECT_S, RECONNECT_SHARE = 0.1, 4


def _no_notifications() -> Any:
    # Older releases of redis-py, which are refused for a cluster only, load this module, too.
    from redis.maint_notifications import MaintNotificationsConfig

    return MaintNotificationsConfig(enabled=False)


def cluster_pool(slots: SlotMap, node_class: Any, **arguments: Any) -> redis.ConnectionPool:
    """Return a pool of connections that each reach the whole cluster.

    Args:
        slots: The map of the cluster.
        node_class: Class of the connections to nodes.
        **arguments: Further arguments of these connections, and of the pool.
    """
    return redis.ConnectionPool(
        connection_class=ClusterConnection,
        slots=slots,
        node_class=node_class,
        maint_notifications_config=_no_notifications(),
        **arguments,
    )


def twin_of(client: redis.Redis) -> redis.Redis:
    """Return a client with the arguments of another one, and connections of its own."""
    arguments = dict(client.connection_pool.connection_kwargs)
    arguments.pop("maint_notifications_config", None)
    return type(client)(connection_pool=cluster_pool(arguments.pop("slots"), **arguments))


def is_cluster(pool: redis.ConnectionPool) -> bool:
    """Return whether a pool is one of :func:`cluster_pool`."""
    return "slots" in pool.connection_kwargs


def slots_of(pool: redis.ConnectionPool) -> SlotMap:
    """Return the map of the cluster that a pool reaches."""
    found: SlotMap = pool.connection_kwargs["slots"]
    return found


def node_pool(pool: redis.ConnectionPool, node: NodeAddress, **arguments: Any) -> redis.ConnectionPool:
    """Return a pool of connections to one node, with the arguments of the pool of its cluster."""
    given = {**pool.connection_kwargs, **arguments}
    del given["slots"]
    return redis.ConnectionPool(
        connection_class=given.pop("node_class"),
        maint_notifications_config=_no_notifications(),
        host=node.host,
        port=node.port,
        **{name: each for name, each in given.items() if name != "maint_notifications_config"},
    )


def master_clients(client: redis.Redis) -> Iterator[tuple[NodeAddress, redis.Redis]]:
    """Yield a client of each master of a cluster, for questions about the servers themselves.

    Args:
        client: A client of the cluster.

    Yields:
        The address of the master, and its client, whose connections are closed afterwards.
    """
    for node in slots_of(client.connection_pool).masters:
        pool = node_pool(client.connection_pool, node)
        try:
            yield node, redis.Redis(connection_pool=pool)
        finally:
            pool.disconnect()


def node_serving(client: Any, slot: int) -> str:
    """Return the address of the node that serves a slot; "" when none does, and on a single server."""
    if not is_cluster(client.connection_pool):
        return ""
    node = slots_of(client.connection_pool).node_of(slot)
    return "" if node is None else str(node)


def refresh_slots(pool: redis.ConnectionPool, without: NodeAddress | None) -> None:
    """Ask the cluster for its slots, for an event loop; the map stays as it is when no node answers.

    Args:
        pool: A pool of :func:`cluster_pool`.
        without: A node that has just failed, which is asked last.
    """

    def connect(node: NodeAddress) -> Any:
        return node_pool(pool, node, socket_connect_timeout=CONNECT_TIMEOUT_S).get_connection()

    try:
        slots_of(pool).refresh(connect, without=without)
    except (redis.RedisError, OSError) as exc:
        logger.debug("The slots of the Redis Cluster could not be read again: %s.", exc)


class ClusterClient(redis.Redis):
    """A client of a Redis Cluster. Each command goes to the master of its key."""

    on_cluster = True

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Yield the keys of all masters. A key whose slot moves meanwhile may come twice, or be missed."""
        for _, client in master_clients(self):
            yield from client.scan_iter(*args, **options)

    def pubsub(self, **kwargs: Any) -> PubSub:
        """Return a subscriber on the node that carries the broadcasts."""
        pool = self.connection_pool
        connection = pool.get_connection()  # it learns the slots
        pool.release(connection)
        node = slots_of(pool).node_of(BROADCAST_SLOT) or slots_of(pool).masters[0]
        return PubSub(node_pool(pool, node), **kwargs)
