"""A worker that reports when it waits only for the last results, receives one of them, or sleeps."""

from __future__ import annotations

import os
from typing import Any

from billiard.pool import READY
from celery.concurrency import asynpool

from tests.conformance import shop
from tests.workers import ENVIRONMENT

#: The reports to the witness.
WAITS, HEARS, SLEEPS = "waits for last results", "hears a last result", "sleeps over last results"


def tell(port: int) -> None:
    """Report to the witness at this port."""
    witness = shop.Witness(port)
    handler: Any = asynpool.ResultHandler
    names = vars(asynpool)
    wait, sleep = handler.on_stop_not_started, names["sleep"]

    def told_sleep(seconds: float) -> None:
        witness.tell(SLEEPS, seconds)
        sleep(seconds)  # Celery's own sleep, which is reported

    def told_wait(self: Any) -> None:
        take = self.on_state_change

        def told_result(message: Any) -> None:
            take(message)
            if message[0] == READY:
                witness.tell(HEARS)

        self.on_state_change = told_result
        witness.tell(WAITS)
        names["sleep"] = told_sleep
        wait(self)
        names["sleep"] = sleep

    handler.on_stop_not_started = told_wait


if ENVIRONMENT in os.environ:
    app = shop.app
    tell(int(app.conf["witness_port"]))
