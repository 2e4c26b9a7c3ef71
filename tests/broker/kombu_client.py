"""One queue used by plain kombu: connections with options, and queries of the keys in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import kombu
import redis

from celery_dq.context import AppContext
from celery_dq.keys import PartitionKeys
from celery_dq.options.resolve import resolve
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.aliases import register_transports
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts


def clients_of(client: Any) -> list[dict[str, str]]:
    """Return the connections to the database of a client: those of earlier tests have other databases."""
    database = str(client.get_connection_kwargs()["db"])
    return [each for each in client.client_list() if each["db"] == database]


class KombuClient:
    """One queue in one database.

    Args:
        url: URL of the server for redis-py.
        queue: Name of the queue.
    """

    def __init__(self, url: str, queue: str = "push") -> None:
        register_transports()
        self.url = url
        self.broker_url = "dq-" + url
        self.queue = queue
        # No timeout: redis-py would send a script again after one, and the script would act twice.
        self.client: Any = redis.Redis.from_url(url, socket_timeout=None)
        self.keys = PartitionKeys("online", queue)
        self.partition = Partition(self.keys, load_scripts())
        self._opened: list[Any] = []

    # -- connections

    def connect(
        self, url: str | None = None, transport_options: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        """Return a kombu connection with a consumer identity of its own, as if in another process."""
        conf = {f"dq_{name}": value for name, value in options.items()}
        context = AppContext("dq", lambda: resolve(conf))
        connection = kombu.Connection(
            url or self.broker_url, transport_options={"dq": context, **(transport_options or {})}
        )
        self._opened.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._opened:
            connection.close()
        self.client.close()

    # -- publishing and consuming

    def publish(self, *bodies: Any, connection: Any = None, **options: Any) -> None:
        if connection is None:
            with self.connect() as own:
                self.publish(*bodies, connection=own, **options)
            return
        producer = connection.Producer()
        for body in bodies:
            producer.publish(
                body, routing_key=self.queue, declare=[kombu.Queue(self.queue)], serializer="json", **options
            )

    @contextmanager
    def consuming(self, connection: Any, prefetch: int = 0, no_ack: bool = False) -> Iterator[list[Any]]:
        """Consume the queue in the block; yields the list of messages received so far."""
        got: list[Any] = []
        consumer = connection.Consumer(
            [kombu.Queue(self.queue)],
            on_message=got.append,
            prefetch_count=prefetch or None,
            no_ack=no_ack,
            accept=["json"],
        )
        with consumer:
            yield got

    def drain(self, connection: Any, got: list[Any], count: int, timeout_s: float = 30.0) -> list[Any]:
        """Call ``drain_events`` until `count` messages were received."""

        def turned() -> bool:
            if len(got) < count:
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.05)
            return len(got) >= count

        wait_until(turned, timeout_s, what=lambda: f"{count} messages; there are {len(got)}", interval_s=0.0)
        return got

    def drain_until(self, connection: Any, condition: Any, timeout_s: float = 30.0) -> None:
        """Call ``drain_events`` until `condition()` is true."""

        def turned() -> Any:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.02)
            return condition()

        wait_until(turned, timeout_s, interval_s=0.0)

    def look_again(self, connection: Any) -> None:
        """Let the consumer thread claim, although no wake-up came."""
        channel = connection.default_channel
        channel.identity.threads.request(channel.consumer.claims.look_again)

    # -- keys in Redis

    def depth(self) -> int:
        return int(self.client.hlen(self.keys.messages))

    def leftovers(self) -> set[str]:
        """Return the keys of the partition, without its prefix."""
        return {
            key.decode().removeprefix(self.keys.prefix)
            for key in self.client.scan_iter(self.client_pattern(), count=1000)
        }

    def client_pattern(self) -> str:
        return self.keys.prefix.replace("[", "\\[") + "*"

    def lose_lease(self) -> int:
        """Expire all leases and reap them as another consumer; return the number of reaped messages."""
        for consumer in set(self.client.zrange(self.keys.leases, 0, -1)) - {b"other"}:
            # A reaper that renews its lease late reaps nothing for a while, so its own is left as it is.
            self.client.zadd(self.keys.leases, {consumer: 1})
        return self.partition.heartbeat("other", lease_ms=60_000).run(self.client).reaped


def bodies(messages: list[Any]) -> list[Any]:
    return [message.payload for message in messages]


def consumer_of(connection: Any) -> str:
    return str(connection.transport.context.identity.consumer)


def heartbeat(process: Any) -> None:
    """Let the consumer thread renew its leases once, in a round that begins after this call."""
    rounds: list[float] = []

    def begin() -> None:
        process.threads.add_check(rounds.append)
        process.threads.renew_now()

    process.threads.request(begin)  # between two trips, so that it sees no round that began before
    wait_until(lambda: rounds)
    process.threads.remove_check(rounds.append)
