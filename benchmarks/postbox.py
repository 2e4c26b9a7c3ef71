"""kombu-level publishing and consuming for the benchmarks, the same calls for every broker."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from kombu import Connection, Consumer, Message, Producer, Queue

from benchmarks.at_claim import read_held
from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.workers import ROOT

QUEUE = "bench"

#: A body with the size of that of a small Celery task.
FILLER = "x" * 80


def connect(broker: str, port: int) -> Connection:
    BROKERS[broker].prepare()
    return Connection(BROKERS[broker].url(port), transport_options={"socket_timeout": 30.0})


def publish_many(connection: Connection, tenants: Iterable[str], queue: str = QUEUE, **options: Any) -> int:
    """Publish one message per name in `tenants` on a channel of its own; return the number."""
    producer = producer_of(connection, queue)
    amount = publish_batch(producer, tenants, queue, **options)
    channel: Any = producer.channel
    channel.close()
    return amount


def producer_of(connection: Connection, queue: str = QUEUE) -> Producer:
    """Return a producer with a channel of its own, on which the queue is declared."""
    channel: Any = connection.channel()
    Queue(queue)(channel).declare()
    return Producer(channel)


def publish_batch(producer: Producer, tenants: Iterable[str], queue: str = QUEUE, **options: Any) -> int:
    """Publish one message per name in `tenants`, in batches where kombu has them; return the number."""
    amount = 0
    with batch_of(producer):
        for tenant in tenants:
            publish_one(producer, tenant, queue, **options)
            amount += 1
    return amount


def batch_of(producer: Producer) -> AbstractContextManager[None]:
    """Return a context whose messages are published in batches, if kombu and the transport have them."""
    channel: Any = producer.channel
    transport = channel.connection.client.transport
    batch = getattr(producer, "batch", None) if getattr(transport, "supports_batch_publish", False) else None
    return batch(1000) if batch else nullcontext()


def publish_one(producer: Producer, tenant: str, queue: str = QUEUE, **options: Any) -> None:
    """Publish one message to a declared queue."""
    body = {"tenant": tenant, "at": time.monotonic(), "filler": FILLER}
    producer.publish(body, routing_key=queue, serializer="json", tenant=tenant, retry=False, **options)


class Sink:
    """A consumer that acknowledges as fast as possible."""

    def __init__(self, connection: Connection, prefetch: int = 100, queue: str = QUEUE) -> None:
        self.connection = connection
        self.arrivals: list[tuple[float, str, float]] = []
        self._channel: Any = connection.channel()
        self._consumer = Consumer(
            self._channel,
            [Queue(queue)],
            on_message=self._on_message,
            prefetch_count=prefetch,
            auto_declare=False,
        )
        self._consumer.consume()

    def _on_message(self, message: Message) -> None:
        body = json.loads(message.body or b"")
        self.arrivals.append((time.monotonic(), body["tenant"], body["at"]))
        self._watch(message)
        message.ack()

    def _watch(self, message: Message) -> None:
        """Called with each message after its arrival was noted."""

    def drain(self, amount: int, seconds: float) -> None:
        """Consume until `amount` messages came, or `seconds` have passed."""
        end = time.monotonic() + seconds
        while len(self.arrivals) < amount and time.monotonic() < end:
            with suppress(TimeoutError):
                self.connection.drain_events(timeout=0.5)

    def close(self) -> None:
        self._consumer.cancel()
        self._channel.close()


class WatchingSink(Sink):
    """A `Sink` that also asks celery-dq when the messages of one tenant were pushed and claimed."""

    def __init__(self, connection: Connection, prefetch: int, queue: str, tenant: str) -> None:
        #: Seconds from push to claim, by the clock of Redis, and from the claim to the callback.
        self.waits: list[tuple[float, float]] = []
        self._tenant = tenant
        self._keys = PartitionKeys("online", queue)
        channel: Any = connection.channel()
        self._client = channel.client
        super().__init__(connection, prefetch, queue)

    def _watch(self, message: Message) -> None:
        if self.arrivals[-1][1] == self._tenant:
            arrived: Any = time.time()
            source: Any = message
            held = self._client.hget(self._keys.held(source.channel.identity.consumer), source.message_id)
            if held is not None:
                pushed_us, (claimed_us, _) = read_held(held)
                self.waits.append(((claimed_us - pushed_us) / 1e6, arrived - claimed_us / 1e6))


class Found(NamedTuple):
    """The messages that a consumer process got."""

    #: (arrival, tenant, published) of each message.
    arrivals: list[tuple[float, str, float]]
    #: The same as in `WatchingSink`.
    waits: list[tuple[float, float]]


class ConsumerProcess:
    """A `Sink` in a separate process, for `seconds`; its results are read from a file afterwards.

    With `watched` it is a `WatchingSink` for this tenant.
    """

    def __init__(
        self,
        broker: str,
        port: int,
        seconds: float,
        *,
        prefetch: int = 20,
        work: float = 0.0,
        queue: str = QUEUE,
        watched: str = "",
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._out = Path(self._folder.name) / "arrivals.json"
        self._ready = Path(self._folder.name) / "ready"
        arguments = [
            broker,
            str(port),
            str(seconds),
            str(prefetch),
            str(work),
            queue,
            watched,
            str(self._out),
            str(self._ready),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.postbox", *arguments], cwd=ROOT, start_new_session=True
        )

    def wait_ready(self) -> None:
        wait_until(self._ready.exists, 20)

    def arrivals(self, deadline: float) -> list[tuple[float, str, float]]:
        """Return (arrival, tenant, published) of each message, after its end."""
        return self.found(deadline).arrivals

    def found(self, deadline: float) -> Found:
        """Return all its results, after its end."""
        try:
            self._process.wait(deadline)
            arrivals, waits = json.loads(self._out.read_text())
            return Found([tuple(row) for row in arrivals], [tuple(row) for row in waits])
        finally:
            self.stop()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _main(arguments: list[str]) -> None:
    broker, port, seconds, prefetch, work, queue, watched, out, ready = arguments
    with connect(broker, int(port)) as connection:
        if watched:
            sink: Sink = WatchingSink(connection, int(prefetch), queue, watched)
        else:
            sink = Sink(connection, int(prefetch), queue)
        Path(ready).touch()
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            before: Any = len(sink.arrivals)
            sink.drain(before + 1, max(0.0, min(0.5, end - time.monotonic())))
            if float(work):
                time.sleep(float(work) * (len(sink.arrivals) - before))  # the work of the consumer
        waits = sink.waits if isinstance(sink, WatchingSink) else []
        Path(out).write_text(json.dumps([sink.arrivals, waits]))
        sink.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
