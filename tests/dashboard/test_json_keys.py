"""The names in the JSON of commands and pages, and those of the metrics, which programs of users read.

``json_keys.txt`` has them, an object a line. A change adds its names; a missing name is a broken promise.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from celery_dq.metrics.table import METRICS
from tests.dq_command import run_dq
from tests.integration.shop import claim, dead_letter, send, throttle

KNOWN = Path(__file__).with_name("json_keys.txt")
READS = ("queues", "status", "leaders", "partitions", "peek push", "peek push --delayed", "dead list push")


def names_in(value: Any, path: str) -> Iterator[str]:
    """Yield the path of each key. Elements of a list share theirs."""
    if isinstance(value, list):
        for element in value:
            yield from names_in(element, f"{path}[]")
    elif isinstance(value, dict):
        for key, element in value.items():
            yield f"{path}.{key}"
            yield from names_in(element, f"{path}.{key}")


def names_of_commands(broker: str, app: Any, *commands: str) -> set[str]:
    found = set()
    for words in commands:
        result = run_dq(app, f"{words} --json", status=None)
        assert result.exit_code in (0, 1), (words, result.output)
        # Paths begin with the name of the command, without the names of this test's queue and tenants.
        name = " ".join(word for word in words.split() if word.isalpha() and word not in ("push", "slow"))
        found |= {*names_in(json.loads(result.stdout), f"{broker} celery dq {name}")}
    return found


def names_of_pages(broker: str, client: Any, *pages: str, **query: Any) -> set[str]:
    found = set()
    for page in pages:
        answer = client.get(f"/dq/{page}", {**query, "format": "json"})
        assert answer.status_code == 200, answer.content.decode()
        found |= {*names_in(json.loads(answer.content), f"{broker} page {page or '/'}")}
    return found


def compare(broker: str, found: set[str]) -> None:
    lines = [line for line in KNOWN.read_text().splitlines() if line.startswith(f"{broker} ")]
    objects = (line.partition(": ") for line in lines)
    known = {f"{path}.{name}" for path, _, names in objects for name in names.split(" ")}
    assert not known - found, f"names that users read are gone: {sorted(known - found)}"
    by_object: dict[str, list[str]] = defaultdict(list)
    for path, _, name in (each.rpartition(".") for each in sorted(found)):
        by_object[path].append(name)
    new = {f"{path}: {' '.join(names)}" for path, names in by_object.items()} - {*lines}
    assert not new, f"replace their objects in {KNOWN.name}:\n" + "\n".join(sorted(new))


@pytest.fixture
def make_shop(use_app: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A function that makes an app with a buffer, so that its parts are shown as well."""

    def make_shop(broker_url: str, **settings: Any) -> Any:
        return use_app(broker_url, dq_buffer_folder=str(tmp_path / "spill"), **settings)

    return make_shop


@pytest.fixture
def busy(make_shop: Callable[..., Any], redis_url: str) -> Any:
    """An app with waiting, delayed, running and dead messages, throttled tenants and pauses."""
    shop = make_shop(redis_url.replace("redis://", "dq-redis://", 1), dq_singleton_queues=["ledger"])
    shop.conf.dq_queues = {"wide": {"partitions": 2}}
    dead_letter(shop, "a")
    send(shop, "a", queue="wide")
    send(shop, "slow")
    claim(shop)
    shop.dq.quotas.set("push", "slow", rate="1/h")
    send(shop, "slow", "slow")
    throttle(shop, "slow")
    send(shop, "later", countdown=3600)
    shop.dq.queues["push"].pause(until=timedelta(hours=1))
    return shop


def test_the_names_of_the_tenant_broker(busy: Any, operator: Any) -> None:
    (waiting,) = busy.dq.queues["push"].peek(1, tenant="slow")
    (letter,) = busy.dq.dead_letters["push"].list()
    own = (
        *("workers", "tenants push", "top", "audit", "dedup verdicts push", "partitions push"),
        *("quotas get push slow", "quotas export", "explain --queue push --tenant slow", "spill list"),
    )
    found = names_of_commands(
        "dq-redis", busy, *READS, *own, f"find {waiting.id}", f"dead show push {letter.id}"
    )
    found |= names_of_pages("dq-redis", operator, "", "leaders/", "workers/", "audit/", "dedup/")
    found |= names_of_pages("dq-redis", operator, "queue/", "dead-letters/", queue="push")
    found |= names_of_pages("dq-redis", operator, "tenant/", queue="push", tenant="slow")
    found |= names_of_pages("dq-redis", operator, "message/", id=waiting.id)
    compare("dq-redis", found)


def test_the_names_of_the_zookeeper_broker(make_shop: Callable[..., Any], operator: Any, hosts: str) -> None:
    shop = make_shop(f"dq-zookeeper://{hosts}", dq_election=f"zookeeper://{hosts}")
    shop.conf.dq_singleton_queues = ["ledger"]
    (waiting,) = send(shop, "a")
    send(shop, "later", countdown=3600)
    commands = ("spill list", f"find {waiting}", "partitions push")
    found = names_of_commands("dq-zookeeper", shop, *READS, *commands)
    found |= names_of_pages("dq-zookeeper", operator, "", "leaders/", "workers/", "audit/")
    found |= names_of_pages("dq-zookeeper", operator, "queue/", "dead-letters/", queue="push")
    found |= names_of_pages("dq-zookeeper", operator, "message/", id=waiting)
    compare("dq-zookeeper", found)


def test_the_names_of_the_metrics() -> None:
    found = {f"metrics {each.name}.{label}" for each in METRICS for label in each.labels or ("",)}
    compare("metrics", found)
