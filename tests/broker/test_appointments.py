"""The consumer that was assigned the next look keeps it or hands it over. No heartbeat thread runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_dq.keys import PartitionKeys
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from tests.broker.fetcher_harness import LEASE_S, FetcherHarness, turn_for, turn_until
from tests.broker.kombu_client import KombuClient
from tests.lua.partition_scripts import PartitionScripts

MakeFetcher = Callable[..., FetcherHarness]

#: Queues of these tests only, because heartbeat threads of earlier tests may still run.
QUEUE, OTHER = "bay", "mail"
#: Seconds until a message is due that the test waits for, and until one is due that it does not wait for. A
#: busy machine may stand still while the consumers take up their positions.
SOON_S, LATE_S = 1.0, 60.0


@pytest.fixture
def scripts(kombu_client: KombuClient) -> PartitionScripts:
    scripts = PartitionScripts(kombu_client.client, QUEUE)
    scripts.partition.hand_over_wakeup().run(
        scripts.client
    )  # loads the script, so that later calls are one command
    return scripts


@pytest.fixture
def make_fetcher(kombu_client: KombuClient) -> Iterator[MakeFetcher]:
    hired: list[FetcherHarness] = []

    def hire(
        room: int, *queues: str, process: ConsumerIdentity | None = None, holds: bool = True
    ) -> FetcherHarness:
        hired.append(FetcherHarness(kombu_client.url, room, queues or (QUEUE,), process, holds))
        return hired[-1]

    yield hire
    for each in hired:
        each.close()


def delay(scripts: PartitionScripts, **seconds: float) -> None:
    now = scripts.now_us()
    for task_id, after in seconds.items():
        scripts.push(task_id, due_us=now + int(after * 1e6))


def owner(scripts: PartitionScripts) -> Any:
    return (scripts.client.hget(scripts.keys.state, "next_look_owner") or b"").decode()


def keeps(scripts: PartitionScripts, harness: FetcherHarness) -> Callable[[], bool]:
    return lambda: owner(scripts) == harness.process.consumer and harness.is_quiet


def test_a_full_consumer_hands_each_next_look_on(
    scripts: PartitionScripts, make_fetcher: MakeFetcher
) -> None:
    full, idle = make_fetcher(1), make_fetcher(3)
    delay(scripts, a=SOON_S, b=SOON_S + 0.2, c=SOON_S + 0.4)
    turn_until(keeps(scripts, full), full)
    turn_until(lambda: idle.is_quiet, idle)
    full.room = 0
    before = full.scripts.sent, idle.scripts.sent
    turn_until(lambda: idle.got == ["a", "b", "c"], full, idle)
    assert full.got == []
    # One handover, and another one if the earlier BLPOP of the full consumer took the wake-up.
    assert full.scripts.sent - before[0] <= 2
    # One claim per message, because the idle consumer keeps the later looks itself. A timer may be early.
    assert idle.scripts.sent - before[1] <= 6


def test_a_single_full_consumer_hands_over_once_and_looks_when_a_slot_is_free(
    scripts: PartitionScripts, make_fetcher: MakeFetcher
) -> None:
    alone = make_fetcher(1)
    delay(scripts, a=SOON_S)
    turn_until(keeps(scripts, alone), alone)
    alone.room = 0
    before = alone.scripts.sent
    turn_until(scripts.token, alone)
    turn_for(0.2, alone)
    # Its own earlier BLPOP may take the wake-up once.
    assert alone.scripts.sent - before <= 2
    alone.room = 1
    turn_until(lambda: alone.got == ["a"], alone)


@pytest.mark.parametrize("tenant", [None, ""])
def test_the_end_of_a_pause_wakes_one_consumer_without_polling(
    scripts: PartitionScripts, make_fetcher: MakeFetcher, tenant: str | None
) -> None:
    first, second = make_fetcher(3), make_fetcher(3)
    turn_until(lambda: first.is_quiet and second.is_quiet, first, second)
    scripts.partition.pause(tenant, for_us=500_000).run(scripts.client)
    scripts.push("a")
    turn_until(lambda: owner(scripts) != "" and first.is_quiet and second.is_quiet, first, second)
    before = first.scripts.sent + second.scripts.sent
    turn_until(lambda: first.got + second.got == ["a"], first, second)
    # The claim that finds the message, and one more: a timer may be early.
    assert first.scripts.sent + second.scripts.sent - before <= 4


def test_full_consumers_hand_a_wakeup_over_once_each(
    scripts: PartitionScripts, make_fetcher: MakeFetcher
) -> None:
    full = [make_fetcher(1) for _ in range(3)]
    turn_until(lambda: all(each.is_quiet for each in full), *full)
    for each in full:
        each.room = 0
    once_more = [each.scripts.sent + 1 for each in full]
    scripts.push("a")
    turn_until(lambda: [each.scripts.sent for each in full] == once_more and scripts.token(), *full)
    turn_for(0.1, *full)
    assert [each.scripts.sent for each in full] == once_more
    full[1].room = 1
    turn_until(lambda: full[1].got == ["a"], *full)


def test_a_cancelled_consumer_hands_its_next_look_over(
    scripts: PartitionScripts, make_fetcher: MakeFetcher
) -> None:
    leaver, idle = make_fetcher(1), make_fetcher(1)
    delay(scripts, a=LATE_S)
    turn_until(keeps(scripts, leaver), leaver)
    turn_until(lambda: idle.is_quiet, idle)
    leaver.fetcher.unsubscribe(PartitionKeys("online", QUEUE).prefix)
    turn_until(keeps(scripts, idle), leaver, idle)


def test_a_next_look_assigned_to_a_cancelled_consumer_is_handed_over(
    scripts: PartitionScripts, make_fetcher: MakeFetcher
) -> None:
    leaver, idle = make_fetcher(1), make_fetcher(1)
    turn_until(lambda: idle.is_quiet, idle)
    delay(scripts, a=0.3)
    leaver.fetcher.tick()
    # The broker assigns it the next look, and the answer arrives after the cancel.
    leaver.fetcher.unsubscribe(PartitionKeys("online", QUEUE).prefix)
    turn_until(lambda: idle.got == ["a"], leaver, idle)


def test_a_new_connection_without_a_free_slot_hands_over_the_next_look_of_the_lost_one(
    scripts: PartitionScripts, make_fetcher: MakeFetcher
) -> None:
    first, idle = make_fetcher(1), make_fetcher(1)
    delay(scripts, a=LATE_S)
    turn_until(keeps(scripts, first), first)
    turn_until(lambda: idle.is_quiet, idle)
    first.close()
    second = make_fetcher(0, process=first.process)
    turn_until(keeps(scripts, idle), second, idle)


def test_a_wakeup_is_handed_over_when_another_queue_takes_the_last_slot(
    kombu_client: KombuClient, make_fetcher: MakeFetcher
) -> None:
    mails, pushes = PartitionScripts(kombu_client.client, OTHER), PartitionScripts(kombu_client.client, QUEUE)
    both, idle = make_fetcher(1, OTHER, QUEUE), make_fetcher(1)
    turn_until(lambda: both.is_quiet, both)
    turn_until(lambda: idle.is_quiet, idle)
    pushes.push("a")  # its wake-up goes to the consumer that has waited longer
    mails.push("m")
    both.fetcher.look_again(PartitionKeys("online", OTHER).prefix)
    turn_until(lambda: both.got == ["m"], both)
    turn_until(lambda: idle.got == ["a"], both, idle)


def test_a_consumer_that_is_about_to_block_takes_no_wakeup(
    kombu_client: KombuClient, make_fetcher: MakeFetcher
) -> None:
    mails, pushes = PartitionScripts(kombu_client.client, OTHER), PartitionScripts(kombu_client.client, QUEUE)
    solo, idle = make_fetcher(1, OTHER, QUEUE, holds=False), make_fetcher(1)
    delay(pushes, a=LATE_S)
    turn_until(keeps(pushes, solo), solo)
    turn_until(lambda: idle.is_quiet, idle)
    solo.on_message = solo.fetcher.handovers.send_before_blocking
    delay(mails, m=0.2)
    turn_until(lambda: solo.got == ["m"], solo)
    # The event loop of the first consumer is blocked.
    turn_until(keeps(pushes, idle), idle)


def test_an_next_look_is_handed_on_before_the_task_of_another_queue(
    kombu_client: KombuClient, make_fetcher: MakeFetcher
) -> None:
    """No answer is read during the task, not even the one that the script is not known to Redis."""
    mails, pushes = PartitionScripts(kombu_client.client, OTHER), PartitionScripts(kombu_client.client, QUEUE)
    solo, idle = make_fetcher(1, OTHER, QUEUE, holds=False), make_fetcher(1)
    delay(pushes, a=LATE_S)
    turn_until(keeps(pushes, solo), solo)
    turn_until(lambda: idle.is_quiet, idle)
    solo.on_message = solo.fetcher.handovers.send_before_blocking
    kombu_client.client.script_flush()
    mails.push("m")  # its wake-up answers the wait of the solo worker, which need not be cancelled
    turn_until(lambda: solo.got == ["m"], solo)
    turn_until(keeps(pushes, idle), idle)


def test_a_wake_up_that_was_passed_on_before_a_task_arrives_during_it(
    scripts: PartitionScripts, make_fetcher: MakeFetcher
) -> None:
    scripts.push("a")
    process = ConsumerIdentity(LEASE_S)
    process.in_flight.record_renewal(scripts.keys.prefix, process.clock.monotonic())
    solo = make_fetcher(0, process=process, holds=False)
    assert scripts.client.lpop(scripts.keys.wake)  # as if its lost connection had taken the wake-up
    scripts.client.script_flush()
    solo.fetcher.tick()  # without room, it passes the wake-up on
    solo.fetcher.handovers.send_before_blocking()
    assert scripts.token()


def test_a_consumer_that_runs_a_suspect_backs_off_from_other_suspects(
    scripts: PartitionScripts, make_fetcher: MakeFetcher
) -> None:
    scripts.push("a", tenant="t")
    scripts.push("b", tenant="u")
    assert scripts.take(2, "dead") == ["a", "b"]
    scripts.lose("dead")
    assert scripts.reap() == 2
    scripts.client.zrem(scripts.keys.leases, "reaper")
    worker = make_fetcher(4)
    turn_until(lambda: worker.got == ["a"], worker)
    before = worker.scripts.sent
    turn_for(1.0, worker)
    # The back-off doubles: 20 ms, 40 ms, 80 ms, …
    assert worker.scripts.sent - before <= 12
    assert worker.got == ["a"]
    worker.process.in_flight.finish(worker.tags[0])
    before = worker.scripts.sent
    turn_until(lambda: worker.got == ["a", "b"], worker)
    assert worker.scripts.sent - before <= 2  # one may have been under way
