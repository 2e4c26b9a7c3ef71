"""The order in which one channel delivers a singleton queue, turned by hand on a real server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from celery_dq.transport.envelope import pack
from celery_dq.transport.in_flight import InFlightMessage, Message
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming import singleton_delivery
from celery_dq.transport.redis.consuming.channel_claims import ChannelClaims
from celery_dq.transport.redis.consuming.singleton_delivery import SingletonDelivery
from celery_dq.transport.redis.consuming.subscriptions import Subscription
from celery_dq.transport.redis.store.partition import Queue
from tests.broker.claims_harness import ClaimsHarness, turn_until
from tests.doubles.jumping_clock import JumpingClock
from tests.lua.partition_scripts import PartitionScripts
from tests.singleton.test_lost_acks import FirmTerm

QUEUE = "redis_posting"
#: Longer than a test: no heartbeat helps.
LEASE_S = 600.0
#: Of a message without headers.
ENVELOPE = pack({}, {}, "application/json", "utf-8")
#: So much work may be claimed ahead that the pace does not matter.
CLAIM_AHEAD_S = 1000.0


class Channel(ClaimsHarness):
    """Delivers the messages of one term to a worker with one slot, when the test turns it."""

    def __init__(self, scripts: PartitionScripts, url: str) -> None:
        self.clock = JumpingClock()
        super().__init__(url, 16, (), ConsumerIdentity(LEASE_S, self.clock))
        self.ledger = self.process.in_flight
        self.messages: list[Message] = []
        self.delivery = SingletonDelivery(
            self.process,
            FirmTerm(),
            claims=self.claims,
            clients=lambda: lambda: redis.Redis.from_url(url),
            deliver=self.messages.append,
            release=lambda message: self.ledger.release(message.delivery_tag, "unstarted"),
            claim_ahead_s=CLAIM_AHEAD_S,
            in_turn=lambda: 64,
        )
        assert scripts.partition.fence(1).run(scripts.client).accepted
        self.delivery.add(Queue(QUEUE, scripts.partition))

    def receive(self, source: Subscription, entry: ClaimedEntry, held: InFlightMessage) -> None:
        record = MessageRecord.unpack(entry.record)._replace(envelope=ENVELOPE)
        self.delivery.add_message(Message(record, entry, held.tag, source.queue.name, self))

    def before_trip(self, claims: ChannelClaims, now: float) -> float:
        self.delivery.follow_leaderships()
        return math.inf

    def after_trip(self, claims: ChannelClaims) -> None:
        self.delivery.follow_leaderships()

    @property
    def ids(self) -> list[str]:
        return [str(message.message_id) for message in self.messages]

    def turn_until(self, condition: Callable[[], Any]) -> None:
        turn_until(condition, self)

    def finish_rest(self, ids: list[str]) -> None:
        """Let each message end when it comes, until these were delivered."""

        def ended() -> bool:
            for message in self.messages:
                self.ledger.finish(message.delivery_tag)
            return len(self.messages) >= len(ids)

        self.turn_until(ended)
        assert self.ids == ids

    def close(self) -> None:
        self.delivery.remove(QUEUE)
        super().close()


@pytest.fixture
def scripts(redis_url: str) -> Iterator[PartitionScripts]:
    with redis.Redis.from_url(redis_url) as client:
        yield PartitionScripts(client, QUEUE)


@pytest.fixture
def channel(scripts: PartitionScripts, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    # The service times are measured, so a busy machine would allow fewer unconfirmed messages.
    monkeypatch.setattr(singleton_delivery, "most_unconfirmed", lambda service_s: 16)
    channel = Channel(scripts, redis_url)
    scripts.push("first")
    channel.turn_until(lambda: channel.ids == ["first"])
    channel.ledger.finish(channel.messages[0].delivery_tag)  # now the channel knows a pace, and delivers two
    yield channel
    channel.close()


def deliver_two(scripts: PartitionScripts, channel: Channel) -> tuple[InFlightMessage, InFlightMessage]:
    """Push "a" and "b", and return both when they were delivered and no claim is under way."""
    scripts.push("a", "b")
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"])
    first, second = (channel.ledger.get(message.delivery_tag) for message in channel.messages[1:])
    assert first is not None
    assert second is not None
    return first, second


def test_a_message_comes_back_before_the_next_although_the_one_behind_it_is_over(
    scripts: PartitionScripts, channel: Channel
) -> None:
    scripts.push("a", "b", "c", "d")
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"])
    channel.ledger.finish(channel.messages[2].delivery_tag)  # it was revoked, say, and needed no slot
    channel.ledger.release(channel.messages[1].delivery_tag, "requeue")
    channel.finish_rest(["first", "a", "b", "a", "c", "d"])


def test_a_message_waits_for_the_confirmation_of_a_dead_letter_before_it(
    scripts: PartitionScripts, channel: Channel
) -> None:
    scripts.push("a", "b", "c")
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"])
    channel.ledger.dead_letter(channel.messages[1].delivery_tag, "failed", b"")
    behind = channel.ledger.get(channel.messages[2].delivery_tag)
    assert behind is not None
    assert behind.unfinished_predecessor() is not None
    channel.turn_until(lambda: behind.unfinished_predecessor() is None)
    channel.finish_rest(["first", "a", "b", "c"])


def test_the_next_messages_are_delivered_when_half_of_the_last_ones_are_over(
    scripts: PartitionScripts, channel: Channel
) -> None:
    """One by one, each would cost a turn of the event loop."""
    names = list("abcdefgh")
    scripts.push(*names)
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"])
    for message in channel.messages[1:]:
        channel.ledger.finish(message.delivery_tag)
    channel.turn_until(lambda: len(channel.messages) == len(["first", *"abcdef"]))
    third, fourth = channel.messages[3:5]
    channel.ledger.finish(third.delivery_tag)
    channel.delivery.follow_leaderships()
    assert channel.ids == ["first", *"abcdef"]
    channel.ledger.finish(fourth.delivery_tag)
    channel.finish_rest(["first", *names])


def test_no_end_is_sent_before_the_answer_to_an_earlier_one(
    scripts: PartitionScripts, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process died in between, the first message would run again after the second, which would not."""
    first, second = deliver_two(scripts, channel)
    monkeypatch.setattr(singleton_delivery, "most_unconfirmed", lambda service_s: 1)
    scripts.client.script_flush()
    channel.ledger.finish(first.tag)
    channel.ledger.dead_letter(second.tag, "failed", b"")
    channel.turn_until(lambda: first.confirmed or second.confirmed)
    assert (first.confirmed, second.confirmed) == (True, False)
    assert scripts.client.hexists(scripts.keys.messages, "b")
    channel.turn_until(lambda: second.confirmed)


def test_a_term_is_busy_while_its_acks_are_under_way(
    scripts: PartitionScripts, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A next leader that began sooner would get the messages of these acks."""
    messages = deliver_two(scripts, channel)
    seen: list[bool] = []
    send_all = channel.scripts.send_all

    def send(commands: Sequence[tuple[Any, ...]], check_health: bool = False) -> None:
        seen.append(channel.delivery.is_busy(QUEUE, 1))
        send_all(commands, check_health)

    monkeypatch.setattr(channel.scripts, "send_all", send)
    channel.room = 0  # no claim carries them
    for message in messages:
        channel.ledger.finish(message.tag)
    channel.turn_until(lambda: all(message.confirmed for message in messages))
    assert seen
    assert all(seen)
    assert not channel.delivery.is_busy(QUEUE, 1)


def test_the_wait_for_a_confirmation_is_no_service_time(
    scripts: PartitionScripts, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow answer would allow fewer unconfirmed messages, and those would wait longer."""
    seen: list[float] = []

    def one(service_s: float) -> int:
        seen.append(service_s)
        return 1

    monkeypatch.setattr(singleton_delivery, "most_unconfirmed", one)
    scripts.push("a", "b")
    channel.turn_until(lambda: channel.ids == ["first", "a"])
    channel.ledger.finish(channel.messages[1].delivery_tag)
    channel.delivery.follow_leaderships()
    assert channel.ids == ["first", "a"]  # the second waits for the confirmation
    del seen[:]
    channel.clock.jump(4.0)
    channel.turn_until(lambda: channel.ids == ["first", "a", "b"])
    channel.ledger.finish(channel.messages[2].delivery_tag)
    channel.delivery.follow_leaderships()
    assert max(seen) < 0.5
