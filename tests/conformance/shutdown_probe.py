"""A worker that reports when it waits only for the last results, receives one of them, or sleeps."""

from __future__ import annotations

import os
from typing import Any

from billiard.pool import READY
from celery.concurrency import asynpool

from tests.conformance import shop
from tests.workers import ENVIRONMENT

#: The reports to the witness.
WAITS, RECEIVES, SLEEPS = "waits for last results", "receives a last result", "sleeps over last results"


def install_probe(port: int) -> None:
    """Report to the witness at this port."""
    witness = shop.Witness(port)
    handler: Any = asynpool.ResultHandler
    names = vars(asynpool)
    wait, sleep = handler.on_stop_not_started, names["sleep"]

    def reporting_sleep(seconds: float) -> None:
        witness.report(SLEEPS, seconds)
        sleep(seconds)  # Celery's own sleep, which is reported

    def reporting_wait(self: Any) -> None:
        take = self.on_state_change

        def reporting_result(message: Any) -> None:
            take(message)
            if message[0] == READY:
                witness.report(RECEIVES)

        self.on_state_change = reporting_result
        witness.report(WAITS)
        names["sleep"] = reporting_sleep
        wait(self)
        names["sleep"] = sleep

    handler.on_stop_not_started = reporting_wait


if ENVIRONMENT in os.environ:
    app = shop.app
    install_probe(int(app.conf["witness_port"]))
