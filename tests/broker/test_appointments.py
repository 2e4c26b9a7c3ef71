"""The consumer that was assigned the next look keeps it or hands it over. Nothing renews a lease here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_dq.keys import PartitionKeys
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from tests.broker.claims_harness import ClaimsHarness, turn_for, turn_until
from tests.broker.kombu_client import KombuClient
from tests.lua.partition_scripts import PartitionScripts

MakeConsumer = Callable[..., ClaimsHarness]

#: Queues of these tests only, because threads of earlier tests may still run.
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
def make_consumer(kombu_client: KombuClient) -> Iterator[MakeConsumer]:
    hired: list[ClaimsHarness] = []

    def hire(room: int, *queues: str, process: ConsumerIdentity | None = None) -> ClaimsHarness:
        hired.append(ClaimsHarness(kombu_client.url, room, queues or (QUEUE,), process))
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


def keeps(scripts: PartitionScripts, harness: ClaimsHarness) -> Callable[[], bool]:
    return lambda: owner(scripts) == harness.process.consumer and harness.is_quiet


def test_a_full_consumer_hands_each_next_look_on(
    scripts: PartitionScripts, make_consumer: MakeConsumer
) -> None:
    full, idle = make_consumer(1), make_consumer(3)
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
    scripts: PartitionScripts, make_consumer: MakeConsumer
) -> None:
    alone = make_consumer(1)
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
    scripts: PartitionScripts, make_consumer: MakeConsumer, tenant: str | None
) -> None:
    first, second = make_consumer(3), make_consumer(3)
    turn_until(lambda: first.is_quiet and second.is_quiet, first, second)
    scripts.partition.pause(tenant, for_us=500_000).run(scripts.client)
    scripts.push("a")
    turn_until(lambda: owner(scripts) != "" and first.is_quiet and second.is_quiet, first, second)
    before = first.scripts.sent + second.scripts.sent
    turn_until(lambda: first.got + second.got == ["a"], first, second)
    # The claim that finds the message, and one more: a timer may be early.
    assert first.scripts.sent + second.scripts.sent - before <= 4


def test_full_consumers_hand_a_wakeup_over_once_each(
    scripts: PartitionScripts, make_consumer: MakeConsumer
) -> None:
    full = [make_consumer(1) for _ in range(3)]
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
    scripts: PartitionScripts, make_consumer: MakeConsumer
) -> None:
    leaver, idle = make_consumer(1), make_consumer(1)
    delay(scripts, a=LATE_S)
    turn_until(keeps(scripts, leaver), leaver)
    turn_until(lambda: idle.is_quiet, idle)
    leaver.claims.unsubscribe(PartitionKeys("online", QUEUE).prefix)
    turn_until(keeps(scripts, idle), leaver, idle)


def test_a_new_connection_without_a_free_slot_hands_over_the_next_look_of_the_lost_one(
    scripts: PartitionScripts, make_consumer: MakeConsumer
) -> None:
    first, idle = make_consumer(1), make_consumer(1)
    delay(scripts, a=LATE_S)
    turn_until(keeps(scripts, first), first)
    turn_until(lambda: idle.is_quiet, idle)
    first.close()
    second = make_consumer(0, process=first.process)
    turn_until(keeps(scripts, idle), second, idle)


def test_a_wakeup_is_handed_over_when_another_queue_takes_the_last_slot(
    kombu_client: KombuClient, make_consumer: MakeConsumer
) -> None:
    mails, pushes = PartitionScripts(kombu_client.client, OTHER), PartitionScripts(kombu_client.client, QUEUE)
    both, idle = make_consumer(1, OTHER, QUEUE), make_consumer(1)
    turn_until(lambda: both.is_quiet, both)
    turn_until(lambda: idle.is_quiet, idle)
    pushes.push("a")  # its wake-up goes to the consumer that has waited longer
    mails.push("m")
    both.claims.look_again(PartitionKeys("online", OTHER).prefix)
    turn_until(lambda: both.got == ["m"], both)
    turn_until(lambda: idle.got == ["a"], both, idle)


def test_a_consumer_that_runs_a_suspect_backs_off_from_other_suspects(
    scripts: PartitionScripts, make_consumer: MakeConsumer
) -> None:
    scripts.push("a", tenant="t")
    scripts.push("b", tenant="u")
    assert scripts.take(2, "dead") == ["a", "b"]
    scripts.lose("dead")
    assert scripts.reap() == 2
    scripts.client.zrem(scripts.keys.leases, "reaper")
    worker = make_consumer(4)
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
