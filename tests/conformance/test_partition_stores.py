"""The promises of ``PartitionStore``, over each of its holders: the calls on one partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.sqlite_broker import SqliteStore
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import ClaimReply, OutgoingRecord
from celery_dq.transport.partition_store import PartitionStore, StoreCall
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.doubles.jumping_clock import JumpingClock

LONG_MS, SHORT_MS = 60_000, 60
WAIT = 10
_serial = count()


@dataclass
class OpenPartition:
    """A partition, and a client for its calls."""

    calls: PartitionStore[Any]
    run: Callable[[StoreCall[Any, Any]], Any]

    def push(self, *ids: str, priority: int = 0, due_us: int = 0, expires_us: int = 0) -> None:
        record = MessageRecord("", "", priority, due_us, expires_us, b"[0,{},{}]", b"body").pack()
        self.run(self.calls.push([OutgoingRecord(0, each, record) for each in ids]))

    def claim(self, consumer: str = "one", want: int = 10, lease_ms: int = LONG_MS, **options: Any) -> Any:
        reply: ClaimReply = self.run(self.calls.claim(consumer, lease_ms=lease_ms, want=want, **options))
        return reply

    def claimed(self, consumer: str = "one", **options: Any) -> list[str]:
        return ids_of(self.claim(consumer, **options))

    def lose(self, consumer: str) -> None:
        """Wait until the lease of a consumer has expired, and its messages are reaped."""
        wait_until(
            lambda: self.run(self.calls.heartbeat("heir", lease_ms=LONG_MS, max_deliveries=2)).reaped, WAIT
        )


def ids_of(reply: ClaimReply) -> list[str]:
    return [entry.id for entry in reply.entries]


def tags_of(reply: ClaimReply) -> Sequence[tuple[str, str]]:
    return [entry.tag for entry in reply.entries]


@pytest.fixture(params=["redis", "sqlite"])
def partition(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> Iterator[Any]:
    name = f"store-{next(_serial)}"
    if request.param == "redis":
        in_redis = Partition(PartitionKeys("online", name, 0), load_scripts())
        with redis.Redis(port=redis_server.port, db=9) as client:
            yield OpenPartition(in_redis, lambda call: call.run(client))
        return
    store = SqliteStore(str(tmp_path / "queues"))
    opened = store.connect()
    yield OpenPartition(store.partition(name), lambda call: call.run(opened))
    opened.close()


def test_the_order_is_priority_then_age(partition: OpenPartition) -> None:
    partition.push("a", "b")
    partition.push("urgent", priority=9)
    assert partition.run(partition.calls.depth()) == 3
    assert partition.claimed(want=2) == ["urgent", "a"]
    assert partition.run(partition.calls.depth()) == 1


def test_no_message_is_given_to_two_consumers(partition: OpenPartition) -> None:
    partition.push("a")
    assert (partition.claimed("one"), partition.claimed("two")) == (["a"], [])


def test_a_sequence_of_a_producer_is_stored_once(partition: OpenPartition) -> None:
    record = MessageRecord("", "", 0, 0, 0, b"[0,{},{}]", b"body").pack()
    pushes = [partition.calls.push([OutgoingRecord(1, "a", record)], producer="p") for _ in range(2)]
    assert [partition.run(push)[0].status for push in pushes] == ["accepted", "seen"]
    assert partition.claimed() == ["a"]


def test_two_messages_may_have_one_task_id(partition: OpenPartition) -> None:
    partition.push("a", "a")
    first, second = partition.claimed()
    assert first != second


def test_a_released_message_has_its_old_place(partition: OpenPartition) -> None:
    partition.push("a", "b")
    reply = partition.claim(want=1)
    assert partition.run(partition.calls.release("one", tags_of(reply), mode="unstarted")) == 0
    again = partition.claim(want=1)
    assert (ids_of(again), again.entries[0].returned) == (["a"], False)
    partition.run(partition.calls.release("one", tags_of(again), mode="requeue"))
    third = partition.claim(want=1)
    assert (ids_of(third), third.entries[0].returned, third.entries[0].deliveries) == (["a"], True, 0)


def test_an_ack_of_an_earlier_delivery_changes_nothing(partition: OpenPartition) -> None:
    partition.push("a")
    first = partition.claim()
    partition.run(partition.calls.release("one", tags_of(first), mode="requeue"))
    second = partition.claim()
    assert partition.run(partition.calls.ack("one", finish=tags_of(first), settle=tags_of(first))) == 2
    assert partition.run(partition.calls.release("one", tags_of(first), mode="requeue")) == 1
    (tag,) = tags_of(first)
    assert partition.run(partition.calls.dead_letter("one", tag, reason="no", worker="w")) == "stale"
    assert partition.run(partition.calls.ack("one", finish=tags_of(second))) == 0
    assert partition.run(partition.calls.ack("one", finish=tags_of(second))) == 1


def test_messages_of_a_lost_consumer_return_alone_and_settled_ones_do_not(partition: OpenPartition) -> None:
    partition.push("settled", "a", "b")
    reply = partition.claim("lost", lease_ms=SHORT_MS)
    partition.run(partition.calls.ack("lost", settle=tags_of(reply)[:1]))
    partition.lose("lost")
    assert partition.claimed("two", suspects=False) == []
    suspect = partition.claim("two")
    assert (ids_of(suspect), suspect.suspect) == (["a"], True)
    assert (suspect.entries[0].deliveries, suspect.entries[0].returned) == (1, True)
    assert partition.run(partition.calls.ack("lost", finish=tags_of(reply)[1:])) == 2
    assert (partition.claimed("two"), partition.claimed("two")) == (["b"], [])


def test_a_message_that_has_lost_too_many_consumers_is_discarded(partition: OpenPartition) -> None:
    partition.push("a")
    for consumer in ("lost", "lost too"):
        assert partition.claimed(consumer, lease_ms=SHORT_MS, max_deliveries=2) == ["a"]
        partition.lose(consumer)
    reply = partition.claim("two", max_deliveries=2)
    assert (ids_of(reply), reply.entries[0].reason) == (["a"], "dead:max_deliveries")
    assert partition.run(partition.calls.ack("two", finish=tags_of(reply))) == 0
    assert partition.claimed("two") == []


def test_a_consumer_learns_that_its_lease_was_lost(partition: OpenPartition) -> None:
    partition.push("a")
    first = partition.claim("late", lease_ms=SHORT_MS)
    assert partition.run(partition.calls.heartbeat("late", lease_ms=SHORT_MS)).alive
    partition.lose("late")
    answer = partition.run(partition.calls.heartbeat("late", lease_ms=LONG_MS))
    assert not answer.alive
    assert answer.claim >= int(first.entries[0].claim)
    assert partition.claim("late").lost_up_to is None


def test_a_delayed_message_waits_until_it_is_due(partition: OpenPartition) -> None:
    partition.push("soon", due_us=int((time.time() + 0.2) * 1e6))
    reply = partition.claim(hold=True) if isinstance(partition.calls, Partition) else partition.claim()
    assert ids_of(reply) == []
    assert 0 < reply.next_look_s <= 0.2
    assert partition.run(partition.calls.depth()) == 0
    wait_until(partition.claimed, WAIT)


def test_an_expired_message_comes_with_its_reason(partition: OpenPartition) -> None:
    partition.push("old", expires_us=1)
    (entry,) = partition.claim().entries
    assert (entry.id, entry.reason) == ("old", "expired")


def test_resigning_releases_all_messages(partition: OpenPartition) -> None:
    partition.push("a", "b")
    reply = partition.claim()
    partition.run(partition.calls.ack("one", settle=tags_of(reply)[:1]))
    assert partition.run(partition.calls.resign("one")) == 0
    again = partition.claim("two")
    assert (ids_of(again), again.entries[0].returned) == (["b"], False)


def test_a_dead_letter_is_in_the_queue_no_more(partition: OpenPartition) -> None:
    partition.push("a")
    (tag,) = tags_of(partition.claim())
    call = partition.calls.dead_letter("one", tag, reason="failed", worker="w")
    assert partition.run(call) == "dead"
    assert partition.run(partition.calls.resign("one")) == 0
    assert partition.claimed("two") == []


def test_a_purge_leaves_held_messages(partition: OpenPartition) -> None:
    partition.push("held")
    held = partition.claim()
    partition.push("a", "b")
    assert partition.run(partition.calls.purge()).removed == 2
    assert partition.run(partition.calls.ack("one", finish=tags_of(held))) == 0


def test_sqlite_forgets_producers_after_their_markers_end(tmp_path: Path) -> None:
    clock = JumpingClock()
    store = SqliteStore(str(tmp_path / "queues"), clock, marker_ttl_s=60)
    opened, calls = store.connect(), store.partition("push")
    message = OutgoingRecord(1, "a", MessageRecord("", "", 0, 0, 0, b"[0,{},{}]", b"body").pack())

    def push(producer: str) -> str:
        (reply,) = calls.push([message], producer=producer).run(opened)
        return str(reply.status)

    assert [push("idle"), push("busy"), push("busy")] == ["accepted", "accepted", "seen"]
    clock.jump(59)
    assert push("busy") == "seen"
    clock.jump(2)
    assert push("new") == "accepted"
    assert opened.read("SELECT name FROM producers ORDER BY name") == [("busy",), ("new",)]
    opened.close()


def test_sqlite_keeps_and_replays_dead_letters(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "queues"))
    opened, calls = store.connect(), store.partition("push")
    partition = OpenPartition(calls, lambda call: call.run(opened))
    partition.push("a")
    (tag,) = tags_of(partition.claim())
    calls.dead_letter("one", tag, reason="failed", worker="w").run(opened)
    (letter,) = calls.dead_letters().run(opened)
    assert (letter.id, letter.reason, letter.worker, letter.deliveries) == ("a", "failed", "w", 0)
    assert [calls.replay("a").run(opened), calls.replay("a").run(opened)] == ["a", None]
    assert partition.claimed() == ["a"]
    opened.close()
