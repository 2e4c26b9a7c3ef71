"""The broker did it, and its answer never came."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_dq.clock import ManualClock
from celery_dq.testing.waiting import wait_until
from tests.broker.counter import Counter, bodies, consumer_of
from tests.broker.proxy import Proxy


def test_a_claim_whose_answer_is_lost_gives_its_messages_back(counter: Counter, proxy: Proxy) -> None:
    claim = counter.partition.claim("", lease_ms=1, want=1).script.sha1.encode()
    with counter.connect(proxy.url(counter.url), lease="1s", watchdog=0, claim_ahead="10ms") as connection:
        with counter.consuming(connection, prefetch=5) as got:
            counter.drain_until(connection, lambda: counter.client.zcard(counter.keys.leases))
            proxy.drop_answers_to, proxy.drops_left = claim, 1
            counter.publish(1, 2)
            with pytest.raises(connection.connection_errors):
                counter.drain(connection, got, 1)
        # The process lives on and keeps its lease; whoever asks next gets them, unharmed.
        since = time.monotonic()
        with counter.connect() as other, counter.consuming(other) as got:
            counter.drain(other, got, 2)
            assert bodies(got) == [1, 2]
            assert [message.deliveries for message in got] == [0, 0]
            assert time.monotonic() - since < 3
            for message in got:
                message.ack()
    assert counter.depth() == 0


def test_a_claim_whose_answer_is_lost_comes_back_to_who_connects_anew(counter: Counter, proxy: Proxy) -> None:
    claim = counter.partition.claim("", lease_ms=1, want=1).script.sha1.encode()
    connection = counter.connect(proxy.url(counter.url), lease="1s", watchdog=0, claim_ahead="10ms")
    with counter.consuming(connection, prefetch=5) as got:
        counter.drain_until(connection, lambda: counter.client.zcard(counter.keys.leases))
        proxy.drop_answers_to, proxy.drops_left = claim, 1
        counter.publish(1, 2)
        with pytest.raises(connection.connection_errors):
            counter.drain(connection, got, 1)
        connection.collect()
        with counter.consuming(connection, prefetch=5) as got:
            counter.drain(connection, got, 2)
            assert bodies(got) == [1, 2]
            assert [message.deliveries for message in got] == [0, 0]
            for message in got:
                message.ack()
            counter.drain_until(connection, lambda: counter.depth() == 0)


def test_what_the_keeper_could_not_tell_it_tells_with_its_next_round(counter: Counter, proxy: Proxy) -> None:
    finish = counter.partition.finish("", []).script.sha1.encode()
    with (
        counter.connect(proxy.url(counter.url), lease="1s", watchdog=0) as connection,
        counter.consuming(connection, prefetch=1) as got,
    ):
        counter.publish(1)
        counter.drain(connection, got, 1, 30)
        process: Any = connection.default_channel.process
        untold: list[bool] = []

        def look(now: float) -> None:
            untold.append(bool(process.ledger.pending()))

        proxy.drop_answers_to, proxy.drops_left = finish, 1
        process.ledger.finish(got[0].delivery_tag)
        process.keeper.tell_soon()
        wait_until(lambda: proxy.dropped, 30)
        process.keeper.watch(look)
        wait_until(lambda: untold, 30)
        assert untold[0] is False
    assert counter.depth() == 0


def test_get_whose_answer_is_lost_gives_its_message_back(counter: Counter, proxy: Proxy) -> None:
    claim = counter.partition.claim("", lease_ms=1, want=1).script.sha1.encode()
    counter.publish(1)
    with counter.connect(proxy.url(counter.url), lease="1s", watchdog=0, claim_ahead="10ms") as connection:
        proxy.drop_answers_to, proxy.drops_left = claim, 1
        with pytest.raises(connection.connection_errors):
            connection.default_channel.basic_get(counter.queue)
        wait_until(lambda: counter.client.exists(counter.keys.turn), 30)
        message = connection.default_channel.basic_get(counter.queue)
        assert message.deliveries == 0
        message.ack()
    assert counter.depth() == 0


def test_a_claim_that_nobody_reads_does_not_keep_its_messages(counter: Counter) -> None:
    with (
        counter.connect(lease="1s", watchdog=0, claim_ahead="10ms") as connection,
        counter.consuming(connection, prefetch=5) as got,
    ):
        counter.drain_until(connection, lambda: counter.client.zcard(counter.keys.leases))
        channel = connection.default_channel
        channel.intake.fetcher.wake()
        counter.publish(1)
        channel.tick()  # as if the loop stopped here: the claim is sent, and its answer not read
        wait_until(lambda: counter.client.hlen(counter.keys.held(consumer_of(connection))) == 1)
        with counter.connect() as other, counter.consuming(other) as others:
            counter.drain(other, others, 1)
            others[0].ack()
            counter.drain_until(other, lambda: counter.depth() == 0)
            # It comes to life again, and does not deliver what it was too late for.
            counter.publish(2)
        counter.drain(connection, got, 1)
        assert bodies(got) == [2]
        got[0].ack()
    assert counter.depth() == 0


class Meanwhile(float):
    """A moment; who compares it is interrupted, as by another thread."""

    def __new__(cls, value: float, happens: Callable[[], None]) -> Meanwhile:
        made = super().__new__(cls, value)
        made.happens = happens
        return made

    happens: Callable[[], None]

    def __gt__(self, other: float) -> bool:
        self.happens()
        return super().__gt__(other)


def unread_claim(counter: Counter, connection: Any) -> Any:
    """Let the loop stop where a claim is answered and the answer not read; return the channel."""
    counter.drain_until(connection, lambda: counter.client.zcard(counter.keys.leases))
    channel = connection.default_channel
    channel.intake.fetcher.wake()
    counter.publish(1)
    channel.tick()
    wait_until(lambda: counter.client.hlen(counter.keys.held(consumer_of(connection))) == 1, 30)
    return channel


def test_an_answer_that_comes_while_the_keeper_gives_up_on_it_is_taken_once(counter: Counter) -> None:
    with (
        counter.connect(lease="60s", watchdog=0, claim_ahead="10ms") as connection,
        counter.consuming(connection, prefetch=5) as got,
    ):
        channel = unread_claim(counter, connection)
        teller, process = channel.intake.fetcher.teller, channel.process
        teller.disown_claims(Meanwhile(process.clock.monotonic() + 60, teller.read))
        # It is held, so that the keeper has nothing to look for.
        assert not process.doubts.under_way(next(channel.intake.sources()).queue.key)
        counter.drain(connection, got, 1, 30)
        assert bodies(got) == [1]
        got[0].ack()
        counter.drain_until(connection, lambda: counter.depth() == 0, 30)


def test_after_a_disowned_claim_the_next_one_is_sent_at_once(counter: Counter) -> None:
    with (
        counter.connect(lease="60s", watchdog=0, claim_ahead="10ms") as connection,
        counter.consuming(connection, prefetch=5) as got,
    ):
        channel = unread_claim(counter, connection)
        channel.intake.fetcher.teller.disown_claims(channel.process.clock.monotonic() + 60)
        counter.publish(2)
        channel.process.clock = ManualClock(
            monotonic=channel.process.clock.monotonic()
        )  # no rest would ever end
        counter.drain(connection, got, 1, 30)
        assert bodies(got) == [2]
        got[0].ack()


def test_what_was_claimed_and_could_not_be_taken_in_comes_back(counter: Counter) -> None:
    with (
        counter.connect(lease="1s", watchdog=0, claim_ahead="10ms") as connection,
        counter.consuming(connection, prefetch=3) as got,
    ):
        fetcher = connection.default_channel.intake.fetcher
        deliver = fetcher._deliver

        def fail(source: Any, entry: Any, tag: str) -> None:
            fetcher._deliver = deliver
            connection.transport.session.process.ledger.drop(tag)
            raise RuntimeError("out of memory, perhaps")

        fetcher._deliver = fail
        counter.publish(1, 2, 3)
        with pytest.raises(RuntimeError, match="out of memory"):
            counter.drain(connection, got, 3, 30)
        # The connection is sound, and the process lives: nobody else will give them back.
        counter.drain(connection, got, 3, 30)
        assert sorted(bodies(got)) == [1, 2, 3]
        for message in got:
            message.ack()
        counter.drain_until(connection, lambda: counter.depth() == 0, 30)
