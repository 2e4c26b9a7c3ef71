"""The number of partitions of a queue: changes, ``celery dq partitions`` and the doctor, on a real Redis."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, cast

import pytest
from celery import Celery
from kombu import Queue

import celery_dq
from celery_dq.app.api import map_change, tenant_moves
from celery_dq.app.checks.doctor import check_server, read_status
from celery_dq.app.checks.finding import Finding
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.live_quotas import LiveQuotas
from celery_dq.options import Quota
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.apps import DQCelery
from tests.dq_command import run_dq
from tests.integration.partitioned_shop import (
    COUNT,
    TENANTS,
    A,
    B,
    C,
    D,
    claim_in,
    killed,
    opened,
    tombstones,
)
from tests.integration.shop import send
from tests.lua.partition_scripts import make_record


def problems(app: Any) -> list[Finding]:
    return [each for each in check_server(app) if each.code in ("W022", "W023", "W024", "W025")]


# The number of partitions.


def test_the_number_is_changed_with_quotas_pauses_and_tombstones(wide: Any, queue: Any) -> None:
    quotas = wide.dq.quotas
    for tenant in TENANTS:
        quotas.set("push", tenant, rate=5)
    quotas.set_default("push", rate=7)
    for tenant in (C, D):
        quotas.pause("push", tenant, until=timedelta(hours=1))
    pause = queue.pause(until=timedelta(hours=2))
    since = quotas.paused("push")
    live = quotas.live("push")
    wide.dq.revoke(["later"])
    for count in (9, 2, 9, 1, 4):
        before = queue.set_partitions(count).before
        assert (queue.set_partitions(count).before, before != count) == (count, True)
        assert quotas.live("push") == live
        assert quotas.paused("push") == since
        now = queue.snapshot()
        for each in now.partitions or (now,):
            assert each.pause.until == pause.until
        with opened(wide) as (partitions, client):
            assert len(partitions) == count
            for each in partitions:
                for _, end in client.zrange(each.keys.pause_ends, 0, 0, withscores=True):
                    assert 0 < float(client.hget(each.keys.state, "resume_at")) <= end
            stored = [client.hkeys(each.keys.quotas) for each in partitions]
            assert sum(map(len, stored)) == count + len(TENANTS)  # a default in each, and nothing left over
        assert {quotas.get("push", each) for each in TENANTS[:2]} == {Quota(rate=5)}
        assert queue.find("later").state == "cancelled"
        assert tombstones(wide) == [1] * count
    assert [each.details for each in wide.dq.audit()[:2]] == ["1 -> 4", "9 -> 1"]
    queue.set_partitions(1)
    assert queue.resume()
    queue.set_partitions(4)
    assert [each.pause for each in queue.snapshot().partitions] == [None] * COUNT
    send(wide, *TENANTS)
    assert [each.waiting for each in queue.snapshot().partitions] == [1, 1, 1, 1]
    for tenant in (C, D):
        with wide.dq._broker.open_home("push", tenant) as (home, client):
            client.zadd(home.keys.pause_ends, {tenant: 1})
            client.hset(home.keys.state, "resume_at", 1)
    assert [len(claim_in(wide, tenant)) for tenant in TENANTS] == [1, 1, 1, 1], "pauses end in the new homes"


def test_the_copies_that_a_killed_change_has_left_do_not_count(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = wide.dq.quotas
    for tenant in TENANTS:
        quotas.set("push", tenant, rate=5)
        quotas.pause("push", tenant)
    monkeypatch.setattr(map_change, "remove_former_settings", killed)
    with pytest.raises(KeyboardInterrupt):
        queue.set_partitions(9)
    for tenant in TENANTS:
        quotas.remove("push", tenant)
        quotas.resume("push", tenant)
    with opened(wide) as (partitions, client):
        assert sum(client.hlen(each.keys.quotas) for each in partitions) > 0
        assert sum(client.zcard(each.keys.pauses) for each in partitions) > 0
    assert (quotas.list("push"), quotas.paused("push")) == ({}, {})
    assert quotas.live("push") == LiveQuotas()


def test_a_partition_that_goes_leaves_no_key_for_ever_and_keeps_all_when_it_returns(
    wide: Any, queue: Any
) -> None:
    queue.pause(until=timedelta(hours=1))
    for tenant in TENANTS:
        wide.dq.quotas.set("push", tenant, rate=5, concurrency=9)
    queue.resume()
    queue.cancel("later")
    send(wide, *TENANTS * 2)
    for tenant in TENANTS:
        (entry,) = claim_in(wide, tenant, 1)
        with wide.dq._broker.open_home("push", tenant) as (home, client):
            home.ack("worker:1", finish=[entry.tag]).run(client)
    with opened(wide) as (partitions, client):
        going = partitions[3]

        def lives() -> dict[bytes, int]:
            return {key: client.pttl(key) for key in client.keys("*online/push/3*")}

        queue.set_partitions(2)
        assert lives()
        assert {key for key, life_ms in lives().items() if life_ms <= 0} == set()
        queue.set_partitions(4)
        assert {life_ms for key, life_ms in lives().items() if b"producer:" not in key} == {-1}
        queue.set_partitions(2)
        client.delete(*lives())
        # A client that has slept for longer than a day still has the map of four partitions.
        (reply,) = going.push([OutgoingRecord(0, "late", make_record(D))]).run(client)
        assert reply.status == "misrouted"
    assert len(send(wide, *TENANTS)) == queue.snapshot().waiting - len(TENANTS)


def test_a_partition_gets_no_name_of_another_queue(shop: Any) -> None:
    shop.send_task("notify", (D,), tenant=D, queue="push/3")
    with pytest.raises(InvalidRequest, match="'push/3' is another queue, and would be the name"):
        shop.dq.queues["push"].set_partitions(4)
    assert shop.dq.queues["push"].set_partitions(3).after == 3


@pytest.mark.parametrize("known_by", ["setting", "argument", "broker"])
def test_a_singleton_queue_gets_no_partitions(shop: Any, known_by: str) -> None:
    if known_by == "setting":
        shop.conf.dq_singleton_queues = ["ledger"]
    elif known_by == "argument":
        arguments = {"x-single-active-consumer": True}
        shop.conf.task_queues = [Queue("ledger", queue_arguments=arguments)]
    else:  # another program has the setting, and its worker has led the queue
        with shop.dq._broker.open_home("ledger") as (partition, client):
            partition.fence(5).run(client)
    shop.send_task("notify", (A,), queue="ledger")
    queue = shop.dq.queues["ledger"]
    with pytest.raises(InvalidRequest, match="'ledger' is a singleton queue, which has one partition"):
        queue.set_partitions(4)
    assert queue.set_partitions(1).after == 1
    if known_by == "broker":
        assert shop.dq.leaders.forget("ledger")
        assert queue.set_partitions(4).after == 4


def test_an_interrupted_change_is_named_and_completed(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in TENANTS:
        wide.dq.quotas.set("push", tenant, rate=5)
    wide.dq.quotas.set_default("push", rate=7)
    live = wide.dq.quotas.live("push")

    with monkeypatch.context() as patch:
        patch.setattr(map_change, "follow", killed)  # partition 0 has the new number by then
        with pytest.raises(KeyboardInterrupt):
            queue.set_partitions(9)
    assert [each.code for each in problems(wide)] == ["W022", "W023"]
    assert "from 4 to 9 partitions is not complete" in problems(wide)[1].problem
    assert wide.dq.quotas.live("push") == live
    with pytest.raises(InvalidRequest, match="to 9 partitions is not complete. Complete it first"):
        queue.set_partitions(4)
    assert queue.set_partitions(9).before == 4
    assert queue.set_partitions(4).before == 9
    assert problems(wide) == []
    assert wide.dq.quotas.live("push") == live
    with opened(wide) as (partitions, client):
        assert [client.hlen(each.keys.quotas) for each in partitions] == [2] * 4
    send(wide, *TENANTS)
    assert [each.waiting for each in queue.snapshot().partitions] == [1, 1, 1, 1]


def test_a_queue_with_live_quotas_is_not_split_by_the_settings_alone(shop: Any) -> None:
    shop.dq.quotas.set("push", D, rate=5)
    shop.conf.dq_queues = {"push": {"partitions": COUNT}}
    app = Celery("next", broker=shop.conf.broker_url, set_as_current=False)
    celery_dq.setup(app)
    with cast(DQCelery, app) as later:
        later.conf.task_default_queue = "push"
        later.conf.dq_queues = {"push": {"partitions": COUNT}}
        later.send_task("notify", (D,), tenant=D)
        assert later.dq.queues["push"].snapshot().partitions == ()
        assert later.dq.queues["push"].purge() == 1
        assert [each.code for each in problems(later)] == ["W022"]
        assert later.dq.queues["push"].set_partitions(COUNT).after == COUNT
        assert later.dq.quotas.get("push", D) == Quota(rate=5)
        assert problems(later) == []


@pytest.mark.parametrize(
    "remove",
    [
        lambda queue: queue.purge(),
        lambda queue: sum(queue.cancel_tenant(tenant) for tenant in TENANTS),
        lambda queue: queue.cancel_task_name("notify"),
    ],
    ids=["purge", "cancel_tenant", "cancel_task_name"],
)
def test_messages_that_a_killed_mover_had_taken_out_are_found(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch, remove: Any
) -> None:
    send(wide, *TENANTS * 3)

    with monkeypatch.context() as patch:
        patch.setattr(tenant_moves, "import_messages", killed)
        with pytest.raises(KeyboardInterrupt):
            queue.set_partitions(9)
    assert remove(queue) == 3 * len(TENANTS)
    queue.set_partitions(9)
    assert queue.snapshot().waiting == 0


# The doctor, and the command line.


def test_the_doctor_names_partitions_with_another_quota_or_without_a_worker(wide: Any, queue: Any) -> None:
    wide.dq.quotas.set_default("push", rate=7)
    send(wide, *TENANTS)
    assert problems(wide) == []
    with opened(wide) as (partitions, client):
        partitions[2].set_default_quota(None).run(client)
    claim_in(wide, A)
    with opened(wide) as (partitions, client):
        partitions[1].pause(None).run(client)
    assert [each.code for each in problems(wide)] == ["W024", "W024", "W025"]
    queue.resume()
    found = {each.code: each.problem for each in problems(wide)}
    assert found.keys() == {"W024", "W025"}
    assert "push/2 have not that of push/0" in found["W024"]
    assert "wait in push/1, push/2, push/3, where no worker has a lease" in found["W025"]
    (found_waiting,) = (each for each in read_status(wide).findings if each.code == "W019")
    waiting, remedy = found_waiting.problem, found_waiting.remedy
    assert remedy == (
        "Start a worker with -Q push (a running worker follows a new number of partitions within a quarter "
        "of dq_lease)."
    )
    assert waiting == "Messages wait in 'push/1', 'push/2', 'push/3' (3), and no living worker consumes them."
    wide.dq.quotas.set_default("push", rate=8)
    assert [each.code for each in problems(wide)] == ["W025"]
    with opened(wide) as (partitions, client):
        for partition in partitions:  # each has a worker that reconnects, since a moment ago
            now_us = int(client.time()[0]) * 1_000_000
            client.zadd(partition.keys.leases, {"worker:2": now_us - 2_000_000})
    assert problems(wide) == []


def test_the_doctor_names_partitions_without_the_pause_of_the_queue(wide: Any, queue: Any) -> None:
    queue.pause(until=timedelta(hours=1))
    assert problems(wide) == []
    with opened(wide) as (partitions, client):
        partitions[3].resume(None).run(client)
    (found,) = problems(wide)
    assert (found.code, "pause of queue 'push'" in found.problem) == ("W024", True)
    assert "push/3 have not that of push/0" in found.problem
    assert queue.snapshot().pause is None
    queue.pause(until=timedelta(hours=1))
    assert problems(wide) == []
    assert queue.resume()
    assert problems(wide) == []


def test_the_command_line_shows_and_changes_partitions(wide: Any, queue: Any) -> None:
    send(wide, *TENANTS, A)
    claim_in(wide, B)
    rows = run_dq(wide, "partitions", "push").output.splitlines()
    assert rows[0].split() == [
        *("name", "waiting", "held", "delayed", "consumers", "oldest_waiting_s", "tenants"),
    ]
    assert [line.split()[:5] for line in rows[1:]] == [
        ["push/0", "2", "0", "0", "0"],
        ["push/1", "0", "1", "0", "1"],
        ["push/2", "1", "0", "0", "0"],
        ["push/3", "1", "0", "0", "0"],
    ]
    assert run_dq(wide, "partitions").output.splitlines()[1].startswith("push/0")
    (row,) = json.loads(run_dq(wide, "queues", "--json", "push").output)
    assert (row["waiting"], [each["waiting"] for each in row["partitions"]]) == (4, [2, 0, 1, 1])
    assert run_dq(wide, "queues", "push").output.splitlines()[1].split()[:3] == ["push", "4", "4"]


def test_the_command_line_changes_the_number(wide: Any, queue: Any) -> None:
    send(wide, A)
    assert queue.purge() == 1
    done = run_dq(wide, "partitions", "push", "--set", "6")
    assert done.output.splitlines() == [
        "'push' has 6 partitions (before: 4).",
        "Set dq_queues['push']['partitions'] = 6 in the settings.",
    ]
    entries = wide.dq.audit()
    done = run_dq(wide, "partitions", "push", "--set", "6")
    assert done.output == "'push' has 6 partitions already; nothing was changed.\n"
    assert wide.dq.audit() == entries
    assert "'push' has 1 partition (before: 6)." in run_dq(wide, "partitions", "push", "--set", "1").output
    run_dq(wide, "partitions --set 6", status=2)


def test_a_change_of_quotas_and_pauses_before_the_decision_is_not_lost(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, resumed = [each for each in map(str, range(100)) if PartitionMap(7, 4).moves(each)][:2]
    quotas, decide = wide.dq.quotas, map_change._decide
    quotas.pause("push", resumed)
    quotas.set("push", resumed, rate=3)

    def decide_late(first: Any, client: Any, options: Any, before: PartitionMap, now: PartitionMap) -> None:
        if now.before is not None:
            quotas.pause("push", paused)
            quotas.set("push", paused, rate=5)
            quotas.resume("push", resumed)
            quotas.remove("push", resumed)
            quotas.set_default("push", rate=7)
            queue.pause()
            wide.dq.revoke(["later"])
        decide(first, client, options, before, now)

    monkeypatch.setattr(map_change, "_decide", decide_late)
    queue.set_partitions(7)
    live = quotas.live("push")
    assert set(quotas.paused("push")) == {paused}
    assert {tenant: each.rate for tenant, each in live.tenants.items()} == {paused: Quota(rate=5).rate}
    assert all(each.pause for each in queue.snapshot().partitions)
    with opened(wide) as (partitions, client):
        assert all(client.zscore(each.keys.tombstones, "later") for each in partitions)
        assert len({client.hget(each.keys.quotas, "default") for each in partitions}) == 1
