from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import pools

import celery_dq
from celery_dq.app.publishing import task_apply_async
from celery_dq.app.publishing.dedup_stage import DedupStage
from celery_dq.app.publishing.results import result_of
from celery_dq.app.publishing.template_stage import TemplateStage
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.transport import envelope
from celery_dq.transport.message_record import MessageRecord
from tests.apps import DQCelery
from tests.broker.proxy import Proxy
from tests.producer.producer_harness import Bench, ProducerHarness

MakeApp = Callable[..., DQCelery]


class Stored:
    """The messages in a queue of the broker."""

    def __init__(self, url: str) -> None:
        self.client: Any = redis.Redis.from_url(url.replace("dq-redis://", "redis://"), socket_timeout=30)

    def ids(self, queue: str) -> list[str]:
        """Return the message ids of all tenants in the order of their service."""
        keys = PartitionKeys("online", queue)
        literal = keys.prefix.replace("[", "\\[").replace("*", "\\*")
        waiting: list[tuple[float, str]] = []
        for key in self.client.scan_iter(match=f"{literal}tenant:*", count=1000):
            entries = self.client.zrange(key, 0, -1, withscores=True)
            waiting += [(score, entry.decode()) for entry, score in entries]
        for single in self.client.hvals(keys.single):
            waiting.append((struct.unpack_from(">d", single)[0], single[8:].decode()))
        return [entry for _, entry in sorted(waiting)]

    def count(self, queue: str) -> int:
        return int(self.client.hlen(PartitionKeys("online", queue).messages))

    def record(self, queue: str, task_id: str) -> MessageRecord:
        raw = self.client.hget(PartitionKeys("online", queue).messages, task_id)
        assert raw is not None, f"{task_id} is not in {queue}: {self.ids(queue)}"
        return MessageRecord.unpack(raw)

    def message(self, queue: str, task_id: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Return headers, properties and parsed body."""
        record = self.record(queue, task_id)
        headers, properties, _, _ = envelope.unpack(record.envelope)
        return headers, properties, json.loads(record.body)


@pytest.fixture
def dq_url(redis_url: str) -> str:
    return redis_url.replace("redis://", "dq-redis://")


@pytest.fixture
def stored(dq_url: str) -> Iterator[Stored]:
    found = Stored(dq_url)
    yield found
    found.client.close()


@pytest.fixture
def make_app(dq_url: str, tmp_path: Path) -> Iterator[MakeApp]:
    """Make apps with a buffer in a folder of the test, which are closed at its end."""
    made: list[DQCelery] = []

    def make(broker: str = dq_url, **conf: Any) -> DQCelery:
        plain = Celery("shop", broker=broker, set_as_current=False)
        plain.conf.update({"dq_buffer": True, "dq_buffer_folder": str(tmp_path / "spill"), **conf})
        app: DQCelery = celery_dq.setup(plain)
        made.append(app)
        return app

    yield make
    for app in made:
        app.dq.buffer.close(timeout=0.2)
        app.close()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def distant_app(make_app: MakeApp, proxy: Proxy, dq_url: str) -> DQCelery:
    """An app whose broker is behind the proxy, and that tries a direct call several times."""
    policy = {"max_retries": 5, "interval_start": 0, "interval_step": 0.01}
    url = proxy.url(dq_url)
    return make_app(url, dq_buffer=False, dq_breaker_failures=0, task_publish_retry_policy=policy)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ProducerHarness]:
    harness = ProducerHarness(tmp_path / "spill")
    yield harness
    harness.shelf.down = True
    for producer in harness.made:
        producer.close(0.05)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.message_store.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the results of the calls that were made from a template."""
    results: list[Any] = []
    made: list[Any] = []
    send_from, answer = TemplateStage.send_from, DedupStage.answer

    def noted(*args: Any) -> Any:
        result = send_from(*args)
        if result is not None:
            made.append(result)
        return result

    def answered(self: DedupStage, call: Any, result: Any) -> Any:
        final = answer(self, call, result)
        if made and made[-1] is result:
            results.append(final)
        return final

    def noted_past_the_stages(*args: Any) -> Any:
        results.append(result_of(*args))
        return results[-1]

    monkeypatch.setattr(task_apply_async, "result_of", noted_past_the_stages)
    monkeypatch.setattr(TemplateStage, "send_from", noted)
    monkeypatch.setattr(DedupStage, "answer", answered)
    return results


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis for the tests of one file, which may change its settings."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def admin(server: RedisServer) -> Iterator[Any]:
    """A client of that server, which is empty."""
    server.flush()
    with redis.Redis(port=server.port, socket_timeout=20) as client:
        yield client
    pools.reset()
