"""An app on a real Redis, and its metrics over HTTP."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from celery_dq.metrics.server import MetricsServer
from tests.dashboard.shop import make_app as make_shop

#: A sample: its name and its labels, sorted.
Key = tuple[str, tuple[tuple[str, str], ...]]


class Metrics:
    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.kinds = {family.name: family.type for family in families}
        self.samples: dict[Key, float] = {}
        for family in families:
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in self.samples
                self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """Return the value of one sample, of queue ``push`` unless a queue is named."""
        return self.samples[name, tuple(sorted(labels.items()))]

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        """Return all samples of a name, by the values of their labels in the order of the labels' names."""
        return {
            tuple(value for _, value in labels): count
            for (each, labels), count in self.samples.items()
            if each == name
        }


def scrape(url: str) -> Metrics:
    with urllib.request.urlopen(url, timeout=20) as reply:
        assert reply.status == 200
        return Metrics(reply.read().decode())


Serve = Callable[[Any], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that serves the metrics of an app, and returns their URL."""
    with ExitStack() as stack:

        def serve(app: Any) -> str:
            server = MetricsServer(app, "127.0.0.1", 0)
            thread = threading.Thread(target=server.serve)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(server.stop)
            return server.url

        yield serve


@pytest.fixture
def broker_url(redis_url: str) -> str:
    return redis_url.replace("redis://", "dq-redis://", 1)


MakeApp = Callable[..., Any]


@pytest.fixture
def make_app(broker_url: str) -> Iterator[MakeApp]:
    """A function that makes a producer's app with task ``notify`` in queue ``push``, from its settings."""
    made: list[Any] = []

    def make(broker: str = broker_url, **conf: Any) -> Any:
        made.append(make_shop(broker, **conf))
        return made[-1]

    yield make
    for app in made:
        producers: Any = app.pool
        producers.force_close_all()
        app.close()
