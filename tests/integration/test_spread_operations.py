"""Commands on a tenant that lives in several partitions of its queue."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq import InvalidQuota, QueueFull, TenantMoving
from celery_dq.app.checks.doctor import check_server
from celery_dq.errors import ConfigurationError, InvalidRequest
from celery_dq.inspector.live_quotas import LiveQuotas, read_document, written
from celery_dq.options import Quota, resolve
from celery_dq.transport.redis.store.home import home_of
from tests.dq_command import run_dq
from tests.integration.partitioned_shop import A2, A, B, D, opened
from tests.integration.shop import send
from tests.lua.partition_scripts import PartitionScripts
from tests.lua.test_claim_rates import make_earlier


@pytest.fixture
def heavy(wide: Any) -> Any:
    """The shop, whose tenant A has twelve messages in three partitions."""
    wide.dq.quotas.set("push", A, spread=3)
    send(wide, *[A] * 12)
    return wide


class PartitionOf(PartitionScripts):
    """One partition of several."""

    def __init__(self, client: Any, partition: Any) -> None:
        super().__init__(client)
        self.keys, self.partition = partition.keys, partition


def claim_everywhere(app: Any, want: int = 99) -> list[Any]:
    """Claim in all partitions, and return the partition with each message."""
    with opened(app) as (partitions, client):
        return [
            (partition, entry)
            for partition in partitions
            for entry in partition.claim("worker:1", lease_ms=60_000, want=want).run(client).entries
        ]


def finish(app: Any, claimed: list[Any]) -> None:
    with opened(app) as (_, client):
        for partition, entry in claimed:
            partition.ack("worker:1", finish=[entry.tag]).run(client)


def lives_in(app: Any, tenant: str) -> tuple[tuple[int, ...], int]:
    """Return the partitions of a tenant's shares, and the one in which it would live without a spread."""
    with opened(app) as (partitions, _):
        homes = partitions[0].homes
        return homes.partitions(tenant), home_of(tenant, homes.count)


def test_a_spread_tenant_is_one_tenant(heavy: Any, queue: Any) -> None:
    send(heavy, B)
    assert (queue.tenant(A).waiting, queue.tenant(A).state) == (12, "eligible")
    assert [(each.tenant, each.waiting) for each in queue.tenants(limit=2)] in (
        [(A, 12), (B, 1)],
        [(B, 1), (A, 12)],
    )
    assert {each.tenant: each.waiting for each in queue.tenant_page().tenants} == {A: 12, B: 1}
    assert [(each.tenant, each.waiting) for each in queue.backlogs(largest=2).largest] == [(A, 12), (B, 1)]
    assert len(queue.peek(tenant=A, limit=20)) == 12
    explained = queue.explain(A)
    assert (explained.state, explained.reason) == ("eligible", "no-worker")
    assert explained.sentence.startswith(
        f"Tenant {A!r} lives in 3 partitions of 'push' and has 12 messages waiting; in push/"
    )
    claim_everywhere(heavy)
    assert (queue.tenant(A).running, queue.tenant(A).waiting) == (12, 0)


@pytest.mark.parametrize("claims_of_second", [0, 4])
def test_a_starved_share_is_seen_in_the_rate_and_the_share(
    wide: Any, queue: Any, claims_of_second: int
) -> None:
    wide.dq.quotas.set("push", A, spread=2)
    send(wide, *[A] * 200, *[A2] * 100)
    with opened(wide) as found:
        first, second = found.of(A)
        for partition, claims, tenants in ((first, 40, (A, A2)), (second, claims_of_second, (A,))):
            for want in (2, claims // 2, claims - claims // 2) if claims else ():
                partition.claim("worker:1", lease_ms=60_000, want=want).run(found.client)
            if claims:
                make_earlier(PartitionOf(found.client, partition), 10_000_000, *tenants)
    service, every = queue.tenant(A).service, 4.0 + claims_of_second / 10
    assert service.got_per_s == pytest.approx(2.0 + claims_of_second / 10, rel=0.05)
    assert service.share_got == pytest.approx(service.got_per_s / every, rel=0.05)
    # Three tenants of one weight stand in the two partitions, and two of them are its shares.
    assert service.share_by_weight == pytest.approx(2 / 3, rel=0.05)
    assert service.due_per_s == pytest.approx(every * 2 / 3, rel=0.05)
    wide.dq.quotas.set("push", A, rate=1, burst=2)
    assert queue.tenant(A).service.due_per_s == 1


def test_limits_of_a_spread_tenant_are_exact(heavy: Any, queue: Any) -> None:
    send(heavy, *[A] * 40)
    heavy.dq.quotas.set("push", A, concurrency=7)
    assert len(claim_everywhere(heavy)) == 7
    assert ": 3 of 3 run at once" in queue.explain(A).sentence
    heavy.dq.quotas.set("push", A, concurrency=None, rate="1/h", burst=9)
    assert len(claim_everywhere(heavy)) == 9
    assert "its share, 1 of 3, of 1/h is used up" in queue.explain(A).sentence


def test_each_share_of_a_spread_tenant_has_its_part_of_the_bound(heavy: Any, queue: Any) -> None:
    heavy.dq.quotas.set("push", A, max_waiting=3)
    full = "at least as many wait as its share of max_waiting allows, so new calls are refused"
    assert queue.explain(A).sentence.endswith(f": {full}.")
    (waiting,) = queue.peek(tenant=A, limit=1)
    assert full in heavy.dq.explain(task_id=waiting.task_id).sentence
    before = queue.tenant(A).waiting
    with pytest.raises(QueueFull, match="waits? in a partition of queue 'push', and its share of the"):
        send(heavy, *[A] * 4)
    assert queue.tenant(A).waiting <= before + 2, "at most two shares were empty, and took one message each"
    with pytest.raises(InvalidQuota, match="max_waiting = 2 is below spread = 3"):
        heavy.dq.quotas.set("push", A, max_waiting=2)


def test_limits_are_exact_when_a_share_has_moved(heavy: Any, queue: Any) -> None:
    heavy.dq.quotas.set("push", A, concurrency=7)
    queue.pause(tenant=A)
    send(heavy, D)
    ((home, running),) = claim_everywhere(heavy)
    queue.resume(tenant=A)
    for _ in range(3):
        with pytest.raises(TenantMoving):  # a task of another tenant runs
            queue.set_partitions(3, timeout=0)
    send(heavy, *[A] * 40)
    claimed = claim_everywhere(heavy)
    assert len(claimed) == 7
    finish(heavy, [(home, running), *claimed])
    queue.set_partitions(3, timeout=30)
    heavy.dq.quotas.set("push", A, spread=2)
    assert len([entry for _, entry in claim_everywhere(heavy)]) == 7


@pytest.mark.parametrize("spread", [1, 2])
def test_permits_that_a_share_has_used_are_not_used_again_when_it_goes(heavy: Any, spread: int) -> None:
    """In every window at most rate * window + burst."""
    send(heavy, *[A] * 40)
    heavy.dq.quotas.set("push", A, rate="1/h", burst=9)
    with opened(heavy) as found:
        claimed = [
            (share, entry)
            for share in found.of(A)[spread:]
            for entry in share.claim("worker:1", lease_ms=60_000, want=9).run(found.client).entries
        ]
    assert len(claimed) == 9 - 3 * spread
    finish(heavy, claimed)
    heavy.dq.quotas.set("push", A, spread=spread, timeout=30)
    assert len(claim_everywhere(heavy)) == 9 - len(claimed)


def test_a_new_share_waits_for_the_messages_that_run_in_the_old_one(wide: Any, queue: Any) -> None:
    wide.dq.quotas.set("push", A, concurrency=8)
    send(wide, *[A] * 40)
    claimed = claim_everywhere(wide)
    with pytest.raises(TenantMoving):
        wide.dq.quotas.set("push", A, spread=4, timeout=0)
    assert (len(claimed), claim_everywhere(wide)) == (8, [])
    finish(wide, claimed[:6])
    assert wide.dq.quotas.set("push", A, spread=4).spread == 4
    assert len(claim_everywhere(wide)) == 6


def test_a_pause_holds_all_partitions_and_follows_the_tenant(heavy: Any, queue: Any) -> None:
    queue.pause(tenant=A)
    assert claim_everywhere(heavy) == []
    heavy.dq.quotas.set("push", A, spread=4)
    send(heavy, *[A] * 8)
    assert claim_everywhere(heavy) == []
    assert heavy.dq.quotas.set("push", A, spread=2).paused
    assert claim_everywhere(heavy) == []
    queue.resume(tenant=A)
    assert len(claim_everywhere(heavy)) == 20


def test_messages_of_all_partitions_are_cancelled_moved_and_purged(heavy: Any, queue: Any) -> None:
    (task_id, *_) = send(heavy, *[A] * 6)
    assert queue.cancel(task_id) == "waiting"
    assert queue.move("other", tenant=A, dry_run=True) == 17
    assert queue.move("other", tenant=A) == 17
    back = heavy.dq.queues["other"]
    assert back.move("push", tenant=A) == 17
    assert len({each.partition for each in queue.peek(tenant=A, limit=20)}) > 1
    assert queue.cancel_tenant(A, dry_run=True) == 17
    assert queue.cancel_tenant(A) == 17
    assert queue.purge() == 18
    assert queue.tenant(A).waiting == 0


def test_a_dedup_key_has_one_partition(heavy: Any, queue: Any) -> None:
    notify, dedup = heavy.tasks["notify"], heavy.dq.dedup["push"]
    places = set()
    for number in range(8):
        first = notify.apply_async((A, 100 + number), dedup={"key": "{order}"})
        again = notify.apply_async((A, 100 + number), dedup={"key": "{order}"})
        assert (again.id, again.verdict) == (first.id, "decline")
        key = next(each.key for each in dedup.list() if each.head == first.id)
        assert dedup.inspect(key, tenant=A).head == first.id
        places.add(queue.find(first.id).partition)
        assert dedup.release(key, tenant=A) == first.id
    assert len(places) > 1


def test_a_dead_letter_is_replayed_in_a_partition_of_its_tenant(heavy: Any, queue: Any) -> None:
    for partition, entry in claim_everywhere(heavy):
        with opened(heavy) as (_, client):
            partition.dead_letter("worker:1", entry.tag, reason="rejected", worker="w").run(client)
    heavy.dq.quotas.remove("push", A)
    assert len(heavy.dq.dead_letters["push"].list()) == 12
    assert heavy.dq.dead_letters["push"].replay() == 12
    assert queue.tenant(A).waiting == 12
    assert {each.partition for each in queue.peek(tenant=A, limit=20)} == {0}


def test_the_doctor_names_a_tenant_that_waits_for_its_running_tasks(heavy: Any, queue: Any) -> None:
    heavy.dq.quotas.set("push", A, concurrency=12)
    claimed = claim_everywhere(heavy)
    with pytest.raises(TenantMoving, match=f"tenant {A!r} of 'push' still runs tasks"):
        heavy.dq.quotas.set("push", A, spread=1, timeout=0)
    with pytest.raises(InvalidRequest, match=f"the spread of tenant {A!r} is not complete. Complete it"):
        heavy.dq.quotas.set("push", B, spread=2)
    (finding,) = [each for each in check_server(heavy) if each.code == "W023"]
    assert f"of the spread of tenant {A!r} is not complete" in finding.problem
    finish(heavy, claimed)
    run_dq(heavy, "partitions push --set 4")
    assert heavy.dq.quotas.get("push", A) == Quota(concurrency=12)
    send(heavy, *[A] * 20)
    assert len(claim_everywhere(heavy)) == 12


def test_a_quota_that_is_to_be_removed_is_of_one_partition_until_then(heavy: Any, queue: Any) -> None:
    heavy.dq.quotas.set("push", A, concurrency=12)
    claimed = claim_everywhere(heavy)
    with pytest.raises(TenantMoving):
        heavy.dq.quotas.remove("push", A, timeout=0)
    assert heavy.dq.quotas.get("push", A) == Quota(concurrency=12)
    with pytest.raises(TenantMoving):
        heavy.dq.quotas.set("push", A, concurrency=3, timeout=0)
    with opened(heavy) as (partitions, client):
        limits = [int(each.explain_tenant(A).run(client)["concurrency"]) for each in partitions]
    assert sorted(limits) == [0, 1, 1, 1]
    finish(heavy, claimed)
    run_dq(heavy, "partitions push --set 4")
    assert heavy.dq.quotas.list("push") == {A: Quota(concurrency=3)}


def test_a_spread_that_cannot_be_is_refused(heavy: Any, queue: Any) -> None:
    quotas = heavy.dq.quotas
    with pytest.raises(
        InvalidQuota, match="spread = 5, but the queue has 4 partitions: give a spread up to 4"
    ):
        quotas.set("push", A, spread=5)
    with pytest.raises(InvalidQuota, match="concurrency = 2 is below spread = 3"):
        quotas.set("push", A, concurrency=2)
    with pytest.raises(InvalidQuota, match="spread = 2 belongs to the quota of one tenant"):
        quotas.set_default("push", spread=2)
    with pytest.raises(InvalidQuota, match="spread = 2 belongs to the quota of one tenant"):
        read_document('{"push": {"default": {"spread": 2}}}', "a file")
    with pytest.raises(
        ConfigurationError, match=r"dq_queues\['push'\]: spread = 2 belongs to the quota of one"
    ):
        resolve({"dq_queues": {"push": {"spread": 2}}})
    with pytest.raises(InvalidRequest, match=f"tenant {A!r} lives in 3 of them: run celery dq quotas set"):
        queue.set_partitions(2)
    quotas.set("push", "flash sale", spread=4)
    with pytest.raises(InvalidRequest, match="quotas set push 'flash sale' --spread 2"):
        queue.set_partitions(2)
    quotas.remove("push", "flash sale")
    assert "--spread needs a TENANT" in run_dq(heavy, "quotas set push --spread 2", status=2).output
    assert quotas.list("push") == {A: Quota(spread=3)}


def test_a_call_returns_the_quota_of_a_tenant_that_leaves_its_first_partition(wide: Any, queue: Any) -> None:
    wide.dq.quotas.set("push", B, rate=50, burst=4, spread=2)
    queue.set_partitions(7, timeout=30)
    before, home = lives_in(wide, B)
    assert home not in before, "the shares stay where they are, and the home is another one by now"
    wanted = Quota(rate=50, burst=4)
    assert wide.dq.quotas.set("push", B, spread=1) == wanted == wide.dq.quotas.get("push", B)


def test_a_spread_is_set_by_the_command_line_and_by_documents(heavy: Any) -> None:
    result = run_dq(heavy, "quotas", "set", "push", A, "--spread", "2", "--rate", "50", "--burst", "4")
    assert result.output == "rate=50/s burst=4 weight=1 concurrency=unlimited spread=2\n"
    live = heavy.dq.quotas.live("push")
    document = written({"push": live})
    assert '"concurrency": null, "spread": 2}' in document
    assert read_document(document, "a file") == {"push": live}
    assert heavy.dq.quotas.changes("push", live) == []
    wanted = LiveQuotas(None, {A: Quota(rate=60, burst=8, spread=4), B: Quota(spread=2)})
    assert heavy.dq.quotas.make(heavy.dq.quotas.changes("push", wanted)) == 2
    assert heavy.dq.quotas.live("push") == wanted
    send(heavy, "x")
    with pytest.raises(InvalidQuota, match="in 'pull': spread = 4, but the queue has 1 partition: give"):
        heavy.dq.quotas.changes("pull", wanted)  # as a dry run does
