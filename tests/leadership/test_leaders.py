"""The leaders as ``app.dq.leaders`` and ``celery dq leaders`` read them from the server of the election."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

import celery_dq
from celery_dq.inspector.workers import leader_snapshot
from celery_dq.singleton.elections import Elections
from celery_dq.testing.waiting import wait_until
from tests.dq_command import run_dq
from tests.leadership.election_harness import ElectionHarness

#: The broker, and ``dq_election``.
PLACES = {
    "broker": ("dq-redis", ""),
    "redis": ("memory", "redis"),
    "zookeeper": ("memory", "zookeeper"),
    "beside": ("dq-redis", "zookeeper"),
}


def test_a_leader_leads_until_it_resigns(elections: ElectionHarness) -> None:
    first, looker = elections.candidate(), elections.candidate()
    assert leader_snapshot(looker).state == "vacant"
    wait_until(first.become_candidate)
    assert leader_snapshot(looker).leader == ""
    first.accept(6, 12.5)
    seen = leader_snapshot(looker)
    assert (seen.state, seen.leader, seen.token, seen.candidates) == ("leads", first.who, 7, (first.who,))
    assert seen.since is not None
    assert seen.since.timestamp() == 12.5
    # ZooKeeper keeps the name of a leader that did not hand over.
    first.resign(clean=False)
    assert leader_snapshot(looker).state == "vacant"


def test_a_leader_that_is_a_candidate_again_does_not_lead(elections: ElectionHarness) -> None:
    first, second = elections.candidate(), elections.candidate()
    wait_until(first.become_candidate)
    first.accept(0, 1.0)
    second.become_candidate()
    first.resign(clean=False)
    wait_until(second.become_candidate)
    first.become_candidate()
    seen = leader_snapshot(second)
    assert (seen.state, seen.leader) == ("vacant", "")
    assert set(seen.candidates) == {first.who, second.who}


@pytest.fixture(params=PLACES)
def app(request: pytest.FixtureRequest) -> Iterator[Any]:
    broker, election = PLACES[request.param]
    redis_url = request.getfixturevalue("redis_url")
    servers = {"": "", "redis": redis_url}
    if election == "zookeeper":
        servers["zookeeper"] = f"zookeeper://{request.getfixturevalue('hosts')}"
    url = redis_url.replace("redis://", "dq-redis://", 1) if broker == "dq-redis" else "memory://"
    with Celery("shop", broker=url, set_as_current=False) as made:
        made.conf.update(
            task_default_queue="push", dq_election=servers[election], dq_singleton_queues=["ledger"]
        )
        celery_dq.setup(made)
        yield made
        producers: Any = made.pool
        producers.force_close_all()


@pytest.fixture
def candidates(app: Any) -> Iterator[Callable[[str], Any]]:
    """A function that returns a candidate of a worker of the app."""
    with contextlib.ExitStack() as stack:
        client = None
        if app.dq.serves_queues():
            client = stack.enter_context(app.connection_for_write()).default_channel.client
        elections = Elections(app.dq.options, "worker", lambda: client, "the test")
        stack.callback(elections.close)
        yield elections.candidate


def leaders(app: Any, *words: str, status: int = 0) -> str:
    return run_dq(app, "leaders", *words, status=status).output


def test_leaders_of_each_server_of_elections(app: Any, candidates: Callable[[str], Any]) -> None:
    (row,) = json.loads(leaders(app, "--json"))
    assert (row["name"], row["state"], row["token"]) == ("ledger", "vacant", 0)
    for name in ("ledger", "celery beat of shop"):
        candidate = candidates(name)
        wait_until(candidate.become_candidate)
        candidate.accept(0, 1_800_000_000.0)
    beat, ledger = json.loads(leaders(app, "--json"))
    assert (beat["name"], beat["state"]) == ("celery beat of shop", "leads")
    assert ledger["token"] == 1
    assert ledger["leader"].startswith("worker:")
    assert ledger["since"] == "2027-01-15T08:00:00+00:00"
    table = leaders(app, "ledger").splitlines()
    assert table[0].split() == ["name", "state", "leader", "token", "since", "candidates"]
    assert len(table) == 2
    assert "'lodger' never had a leader. Did you mean 'ledger'?" in leaders(app, "lodger", status=1)


def test_a_broker_that_holds_no_elections() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    celery_dq.setup(app)
    assert "set dq_election to zookeeper://" in leaders(app, status=1)
