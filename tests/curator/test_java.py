"""Queues that are shared with Java programs: round trips with the real Curator in both directions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_dq.curator.queue import (
    DistributedDelayQueue,
    DistributedIdQueue,
    DistributedPriorityQueue,
    DistributedQueue,
    SimpleDistributedQueue,
)
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.zookeeper.session import Session
from tests.curator.collecting import Collector
from tests.curator.java import CuratorPeer, compile_peer

Make = Callable[..., Any]
LOCKS = "/locks"
TEXT = {"serializer": "text"}
both = pytest.mark.parametrize("lock_path", [None, LOCKS], ids=["deleting", "locking"])


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    compile_peer(folder)
    return folder


@pytest.fixture(scope="module")
def shared_hosts(zookeeper: ZooKeeperServer) -> str:
    return f"{zookeeper.hosts}/java"


@pytest.fixture(scope="module")
def peer(classes: Path, shared_hosts: str) -> Iterator[CuratorPeer]:
    # The chroot must exist before the Java program connects.
    session = Session(shared_hosts)
    session.open()
    session.close()
    with CuratorPeer(classes, shared_hosts) as peer:
        yield peer


@pytest.fixture
def hosts(shared_hosts: str) -> str:
    """All tests share a chroot with the Java program, and each test has its own path."""
    return shared_hosts


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    return "/" + "".join(c for c in request.node.name if c.isalnum())


def nodes(session: Session, path: str) -> dict[str, bytes]:
    client = session.open()
    return {name: client.get(f"{path}/{name}")[0] for name in sorted(client.get_children(path))}


def test_both_write_the_same_names_and_bytes(
    make: Make, peer: CuratorPeer, session: Session, path: str
) -> None:
    items = ["hello", "ünïcode €", "", "x" * 300]
    kinds: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("plain", DistributedQueue, ()),
        ("id", DistributedIdQueue, ("order 7-ü.%x",)),
        ("priority", DistributedPriorityQueue, (7,)),
        ("priority", DistributedPriorityQueue, (-(2**31),)),
        ("delay", DistributedDelayQueue, (1_700_000_000.123,)),
    )
    for kind, build, argument in kinds:
        java, python = f"{path}/java{kind}{argument}", f"{path}/python{kind}{argument}"
        given = int(argument[0] * 1000) if kind == "delay" else (*argument, "-")[0]
        peer.put(kind, java, given, *items)
        queue = make(build, python, **TEXT)
        for item in items:
            queue.put(item, *argument)
        assert nodes(session, java) == nodes(session, python)
        assert len(nodes(session, java)) == len(items)
    peer.put("multi", f"{path}/multi", "-", *items)
    make(DistributedQueue, f"{path}/ours", **TEXT).put_multi(items)
    assert nodes(session, f"{path}/multi") == nodes(session, f"{path}/ours")
    peer.put("simple", f"{path}/simple", "-", *items)
    make(SimpleDistributedQueue, f"{path}/oursimple").offer_each([item.encode() for item in items])
    assert nodes(session, f"{path}/simple") == nodes(session, f"{path}/oursimple")


@both
def test_java_puts_and_python_consumes(
    make: Make, peer: CuratorPeer, path: str, lock_path: str | None
) -> None:
    seen = Collector()
    peer.put("plain", path, "-", "a", "b")
    peer.put("multi", path, "-", "c", "d")
    make(DistributedQueue, path, consumer=seen, lock_path=lock_path, **TEXT).start()
    assert seen.wait(4) == [*"abcd"]
    # Curator has created the folder as a container, which the server deletes when it is empty.
    peer.put("plain", path, "-", "e")
    assert seen.wait(5)[-1] == "e"


@both
def test_python_puts_and_java_consumes(
    make: Make, peer: CuratorPeer, path: str, lock_path: str | None
) -> None:
    now = time.time()
    queue = make(DistributedQueue, f"{path}/plain", **TEXT)
    queue.put_each(["a", "b"])
    queue.put_multi(["c", "d"])
    assert peer.take("plain", f"{path}/plain", lock_path, 4) == [*"abcd"]
    queue = make(DistributedPriorityQueue, f"{path}/priority", **TEXT)
    for priority in (5, -2, 0):
        queue.put(str(priority), priority)
    assert peer.take("priority", f"{path}/priority", lock_path, 3) == ["-2", "0", "5"]
    queue = make(DistributedDelayQueue, f"{path}/delay", **TEXT)
    queue.put("late", now + 0.2)
    queue.put("early", now)
    assert peer.take("delay", f"{path}/delay", lock_path, 2) == ["early", "late"]
    queue = make(DistributedIdQueue, f"{path}/id", **TEXT)
    queue.put("one", "a/b")
    queue.put("two", "plain id")
    assert peer.take("id", f"{path}/id", lock_path, 2) == ["one", "two"]
    simple = make(SimpleDistributedQueue, f"{path}/simple")
    simple.offer_each([b"x", b"y"])
    assert peer.take("simple", f"{path}/simple", None, 2) == ["x", "y"]


def test_other_kinds_put_by_java(make: Make, peer: CuratorPeer, path: str) -> None:
    for priority in (5, -2, 0):
        peer.put("priority", f"{path}/priority", priority, str(priority))
    queue = make(DistributedPriorityQueue, f"{path}/priority", lock_path=LOCKS, **TEXT)
    assert [queue.get(30).item for _each in range(3)] == ["-2", "0", "5"]
    later = int(time.time() * 1000) + 3_600_000
    peer.put("delay", f"{path}/delay", later, "later")
    peer.put("delay", f"{path}/delay", 1000, "now")
    queue = make(DistributedDelayQueue, f"{path}/delay", lock_path=LOCKS, **TEXT)
    assert queue.get(30).item == "now"
    assert queue.poll() is None
    peer.put("simple", f"{path}/simple", "-", "x", "y")
    simple = make(SimpleDistributedQueue, f"{path}/simple")
    assert [simple.take(), simple.take()] == [b"x", b"y"]


@pytest.mark.parametrize("kind", ["priority", "delay"])
@both
def test_an_item_that_a_failing_java_consumer_puts_back_is_served(
    make: Make, peer: CuratorPeer, session: Session, path: str, kind: str, lock_path: str | None
) -> None:
    """The item has lost its priority or due time with its name, and comes first, as in Java."""
    build = DistributedPriorityQueue if kind == "priority" else DistributedDelayQueue
    peer.put(kind, path, 1, "failed")
    peer.fail(kind, path, LOCKS)
    (name,) = session.open().get_children(path)
    assert re.fullmatch(r"queue-\d{10}", name)
    peer.put(kind, path, 1 if kind == "delay" else -7, "other")
    queue = make(build, path, lock_path=lock_path, **TEXT)
    assert [queue.get(10).item for _ in range(2)] == ["failed", "other"]


def test_either_removes_items_that_the_other_has_put(make: Make, peer: CuratorPeer, path: str) -> None:
    queue = make(DistributedIdQueue, path, **TEXT)
    peer.put("id", path, "50% off", "java")
    queue.put("python", "an id")
    queue.put("python", "a/b")
    assert queue.remove("50% off") == 1
    assert peer.remove(path, "an id") == 1
    # A Java program sees the percent-encoded id.
    assert peer.remove(path, "a%2Fb") == 1
    assert queue.size() == 0


def test_java_and_python_share_a_queue_under_locks(make: Make, peer: CuratorPeer, path: str) -> None:
    queue = make(DistributedQueue, path, lock_path=LOCKS, **TEXT)
    queue.put_each(["held", "free"])
    held = queue.get(30)
    # Java does not take an item that Python has locked.
    assert peer.take("plain", path, LOCKS, 1) == ["free"]
    held.requeue()
    assert peer.take("plain", path, LOCKS, 1) == ["held"]
