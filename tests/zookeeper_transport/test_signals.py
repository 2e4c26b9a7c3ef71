"""Signal handlers that interrupt the transport, as at a cold shutdown."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from kombu import Connection

from tests.conformance.kombu_queue import KombuQueue
from tests.zookeeper_transport.kinds import transport_of


def test_a_signal_handler_may_wake_a_fetcher_whose_wake_up_it_interrupts(hosts: str) -> None:
    # Closed at the end of a success only, because the end would wait for a deadlock, too.
    connection = Connection(f"dq-zookeeper://{hosts}")
    KombuQueue(connection, "q").consume()
    transport, interrupts = transport_of(connection), 0

    def wake() -> None:
        transport.look_again()
        transport.wake_delivery()
        transport.flush()

    def handle(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal interrupts
        if event == "line":
            sys.settrace(None)
            interrupts += 1
            wake()
            sys.settrace(handle)
        return handle

    def run() -> None:
        sys.settrace(handle)
        wake()
        sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert interrupts > 10
    connection.close()
