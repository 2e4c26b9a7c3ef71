"""When settles and finishes travel, and in how many calls. The clock stands still unless a test moves it."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool
from kombu import Message as KombuMessage

from celery_dq.clock import ManualClock
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.in_flight import SETTLE_WAIT_S
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.consuming.consumer_thread import FINISH_WAIT_S, RETRY_AFTER_REFUSAL_S
from celery_dq.worker.lifecycle import TaskLifecycle
from celery_dq.worker.task_events import ack_promise
from tests.broker.kombu_client import KombuClient
from tests.lua.partition_scripts import PartitionScripts

LOGGER = logging.getLogger(__name__)
#: No heartbeat comes by itself before the end of the test.
LONG: dict[str, Any] = {"lease": "60s", "watchdog": 0}
#: In the past, so that nothing is overdue. Rounding makes ``START_S + FINISH_WAIT_S - START_S`` too small.
START_S = 4.0


class TwoMessages:
    """A consumer of one queue with two messages, whose thread makes its trips only when the test lets it."""

    def __init__(self, kombu_client: KombuClient, connection: Any, got: list[Any]) -> None:
        self.first, self.second = got
        self.connection = connection
        self.channel = connection.default_channel
        self.process = self.channel.identity
        self.thread = self.process.threads.main
        self._kombu_client = kombu_client
        self._client = kombu_client.client
        self._stands, self._may_turn, self._is_free = threading.Event(), threading.Event(), False
        self.thread.request(self._stand)
        self.thread.attach(self, self.channel.thread_clients)
        assert self._stands.wait(30)
        self.clock = ManualClock(monotonic=START_S)
        self.process.clock = self.process.in_flight._clock = self.clock
        self.thread.leases.round_at = math.inf
        self._seen = self._calls()

    def _stand(self) -> None:
        self._stands.set()
        assert self._may_turn.wait(60)
        self._may_turn.clear()

    # -- a channel of the thread, which is asked after each trip

    has_queues = awaits_room = False

    def wait(self, now: float) -> float:
        if not self._is_free:
            self.thread.request(self._stand)
        return math.inf

    def sockets(self) -> Iterator[Any]:
        return iter(())

    def after_round(self, now: float) -> None:
        """Do nothing: there is no queue."""

    def fail(self, error: Exception) -> None:
        """Do nothing: the test ends the connection."""

    def begin_again(self) -> None:
        """Do nothing: there is no queue."""

    # -- turns

    def _calls(self) -> int:
        return int(self._client.info("commandstats")["cmdstat_evalsha"]["calls"])

    def turn(self) -> int:
        """Let the thread make one trip with the calls that are due; return their number."""
        self._stands.clear()
        self._may_turn.set()
        assert self._stands.wait(30)
        calls = self._calls()
        self._seen, seen = calls, self._seen
        return calls - seen

    def go_on(self) -> None:
        """Let the thread make its trips by itself again."""
        self._is_free = True
        self._may_turn.set()

    def hold_claims_back(self) -> None:
        """Let finishes expect a claim that could carry them and that is not sent."""
        (subscription,) = self.channel.consumer.claims.subscriptions
        subscription.may_have_work, subscription.backoff_until = True, math.inf
        subscription.free_at_last_claim = 1 << 31

    @property
    def turns_in_s(self) -> float:
        """Seconds until the next trip that the thread plans, in whole microseconds."""
        next_at = min(self.thread._next_at, self.thread._acks.next_time())
        return float(round(next_at - self.clock.monotonic(), 6))

    def places(self) -> list[str]:
        """Return for both messages whether they are unsettled, settled or gone."""
        records = self._client.hmget(
            self._kombu_client.keys.messages, self.first.message_id, self.second.message_id
        )
        return [
            "gone" if each is None else "settled" if each[:1] == b"\0" else "unsettled" for each in records
        ]


@pytest.fixture
def consumer(kombu_client: KombuClient) -> Iterator[TwoMessages]:
    kombu_client.publish(1, 2)
    with kombu_client.connect(**LONG) as connection, kombu_client.consuming(connection, prefetch=9) as got:
        kombu_client.drain(connection, got, 2)
        wakeups = connection.default_channel.consumer.claims.wakeups
        kombu_client.drain_until(connection, lambda: wakeups.is_waiting)
        two = TwoMessages(kombu_client, connection, got)
        yield two
        two.go_on()
    # A message that plain kombu holds keeps the lease, and so the thread, as long as the process lives.
    threads, key = two.process.threads, kombu_client.keys.prefix
    two.process.in_flight.abandon_partition(key)
    threads.renew_now()
    wait_until(lambda: key not in threads.queues, what="the end of the lease")


def test_a_finish_travels_with_a_settle(consumer: TwoMessages) -> None:
    consumer.hold_claims_back()
    consumer.first.finish()
    assert consumer.turn() == 0
    consumer.second.settle()
    assert consumer.turn() == 0
    consumer.clock.advance(SETTLE_WAIT_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "settled"]
    assert consumer.process.in_flight.stale == 0


def test_a_settle_of_a_message_that_has_finished_is_not_sent(consumer: TwoMessages) -> None:
    consumer.hold_claims_back()
    consumer.first.settle()
    consumer.first.finish()
    # A task may end before the settle is sent. The finish waits for a claim, as others do.
    assert consumer.turn() == 0
    consumer.clock.advance(FINISH_WAIT_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "unsettled"]


def test_a_settle_that_may_wait_is_sent_in_time(consumer: TwoMessages) -> None:
    consumer.first.settle(may_wait=True)
    consumer.clock.advance(SETTLE_WAIT_S / 2)
    consumer.second.settle(may_wait=True)
    assert consumer.turn() == 0
    assert consumer.turns_in_s == SETTLE_WAIT_S / 2
    consumer.clock.advance(SETTLE_WAIT_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["settled", "settled"]
    consumer.first.finish()
    consumer.second.finish()
    assert consumer.turn() == 0
    consumer.clock.advance(FINISH_WAIT_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "gone"]
    assert consumer.process.in_flight.stale == 0


def test_a_message_that_finishes_first_needs_no_settle(consumer: TwoMessages) -> None:
    consumer.first.settle(may_wait=True)
    consumer.second.settle(may_wait=True)
    consumer.first.finish()
    assert consumer.turn() == 0
    consumer.clock.advance(SETTLE_WAIT_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "settled"]
    assert consumer.process.in_flight.stale == 0
    consumer.clock.advance(1)
    assert consumer.turn() == 0


def test_a_finish_without_a_settle_waits_for_a_claim_no_longer_than_the_settle(consumer: TwoMessages) -> None:
    consumer.hold_claims_back()
    consumer.first.settle(may_wait=True)
    consumer.first.finish()
    assert consumer.turn() == 0
    consumer.clock.advance(SETTLE_WAIT_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "unsettled"]


def test_celery_passes_no_ack_or_reject_of_ours_to_its_event_loop(consumer: TwoMessages) -> None:
    consumer.go_on()
    passed: list[Any] = []
    answers = consumer.first.ack_log_error, consumer.second.reject_log_error
    ack, reject = (ack_promise(lambda *args: passed.append(args), (each,)) for each in answers)
    fulfilled: list[Any] = []
    ack.then(fulfilled.append)
    ack(LOGGER, ())
    reject(LOGGER, (), requeue=True)
    assert (passed, fulfilled) == ([], [None])
    assert (consumer.first.acknowledged, consumer.places()) == (True, ["gone", "unsettled"])
    other = KombuMessage(channel=consumer.channel)
    ack_promise(lambda *args: passed.append(args), (other.ack_log_error,))(LOGGER, ())
    assert passed == [(other.ack_log_error, LOGGER, ())]


@pytest.mark.logged_error("The ack or reject of message")
def test_an_ack_that_the_broker_refuses_is_logged_and_stays_pending(
    kombu_client: KombuClient, consumer: TwoMessages, caplog: pytest.LogCaptureFixture
) -> None:
    consumer.go_on()
    client, state, errors = kombu_client.client, kombu_client.keys.state, list[Any]()
    client.rename(state, "aside")
    client.set(state, "of another program")
    ack_promise(None, (consumer.first.ack_log_error,), on_error=errors.append)(LOGGER, ())
    client.rename("aside", state)
    (record,) = (each for each in caplog.records if getattr(each, "event", "") == "ack_failed")
    assert consumer.first.message_id in record.getMessage()
    assert record.exc_info is not None
    assert [record.exc_info[1]] == errors
    consumer.clock.advance(RETRY_AFTER_REFUSAL_S)
    consumer.thread.wake()
    wait_until(lambda: consumer.places() == ["gone", "unsettled"])


def test_acks_are_confirmed(consumer: TwoMessages) -> None:
    """Messages of a singleton queue wait for that."""
    in_flight = consumer.process.in_flight
    both = [in_flight.get(each.delivery_tag) for each in (consumer.first, consumer.second)]
    consumer.second.settle()
    consumer.first.finish()
    consumer.clock.advance(SETTLE_WAIT_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "settled"]
    assert [each.confirmed for each in both] == [True, True]


def test_dead_letters_and_releases_wait_for_no_claim(consumer: TwoMessages) -> None:
    consumer.hold_claims_back()
    consumer.process.in_flight.dead_letter(consumer.first.delivery_tag, "a fault", b"")
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "unsettled"]
    consumer.process.in_flight.release(consumer.second.delivery_tag, "requeue")
    assert consumer.turn() == 1
    assert consumer.process.in_flight.stale == 0


def test_refused_acks_are_not_sent_again_at_once(kombu_client: KombuClient, consumer: TwoMessages) -> None:
    client, state = kombu_client.client, kombu_client.keys.state
    client.rename(state, "aside")
    client.set(state, "of another program")
    consumer.second.settle()
    consumer.first.finish()
    consumer.clock.advance(SETTLE_WAIT_S)
    assert consumer.turn() == 1
    client.rename("aside", state)
    assert consumer.turns_in_s == RETRY_AFTER_REFUSAL_S
    assert consumer.turn() == 0
    consumer.clock.advance(RETRY_AFTER_REFUSAL_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "settled"]


@pytest.mark.parametrize("why", ["", "limit", "lock", "singleton"])
def test_a_finish_waits_for_a_claim_that_is_not_planned_where_no_message_waits_for_it(
    consumer: TwoMessages, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    (subscription,) = consumer.channel.consumer.claims.subscriptions
    assert not subscription.may_have_work
    subscription.has_limits = why == "limit"
    consumer.process.in_flight.get(consumer.first.delivery_tag).has_lock = why == "lock"
    if why == "singleton":
        monkeypatch.setattr(subscription, "queue", dataclasses.replace(subscription.queue, token=1))
    consumer.first.finish()
    if why:
        assert consumer.turn() == 1
        return
    assert consumer.turn() == 0
    assert consumer.turns_in_s == FINISH_WAIT_S
    consumer.clock.advance(FINISH_WAIT_S)
    assert consumer.turn() == 1
    assert consumer.places() == ["gone", "unsettled"]


def test_a_claimed_message_with_a_dedup_key_is_known_to_have_a_lock(kombu_client: KombuClient) -> None:
    scripts = PartitionScripts(kombu_client.client)
    kombu_client.publish(1)
    (stored,) = kombu_client.client.hvals(scripts.keys.messages)
    keyed = MessageRecord.unpack(stored)._replace(dedup=DedupSection("k").pack())
    scripts.partition.push([OutgoingRecord(0, "m", keyed.pack())]).run(kombu_client.client)
    with kombu_client.connect(**LONG) as connection, kombu_client.consuming(connection, prefetch=9) as got:
        kombu_client.drain(connection, got, 2)
        in_flight = connection.default_channel.identity.in_flight
        assert [in_flight.get(each.delivery_tag).has_lock for each in got] == [False, True]


@pytest.mark.parametrize("by", ["closing", "a lost connection", "a shutdown"])
def test_the_end_of_a_connection_sends_the_settles_that_wait(
    kombu_client: KombuClient, consumer: TwoMessages, by: str
) -> None:
    consumer.first.settle(may_wait=True)
    consumer.second.settle(may_wait=True)
    consumer.second.finish()
    consumer.go_on()
    if by == "closing":
        consumer.channel.close()
    elif by == "a shutdown":
        assert consumer.channel.consumer.flush()
    else:
        consumer.connection.collect()
        consumer.clock.advance(SETTLE_WAIT_S)
        consumer.thread.wake()
    wait_until(lambda: "unsettled" not in consumer.places(), what=lambda: str(consumer.places()))
    assert consumer.places()[1] == "gone"
    assert consumer.process.in_flight.stale == 0
    # The first message was settled, so it does not return. The thread may renew its lease once more.
    wait_until(lambda: kombu_client.lose_lease() <= 1 and kombu_client.depth() == 0, what="its end")


def test_a_killed_process_returns_the_messages_whose_settles_waited(
    kombu_client: KombuClient, consumer: TwoMessages
) -> None:
    consumer.first.settle(may_wait=True)
    consumer.second.settle(may_wait=True)
    consumer.second.finish()
    assert kombu_client.lose_lease() == 2
    # A process that was only stopped sends them afterwards, when other workers may have the messages.
    consumer.clock.advance(SETTLE_WAIT_S)
    consumer.turn()
    assert consumer.places() == ["unsettled", "unsettled"]
    assert consumer.process.in_flight.stale == 2


@pytest.mark.parametrize(("pool", "waits"), [(PreforkPool, True), (ThreadPool, False), (SoloPool, False)])
def test_a_settle_waits_only_where_the_task_runs_in_another_process(
    consumer: TwoMessages, pool: Any, waits: bool
) -> None:
    lifecycle = TaskLifecycle(pool(limit=1), consumer.clock, dead_letter_failures=False)
    message = consumer.first
    lifecycle.accepted(SimpleNamespace(message=message, id="x", task=SimpleNamespace(acks_late=False)))
    held = consumer.process.in_flight.get(message.delivery_tag)
    assert held.settled
    assert held.runs_outside is waits
