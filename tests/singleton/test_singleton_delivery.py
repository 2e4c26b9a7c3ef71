"""The order in which one channel delivers a singleton queue, turned by hand on a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.envelope import pack
from celery_dq.transport.in_flight.message import Message
from celery_dq.transport.in_flight.pending_acks import InFlightMessage
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consuming import singleton_delivery
from celery_dq.transport.redis.consuming.fetcher import RedisFetcher
from celery_dq.transport.redis.consuming.singleton_delivery import SingletonDelivery
from celery_dq.transport.redis.consuming.subscriptions import Subscription
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.pipelined_connection import has_arrived
from celery_dq.transport.redis.store.queue import Queue
from tests.broker.proxy import Proxy as CuttingProxy
from tests.doubles.jumping_clock import JumpingClock
from tests.lua.partition_scripts import PartitionScripts
from tests.singleton.test_lost_acks import FirmTerm, send_pending_acks

QUEUE = "redis_posting"
#: Longer than a test: no heartbeat helps.
LEASE_S = 600.0
#: Of a message without headers.
ENVELOPE = pack({}, {}, "application/json", "utf-8")
#: So much work may be claimed ahead that the pace does not matter.
CLAIM_AHEAD_S = 1000.0


class Channel:
    """Delivers the messages of one term to a worker with one slot, when the test turns it."""

    def __init__(self, scripts: PartitionScripts, url: str) -> None:
        self.got: list[Message] = []
        self._pool = redis.ConnectionPool.from_url(url)
        self.clock = JumpingClock()
        process = ConsumerIdentity(LEASE_S, self.clock)
        self.process = process
        self.ledger = process.in_flight
        self.fetcher = RedisFetcher(process, self._pool, self)
        self.delivery = SingletonDelivery(
            process,
            FirmTerm(),  # type: ignore[arg-type]  # as much of it as is asked for
            fetcher=lambda: self.fetcher,
            clients=lambda: lambda: redis.Redis.from_url(url),
            deliver=self.got.append,
            release=lambda message: self.ledger.release(message.delivery_tag, "unstarted"),
            claim_ahead_s=CLAIM_AHEAD_S,
            in_turn=lambda: 64,
            in_loop=False,
        )
        assert scripts.partition.fence(1).run(scripts.client).accepted
        self.delivery.add(Queue(QUEUE, scripts.partition))

    def capacity(self) -> tuple[int, int]:
        return 16, 16

    def can_keep_next_look(self) -> bool:
        return True

    @property
    def acks_may_wait(self) -> bool:
        return True

    def receive(self, source: Subscription, entry: ClaimedEntry, tag: str) -> None:
        record = MessageRecord.unpack(entry.record)._replace(envelope=ENVELOPE)
        self.delivery.add_message(Message(record, entry, tag, source.queue.name, self))

    @property
    def ids(self) -> list[str]:
        return [str(message.message_id) for message in self.got]

    def turn_until(self, condition: Callable[[], Any]) -> None:
        def turned() -> Any:
            self.delivery.follow_leaderships()
            self.fetcher.tick()
            for each in self.fetcher.connections():
                if has_arrived(each.connection):
                    each.read()
            return condition()

        wait_until(turned, interval_s=0.001, what=lambda: str(self.ids))

    def finish_rest(self, ids: list[str]) -> None:
        """Let each message end when it comes, until these were delivered."""

        def ended() -> bool:
            for message in self.got:
                self.ledger.finish(message.delivery_tag)
            return len(self.got) >= len(ids)

        self.turn_until(ended)
        assert self.ids == ids

    def close(self) -> None:
        self.delivery.close()
        self.fetcher.close()
        self._pool.disconnect()


@pytest.fixture
def scripts(redis_url: str) -> Iterator[PartitionScripts]:
    with redis.Redis.from_url(redis_url) as client:
        yield PartitionScripts(client, QUEUE)


@pytest.fixture
def channel(scripts: PartitionScripts, redis_url: str) -> Iterator[Channel]:
    channel = Channel(scripts, redis_url)
    scripts.push("first")
    channel.turn_until(lambda: channel.ids == ["first"])
    channel.ledger.finish(channel.got[0].delivery_tag)  # now the channel knows a pace, and delivers two
    yield channel
    channel.close()


def deliver_two(scripts: PartitionScripts, channel: Channel) -> tuple[InFlightMessage, InFlightMessage]:
    """Push "a" and "b", and return both when they were delivered and no claim is under way."""
    scripts.push("a", "b")
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"] and not channel.fetcher.expects_answer)
    first, second = (channel.ledger.get(message.delivery_tag) for message in channel.got[1:])
    assert first is not None
    assert second is not None
    return first, second


def test_a_message_comes_back_before_the_next_although_the_one_behind_it_is_over(
    scripts: PartitionScripts, channel: Channel
) -> None:
    scripts.push("a", "b", "c", "d")
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"])
    channel.ledger.finish(channel.got[2].delivery_tag)  # it was revoked, say, and needed no slot
    channel.ledger.release(channel.got[1].delivery_tag, "requeue")
    channel.finish_rest(["first", "a", "b", "a", "c", "d"])


def test_a_message_waits_for_the_confirmation_of_a_dead_letter_before_it(
    scripts: PartitionScripts, channel: Channel
) -> None:
    scripts.push("a", "b", "c")
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"])
    channel.ledger.dead_letter(channel.got[1].delivery_tag, "failed", b"")
    behind = channel.ledger.get(channel.got[2].delivery_tag)
    assert behind is not None
    assert behind.unfinished_predecessor() is not None
    channel.turn_until(lambda: behind.unfinished_predecessor() is None)
    channel.finish_rest(["first", "a", "b", "c"])


def test_a_claim_that_left_before_a_message_came_back_brings_nothing_to_deliver(
    scripts: PartitionScripts, channel: Channel
) -> None:
    scripts.push("a")
    channel.turn_until(lambda: channel.ids == ["first", "a"])
    channel.turn_until(lambda: not channel.fetcher.expects_answer)
    scripts.push("b")
    channel.fetcher.look_again(PartitionKeys("online", QUEUE).prefix)
    channel.fetcher.tick()
    assert channel.fetcher.expects_answer  # the claim that will bring "b"
    channel.ledger.release(channel.got[1].delivery_tag, "requeue")
    channel.finish_rest(["first", "a", "a", "b"])


def test_the_next_messages_are_delivered_when_half_of_the_last_ones_are_over(
    scripts: PartitionScripts, channel: Channel
) -> None:
    """One by one, each would cost a turn of the event loop."""
    names = list("abcdefgh")
    scripts.push(*names)
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"])
    for message in channel.got[1:]:
        channel.ledger.finish(message.delivery_tag)
    channel.turn_until(lambda: len(channel.got) == len(["first", *"abcdef"]))
    third, fourth = channel.got[3:5]
    channel.ledger.finish(third.delivery_tag)
    channel.delivery.follow_leaderships()
    assert channel.ids == ["first", *"abcdef"]
    channel.ledger.finish(fourth.delivery_tag)
    channel.finish_rest(["first", *names])


def test_acks_wait_for_the_answer_to_those_under_way(
    scripts: PartitionScripts, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short messages end faster than Redis answers, and a call for each would be their greatest cost."""
    monkeypatch.setattr(singleton_delivery, "most_unconfirmed", lambda service_s: 1)
    first, second = deliver_two(scripts, channel)
    for each in (first, second):
        channel.ledger.finish(each.tag)
        channel.delivery.follow_leaderships()
        assert len(channel.fetcher.pipeline) == 1
    channel.clock.jump(1.0)  # no ack waits so long for a claim
    channel.fetcher.tick()
    assert len(channel.fetcher.pipeline) == 1
    assert channel.fetcher.next_deadline() > channel.clock.monotonic()  # the loop sleeps until the answer
    channel.turn_until(lambda: second.confirmed)


@pytest.mark.parametrize("earlier_by", ["the loop", "the heartbeat"])
def test_no_ack_overtakes_an_earlier_one_on_another_connection(
    scripts: PartitionScripts,
    redis_server: RedisServer,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    earlier_by: str,
) -> None:
    """If the process died then, the first message would run again after the second, which would not."""
    monkeypatch.setattr(singleton_delivery, "most_unconfirmed", lambda service_s: 1)
    with CuttingProxy(redis_server.port) as proxy:
        far = proxy.url(redis_url).removeprefix("dq-")
        channel = Channel(scripts, far if earlier_by == "the loop" else redis_url)
        other = redis.Redis.from_url(redis_url if earlier_by == "the loop" else far)
        scripts.push("first")
        channel.turn_until(lambda: channel.ids == ["first"])
        channel.ledger.finish(channel.got[0].delivery_tag)
        first, second = deliver_two(scripts, channel)
        heartbeat = channel.process.heartbeat
        beat = threading.Thread(
            target=send_pending_acks, args=(heartbeat, heartbeat.queues[first.partition], other)
        )
        proxy.black_hole.set()
        channel.ledger.finish(first.tag)
        if earlier_by == "the loop":
            channel.delivery.follow_leaderships()
            channel.ledger.finish(second.tag)
            beat.start()
            beat.join()
        else:
            beat.start()
            wait_until(lambda: not channel.ledger.pending_acks(first.partition))
            channel.ledger.finish(second.tag)
            channel.delivery.follow_leaderships()
            channel.fetcher.tick()
            channel.fetcher.read_all_answers()
        assert scripts.client.hexists(scripts.keys.messages, "b")
        proxy.black_hole.clear()
        proxy.cut_all()
        beat.join()
        if earlier_by == "the loop":
            channel.fetcher.close()
        channel.turn_until(lambda: second.confirmed)
        assert first.confirmed
        channel.close()


@pytest.mark.parametrize("later_by", ["a claim", "an ack", "a dead letter"])
def test_no_ack_overtakes_one_whose_script_redis_has_forgotten(
    scripts: PartitionScripts, channel: Channel, monkeypatch: pytest.MonkeyPatch, later_by: str
) -> None:
    """It is sent again behind all calls that were under way. The process dies before it reads the answers."""
    monkeypatch.setattr(singleton_delivery, "most_unconfirmed", lambda service_s: 1)
    first, second = deliver_two(scripts, channel)
    pipeline, known = channel.fetcher.pipeline, channel.process.scripts
    scripts.client.script_flush()
    channel.ledger.finish(first.tag)
    if later_by == "a dead letter":
        scripts.client.script_load(known["dead_letter"].source)
        channel.ledger.dead_letter(second.tag, "failed", b"")
    else:
        channel.delivery.follow_leaderships()
        wait_until(lambda: has_arrived(pipeline.connection.connection))
        for name in ("ack", "claim"):  # another worker uses them
            scripts.client.script_load(known[name].source)
        channel.ledger.finish(second.tag)
        if later_by == "a claim":
            channel.fetcher.look_again(scripts.keys.prefix)
        else:
            channel.clock.jump(1.0)  # no ack waits so long for a claim
    channel.fetcher.tick()
    for _ in range(len(pipeline)):
        with suppress(redis.ResponseError):
            pipeline.connection.read()
    assert scripts.partition.fence(2).run(scripts.client).accepted
    assert scripts.waiting() == ["a", "b"]


def test_the_heartbeat_sends_acks_behind_an_answer_that_a_blocked_loop_does_not_read(
    scripts: PartitionScripts, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a task that has started, and is killed hours later, would run again."""
    monkeypatch.setattr(singleton_delivery, "most_unconfirmed", lambda service_s: 1)
    first, second = deliver_two(scripts, channel)
    heartbeat = channel.process.heartbeat
    channel.ledger.finish(first.tag)
    channel.delivery.follow_leaderships()
    assert channel.fetcher.expects_answer
    channel.ledger.finish(second.tag)
    heartbeat.send_pending_acks(heartbeat.queues[first.partition], scripts.client)
    assert scripts.client.hexists(scripts.keys.messages, "b")
    for _ in range(2):  # a heartbeat that is woken early does not begin the wait again
        assert not second.confirmed
        channel.clock.jump(LEASE_S / 8)
        heartbeat.send_pending_acks(heartbeat.queues[first.partition], scripts.client)
    assert second.confirmed
    channel.fetcher.read_all_answers()
    assert first.confirmed


def test_the_wait_for_a_confirmation_is_no_service_time(
    scripts: PartitionScripts, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow answer would allow fewer unconfirmed messages, and those would wait longer."""
    seen: list[float] = []

    def one(service_s: float) -> int:
        seen.append(service_s)
        return 1

    monkeypatch.setattr(singleton_delivery, "most_unconfirmed", one)
    first, second = deliver_two(scripts, channel)
    channel.ledger.finish(first.tag)
    channel.turn_until(lambda: channel.fetcher.expects_answer or first.confirmed)
    assert second.needs is first or first.confirmed
    del seen[:]
    channel.clock.jump(4.0)  # while the ack of the first is under way
    channel.turn_until(lambda: first.confirmed)
    channel.delivery.follow_leaderships()
    channel.ledger.finish(second.tag)
    channel.delivery.follow_leaderships()
    assert max(seen) < 0.5
