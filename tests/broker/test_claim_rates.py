"""No window holds more claims than the quota allows, by the clock of the server, over all consumers."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

from benchmarks.at_claim import Moment, claim_for, keep_house
from benchmarks.measure import ServerProbe
from benchmarks.postbox import QUEUE, connect, publish_many
from benchmarks.quotas import app_on, worst_excess
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient
from tests.lua.partition_scripts import PartitionScripts

#: tenant -> messages/s, burst.
QUOTAS = {"slow": (3.0, 1.0), "odd": (77.7, 8.0), "fast": (400.0, 40.0)}


def test_no_window_of_claims_exceeds_the_quota() -> None:
    with RedisServer() as server, connect("dq", server.port) as connection:
        app: Any = app_on(server)
        for tenant, (rate, burst) in QUOTAS.items():
            app.dq.quotas.set(QUEUE, tenant, rate=rate, burst=burst)
        publish_many(
            connection, chain.from_iterable(zip(*[[tenant] * 600 for tenant in QUOTAS], strict=True))
        )
        times = defaultdict(list)
        for moment in chain.from_iterable(claim_for(server.port, QUEUE, 1.5, consumers=4, want=10)):
            times[moment.tenant].append(moment.at_us)
        begin = min(map(min, times.values()))
        for tenant, (rate, burst) in QUOTAS.items():
            moments = [(at_us - begin) / 1e6 for at_us in times[tenant]]
            assert worst_excess(moments, rate, burst) <= 0, tenant
            # The burst was claimed in full, so the run was not idle.
            assert len(moments) >= burst
        app.close()


def test_a_cancelled_consumer_refunds_the_permit_of_its_claim_under_way(kombu_client: KombuClient) -> None:
    scripts = PartitionScripts(kombu_client.client, kombu_client.queue)
    scripts.set_quota("slow", rate=0.001)
    scripts.take(1)  # loads the script, so that the claim below is one command
    kombu_client.publish(1, 2, tenant="slow")
    first, second = scripts.waiting("slow")
    with kombu_client.connect() as connection:
        with kombu_client.consuming(connection, prefetch=1) as got:
            connection.default_channel.tick()
            # The claim has taken the only permit of a thousand seconds, and its answer is not read yet.
            wait_until(lambda: scripts.waiting("slow") == [second])
        assert got == []
        wait_until(lambda: scripts.waiting("slow") == [first, second])
        assert scripts.take(2) == [first]


def test_a_message_that_a_consumer_was_given_has_cost_its_permit(kombu_client: KombuClient) -> None:
    scripts = PartitionScripts(kombu_client.client, kombu_client.queue)
    scripts.set_quota("slow", rate=0.001)
    kombu_client.publish(1, tenant="slow")
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=1) as got:
        kombu_client.drain(connection, got, 1)
        (waiting,) = (message.message_id for message in got)
    # The message was not acknowledged, so it returns when its connection closes. It may have begun.
    wait_until(lambda: scripts.waiting("slow") == [waiting])
    assert scripts.place("slow") == "throttled"


def test_a_tenant_without_messages_and_with_all_permits_takes_no_memory() -> None:
    with RedisServer() as server, connect("dq", server.port) as connection:
        app: Any = app_on(server)
        app.dq.quotas.set_default(QUEUE, rate=1000, burst=2)
        publish_many(connection, (f"t{number}" for number in range(300)))
        claimed: list[Moment] = []

        def all_claimed() -> bool:
            claimed.extend(chain.from_iterable(claim_for(server.port, QUEUE, 0.2, consumers=2, want=100)))
            return len(claimed) == 300

        probe = ServerProbe(server.port)

        def nothing_is_left() -> bool:
            keep_house(server.port, QUEUE, 5)
            return probe.bytes_of_tenants() == 0

        wait_until(all_claimed, 60, what=lambda: f"300 claims; there were {len(claimed)}")
        wait_until(
            nothing_is_left, 60, what=lambda: f"no memory; there were {probe.bytes_of_tenants()} bytes"
        )
        probe.close()
        app.close()
