"""One consumer of several queues: turns, groups of waits, several claims. No heartbeat thread runs here."""

from __future__ import annotations

from tests.broker.fetcher_harness import FetcherHarness, turn_until
from tests.broker.kombu_client import KombuClient
from tests.lua.partition_scripts import PartitionScripts

#: Queues of these tests only, because heartbeat threads of earlier tests may still run.
BUSY, IDLE = "busy", "idle"


def test_a_backlog_in_one_queue_does_not_hide_a_message_of_another(kombu_client: KombuClient) -> None:
    busy, idle = (PartitionScripts(kombu_client.client, name) for name in (BUSY, IDLE))
    harness = FetcherHarness(kombu_client.url, 10, (BUSY, IDLE))
    try:
        turn_until(lambda: harness.is_quiet, harness)

        def send_next() -> None:
            # The backlog never ends.
            number = len(harness.got)
            harness.room = number + 2
            busy.push(f"b{number}", f"c{number}")
            if number == 5:
                idle.push("here")

        harness.on_message = send_next
        busy.push("first", "second")
        turn_until(lambda: "here" in harness.got, harness, timeout_s=5)
    finally:
        harness.close()
