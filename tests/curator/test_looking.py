"""``celery dq zookeeper``: a queue from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kazoo.exceptions import NoAuthError
from kazoo.security import make_digest_acl

import celery_dq
from celery_dq.app.checks.doctor import check_server
from celery_dq.curator.browse import look
from celery_dq.curator.framing import frame
from celery_dq.curator.queue import (
    DistributedDelayQueue,
    DistributedIdQueue,
    DistributedPriorityQueue,
    DistributedQueue,
    SimpleDistributedQueue,
)
from celery_dq.errors import ConfigurationError
from celery_dq.zookeeper.session import Session
from tests.dq_command import run_dq

Make = Callable[..., Any]


def run(*words: str, status: int = 0, broker: str = "dq-redis://", **settings: Any) -> str:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(settings)
    celery_dq.setup(app)
    return run_dq(app, "zookeeper", *words, status=status).output


def test_marks_of_all_kinds_in_the_order_of_serving(make: Make, session: Session) -> None:
    ids = make(DistributedIdQueue, "/id")
    ids.put("x", "a/b")
    ids.put("y", "c")
    priorities = make(DistributedPriorityQueue, "/priority")
    for priority in (3, -(2**31), -1):
        priorities.put("x", priority)
    delays = make(DistributedDelayQueue, "/delay")
    delays.put("x", 2e9)
    delays.put("x", 1e9)
    delays.put("x", 1e15)
    make(SimpleDistributedQueue, "/simple").offer(b"bytes")
    assert [view.mark for view in look(session, "/id", "id")] == ["a/b", "c"]
    # A failing Curator consumer requeues an item of any priority under such a name.
    session.open().create("/priority/queue-", frame([b"1"]), sequence=True)
    assert [view.mark for view in look(session, "/priority", "priority")] == [None, -(2**31), -1, 3]
    years = [view.mark.year for view in look(session, "/delay", "delay")]  # type: ignore[union-attr]
    assert years == [2001, 2033, 9999]
    assert [view.items for view in look(session, "/simple", "simple")] == [1]
    assert look(session, "/simple", "plain") == []
    with pytest.raises(ConfigurationError, match="no folder '/missing'"):
        look(session, "/missing", "plain")
    with pytest.raises(ConfigurationError, match="kind = 'heap'"):
        look(session, "/id", "heap")


def test_the_command(make: Make, session: Session, hosts: str) -> None:
    queue = make(DistributedQueue, "/mail", lock_path="/mail-locks")
    queue.put_multi([1, 2])
    queue.put(3)
    session.open().create("/mail/queue-", b"junk", sequence=True)
    session.open().create(
        "/mail/queue-", b"theirs", sequence=True, acl=[make_digest_acl("boss", "secret", all=True)]
    )
    with queue.get(30):
        rows = json.loads(run(hosts, "/mail", "--locks", "/mail-locks", "--json"))
        assert [(row["items"], row["locked"]) for row in rows][:3] == [(2, True), (1, False), (None, False)]
        assert [row["problem"] for row in rows] == ["", "", "not in Curator's framing", "denied by its ACL"]
        assert (rows[3]["items"], rows[3]["size"]) == (None, 6)
        assert [row["remedy"] for row in rows[:2]] == ["", ""]
        text = run(hosts, "/mail").splitlines()
        assert text[-2] == f"not in Curator's framing: {rows[2]['remedy']}"
        assert text[-1] == f"denied by its ACL: {rows[3]['remedy']}"
        assert "setAcl" in rows[3]["remedy"]
        assert "queue-0000000001" in run(hosts, "/mail", "--limit", "2")
    session.open().create("/idle", b"")
    assert "No node is in '/idle'" in run(hosts, "/idle")
    assert "ZooKeeper has no folder '/mial'. Did you mean '/mail'?" in run(hosts, "/mial", status=1)
    assert "ZooKeeper has no folder '/a/b'." in run(hosts, "/a/b", status=1)
    assert "PATH = 'mail' is invalid" in run(hosts, "mail", status=1)


@pytest.mark.parametrize("setting", ["broker_url", "dq_election"])
def test_nodes_older_than_the_credentials_are_found_and_closed(
    setting: str, session: Session, hosts: str
) -> None:
    def settings(login: str) -> dict[str, Any]:
        if setting == "broker_url":
            return {"broker": f"dq-zookeeper://{login and login + '@'}{hosts}"}
        options = {"auth": [("digest", login)]} if login else {}
        return {"broker": "memory://", "dq_election": f"zookeeper://{hosts}", "dq_election_options": options}

    def found(login: str) -> dict[str, str]:
        conf = settings(login)
        app = Celery("shop", set_as_current=False, broker=conf.pop("broker"))
        app.conf.update(conf)
        celery_dq.setup(app)
        with app:
            return {each.code: each.remedy for each in check_server(app)}

    stranger = session.open()
    stranger.create("/dq/online/item", b"old", makepath=True)
    stranger.create("/mail", b"")
    assert "W037" not in found("")
    command = "celery dq zookeeper "
    _, _, words = found("boss:secret")["W037"].partition(command)
    assert "no credentials are set" in run(*words.split(), status=1, **settings(""))
    assert json.loads(run(*words.split(), "--json", **settings("boss:secret"))) == {"closed": 3}
    assert "0 nodes closed." in run(*words.split(), **settings("boss:secret"))
    assert "W037" not in found("boss:secret")
    with pytest.raises(NoAuthError):
        stranger.set("/dq/online/item", b"forged")
    stranger.set("/mail", b"not of celery-dq")


def test_the_command_has_the_credentials_of_the_settings(session: Session, hosts: str) -> None:
    acl = [make_digest_acl("boss", "secret", all=True)]
    session.open().create("/closed", acl=acl)
    # The credentials of another server are not sent to this one.
    assert "boss" not in run(hosts, "/closed", status=1, broker="dq-zookeeper://boss:secret@localhost:1")
    assert "No node is in" in run(hosts, "/closed", broker=f"dq-zookeeper://boss:secret@{hosts}")
    settings: dict[str, Any] = {"dq_election": f"zookeeper://{hosts}"}
    settings["dq_election_options"] = {"auth": [("digest", "boss:secret")]}
    assert "No node is in" in run(hosts, "/closed", **settings)
