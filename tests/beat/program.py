"""A beat, or a worker with a beat, that injects a fault into itself.

``DQ_BEAT`` (JSON): ``conf`` has the settings; ``fault`` happens around the sending of the third tick;
``flag`` is a file that is created with the fault, so that only one beat has it; ``sleepy`` makes the worker's
loop wait until an event happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from celery import Celery
from kombu.asynchronous import Hub

import celery_dq
from celery_dq.beat import ElectedScheduler
from celery_dq.transport.redis.consuming import subscriptions
from celery_dq.transport.redis.store import transient

DESCRIBED = json.loads(os.environ["DQ_BEAT"])

app = Celery("beating", set_as_current=False)
app.conf.update(DESCRIBED["conf"])
celery_dq.setup(app)


@app.task(name="tick")
def tick() -> None:
    """Do nothing: no worker runs this task."""


class FaultyScheduler(ElectedScheduler):
    """A scheduler that stops or kills its process before or after the broker has received a tick."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sent, count = self._send, 0

        def send(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                self.fault("before")
            result = sent(*args, **kwargs)
            if count == 3:
                self.fault("after")
            return result

        self._send = send

    @staticmethod
    def fault(moment: str) -> None:
        how, _, when = DESCRIBED["fault"].partition(" ")
        if when != moment:
            return
        try:
            os.close(os.open(DESCRIBED["flag"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[how])


def _sleep_long() -> None:
    """Make a worker's loop wait for events alone: no timer and no empty answer wakes it."""
    hubs: Any = Hub
    fire_timers = hubs.fire_timers

    def fire_and_sleep(hub: Hub, *args: Any, **kwargs: Any) -> float:
        fire_timers(hub, *args, **kwargs)
        return 3600.0

    hubs.fire_timers = fire_and_sleep
    for module in (subscriptions, transient):
        assert hasattr(module, "BLPOP_TIMEOUT_S")
        vars(module)["BLPOP_TIMEOUT_S"] = 3600


if __name__ == "__main__":
    if DESCRIBED["sleepy"]:
        _sleep_long()
    app.start(sys.argv[1:])
