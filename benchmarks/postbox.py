"""kombu-level publishing and consuming for the benchmarks, the same calls for every broker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kombu import Connection, Consumer, Message, Producer, Queue

from benchmarks.at_claim import read_held
from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import MAX_CHUNK
from tests.brokers import BROKERS
from tests.workers import ROOT

QUEUE = "bench"

#: A body with the size of that of a small Celery task.
FILLER = "x" * 80


def connect(broker: str, port: int) -> Connection:
    BROKERS[broker].prepare()
    return Connection(BROKERS[broker].url(port), transport_options={"socket_timeout": 30.0})


def publish_many(connection: Connection, tenants: Iterable[str], queue: str = QUEUE, **options: Any) -> None:
    """Publish one message per name in `tenants` on a channel of its own."""
    producer = producer_of(connection, queue)
    publish_batch(producer, tenants, queue, **options)
    channel: Any = producer.channel
    channel.close()


def producer_of(connection: Connection, queue: str = QUEUE) -> Producer:
    """Return a producer with a channel of its own, on which the queue is declared."""
    channel: Any = connection.channel()
    Queue(queue)(channel).declare()
    return Producer(channel)


def publish_batch(producer: Producer, tenants: Iterable[str], queue: str = QUEUE, **options: Any) -> None:
    """Publish one message per name in `tenants`, in batches where kombu has them."""
    with batch_of(producer):
        for tenant in tenants:
            publish_one(producer, tenant, queue, **options)


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
    """A consumer that acknowledges as fast as possible.

    It also asks celery-dq when the messages of the tenant `watched` were pushed and claimed.
    """

    def __init__(
        self, connection: Connection, prefetch: int = 100, queue: str = QUEUE, watched: str = ""
    ) -> None:
        self.connection = connection
        #: (arrival, tenant, published) of each message.
        self.arrivals: list[tuple[float, str, float]] = []
        #: Seconds from push to claim, by the clock of Redis, and from the claim to the callback.
        self.waits: list[tuple[float, float]] = []
        self._watched = watched
        self._keys = PartitionKeys("online", queue)
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
        if self._watched and body["tenant"] == self._watched:
            self._watch(message)
        message.ack()

    def _watch(self, message: Any) -> None:
        arrived_s = time.time()
        held = self._channel.client.hget(
            self._keys.held(message.channel.identity.consumer), message.message_id
        )
        if held is not None:
            pushed_us, (claimed_us, _) = read_held(held)
            self.waits.append(((claimed_us - pushed_us) / 1e6, arrived_s - claimed_us / 1e6))

    def drain(self, amount: int, seconds: float) -> None:
        """Consume until `amount` messages came, or `seconds` have passed."""
        end = time.monotonic() + seconds
        while len(self.arrivals) < amount and time.monotonic() < end:
            with suppress(TimeoutError):
                self.connection.drain_events(timeout=0.5)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.cancel()
        self._channel.close()


def drain(connection: Connection, amount: int, seconds: float) -> None:
    """Acknowledge `amount` messages, or those that come within `seconds`."""
    with Sink(connection) as sink:
        sink.drain(amount, seconds)


def store(app: Any, queue: str, messages: Iterable[tuple[str, str]]) -> None:
    """Push messages in large chunks, one for each (tenant, id)."""
    records = (
        OutgoingRecord(0, id_, MessageRecord(tenant, "job", 0, 0, 0, b"{}", "[]").pack())
        for tenant, id_ in messages
    )
    with app.dq._broker.open_home(queue) as (partition, client):
        while chunk := list(islice(records, MAX_CHUNK // 2)):
            partition.push(chunk).run(client)


def warm_up(connection: Connection) -> None:
    """Publish and consume one message, which declares the queue and loads the scripts."""
    publish_many(connection, ["first"])
    drain(connection, 1, 10)


class Found(NamedTuple):
    """The messages that a consumer process got, as in `Sink`."""

    arrivals: list[tuple[float, str, float]]
    waits: list[tuple[float, float]]


@dataclass
class ConsumerProcess:
    """A `Sink` in a separate process, for `seconds`; its results are read from a file afterwards."""

    port: int
    seconds: float
    prefetch: int = 20
    #: Seconds of work for each message.
    work: float = 0.0
    queue: str = QUEUE
    watched: str = ""

    def __enter__(self) -> ConsumerProcess:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-"))
        arguments = [json.dumps(asdict(self)), str(self._folder)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.postbox", *arguments], cwd=ROOT, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder)

    def wait_ready(self) -> None:
        wait_until((self._folder / "ready").exists, 20)

    def found(self) -> Found:
        """Return all its results, after its end."""
        self._process.wait(self.seconds + 60)
        arrivals, waits = json.loads((self._folder / "found").read_text())
        return Found([tuple(row) for row in arrivals], [tuple(row) for row in waits])

    def run(self, folder: Path) -> None:
        """Consume, in the process."""
        with (
            connect("dq", self.port) as connection,
            Sink(connection, self.prefetch, self.queue, self.watched) as sink,
        ):
            (folder / "ready").touch()
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:
                before = len(sink.arrivals)
                sink.drain(before + 1, max(0.0, min(0.5, end - time.monotonic())))
                if self.work:
                    time.sleep(self.work * (len(sink.arrivals) - before))  # the work of the consumer
            (folder / "found").write_text(json.dumps([sink.arrivals, sink.waits]))


@contextmanager
def consuming(count: int, *options: Any, **more: Any) -> Iterator[list[ConsumerProcess]]:
    """Run consumer processes during the block, which begins when all of them are ready."""
    with ExitStack() as stack:
        consumers = [stack.enter_context(ConsumerProcess(*options, **more)) for _ in range(count)]
        for consumer in consumers:
            consumer.wait_ready()
        yield consumers


if __name__ == "__main__":
    ConsumerProcess(**json.loads(sys.argv[1])).run(Path(sys.argv[2]))
