"""One consumer of several queues: turns, groups of waits, several claims. No heartbeat thread runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import redis

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consuming import claim_limits, wakeups
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store import script_batches
from celery_dq.transport.redis.store.queue import Queue
from tests.broker.fetcher_harness import LEASE_S, FetcherHarness, turn_until
from tests.broker.kombu_client import KombuClient
from tests.lua.partition_scripts import PartitionScripts

MakeFetcher = Callable[..., FetcherHarness]

#: Queues of these tests only, because heartbeat threads of earlier tests may still run.
FIRST, SECOND, THIRD = "first", "second", "third"


@pytest.fixture
def scripts(kombu_client: KombuClient) -> list[PartitionScripts]:
    """The partitions of the queues."""
    return [PartitionScripts(kombu_client.client, name) for name in (FIRST, SECOND, THIRD)]


@pytest.fixture
def make_fetcher(kombu_client: KombuClient) -> Iterator[MakeFetcher]:
    made: list[FetcherHarness] = []

    def make(room: int, *queues: str) -> FetcherHarness:
        made.append(FetcherHarness(kombu_client.url, room, queues))
        return made[-1]

    yield make
    for each in made:
        each.close()


def keep_busy(harness: FetcherHarness, scripts: PartitionScripts) -> None:
    """Begin a backlog that never ends."""

    def send_next() -> None:
        number = len(harness.got)
        harness.room = number + 10
        scripts.push(f"{number}", f"{number} more")

    harness.on_message = send_next
    scripts.push("begin", "begin more")


def test_a_backlog_in_one_queue_does_not_hide_a_message_of_another(
    scripts: list[PartitionScripts], make_fetcher: MakeFetcher
) -> None:
    harness = make_fetcher(10, FIRST, SECOND)
    turn_until(lambda: harness.is_quiet, harness)
    keep_busy(harness, scripts[0])
    turn_until(lambda: len(harness.got) > 5, harness)
    # A wait may still be under way that began before the backlog. Its answer is the first of these messages.
    for message in ("here", "there"):
        scripts[1].push(message)
        turn_until(partial(harness.got.count, message), harness, timeout_s=8)


def test_a_wakeup_of_one_group_leaves_the_wait_of_another(
    scripts: list[PartitionScripts], make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "GROUP_SIZE", 2)
    harness = make_fetcher(10, FIRST, SECOND, THIRD)
    other = harness.fetcher.wakeups.groups[1]
    assert [len(group.members) for group in harness.fetcher.wakeups] == [2, 1]
    turn_until(lambda: harness.is_quiet, harness)
    since, connection = other.waiting_since, other.connection.connection
    scripts[0].push("a")
    turn_until(lambda: harness.got == ["a"] and harness.is_quiet, harness)
    assert (other.waiting_since, other.connection.connection) == (since, connection)
    scripts[2].push("b")
    turn_until(lambda: harness.got == ["a", "b"] and harness.is_quiet, harness)


def test_a_group_waits_while_another_one_has_work(
    scripts: list[PartitionScripts], make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "GROUP_SIZE", 1)
    harness = make_fetcher(10, FIRST, SECOND)
    keep_busy(harness, scripts[0])
    other = harness.fetcher.wakeups.groups[1]
    turn_until(lambda: len(harness.got) > 20 and other.is_waiting and not other.is_asking, harness)


def test_the_wait_of_one_group_is_mended_after_a_cut(
    scripts: list[PartitionScripts], make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "GROUP_SIZE", 1)
    harness = make_fetcher(10, FIRST, SECOND)
    turn_until(lambda: harness.is_quiet, harness)
    waiting = [each for each in scripts[0].client.client_list() if each["cmd"] == "blpop"]
    scripts[0].client.client_kill_filter(_id=waiting[1]["id"])
    with pytest.raises(redis.ConnectionError):
        turn_until(lambda: False, harness)
    harness.fetcher.close()  # as its channel does
    scripts[0].push("a")
    scripts[1].push("b")
    turn_until(lambda: sorted(harness.got) == ["a", "b"] and harness.is_quiet, harness)


def test_claims_under_way_share_the_room(
    scripts: list[PartitionScripts], make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_limits, "MIN_SHARE", 2)
    harness = make_fetcher(4, FIRST, SECOND, THIRD)
    turn_until(lambda: harness.is_quiet, harness)
    harness.fetcher._claims._mean_brought = 1.0
    for number, each in enumerate(scripts):
        each.push(*(f"{number}.{count}" for count in range(20)))
    harness.fetcher.look_again()
    harness.fetcher.tick()
    assert len(harness.fetcher.pipeline) == 2
    harness.fetcher.tick()  # the third queue has to wait for the answers
    turn_until(lambda: not harness.fetcher.expects_answer, harness)
    assert len(harness.got) == 4


def test_two_claims_bring_one_suspect(scripts: list[PartitionScripts], make_fetcher: MakeFetcher) -> None:
    for number, each in enumerate(scripts[:2]):
        each.push(f"suspect {number}")
        (entry,) = each.claim(consumer="dead").entries
        each.partition.release("dead", [(entry.claim, entry.id)], mode="crashed").run(each.client)
    harness = make_fetcher(64, FIRST, SECOND)
    harness.fetcher._claims._mean_brought = 1.0
    turn_until(lambda: harness.got, harness)
    turn_until(lambda: not harness.fetcher.expects_answer, harness)
    assert len(harness.got) == 1
    harness.process.in_flight.finish(harness.tags[0])
    turn_until(lambda: len(harness.got) == 2, harness)


def test_lost_answers_of_several_claims_are_compared(
    scripts: list[PartitionScripts], make_fetcher: MakeFetcher
) -> None:
    harness = make_fetcher(64, FIRST, SECOND)
    turn_until(lambda: harness.is_quiet, harness)
    scripts[0].push("a")
    scripts[1].push("b")
    harness.fetcher.look_again()
    harness.fetcher.tick()
    assert len(harness.fetcher.pipeline) == 2
    harness.fetcher.close()  # before the answers
    in_doubt = harness.process.in_doubt
    assert all(in_doubt.needs_comparison(each.keys.prefix) for each in scripts[:2])
    # A later claim would bring the messages that are pushed now, too.
    wait_until(lambda: all(each.state("held") == 1 for each in scripts[:2]))
    scripts[0].push("c")
    scripts[1].push("d")
    turn_until(lambda: {"c", "d"} <= set(harness.got), harness)


def test_a_queue_that_refuses_the_heartbeat_costs_no_other_queue_its_lease(
    scripts: list[PartitionScripts], kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_batches, "CALLS_PER_TRIP", 2)
    process = ConsumerIdentity(LEASE_S)
    for each in scripts:
        queue = Queue(each.keys.queue, each.partition)
        process.heartbeat.keep_lease(queue, lambda: lambda: kombu_client.client)
    scripts[0].client.set(scripts[0].keys.state, "of another program")
    process.heartbeat._renew_all()
    renewed = [process.in_flight.is_lease_trusted(each.keys.prefix) for each in scripts]
    assert renewed == [False, True, True]
    for queue in list(process.heartbeat.queues.values()):
        process.heartbeat.drop_lease(queue, soon=False)
    scripts[0].client.delete(scripts[0].keys.state)
    process.heartbeat._renew_all()
    assert not process.heartbeat.queues
    assert not scripts[1].client.zcard(scripts[1].keys.leases)
    process.heartbeat.renew_now()
