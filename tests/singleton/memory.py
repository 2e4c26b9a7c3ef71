"""A worker on ``memory://`` with a singleton queue: ``python -m tests.singleton.memory <redis url>``."""

from __future__ import annotations

import sys
import threading
from typing import Any

from celery import Celery
from celery.contrib.testing.worker import start_worker

import celery_dq

LAST = 4


def main(election: str) -> None:
    app = Celery("memory", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        task_default_queue="ledger",
        dq_singleton_queues=["ledger"],
        dq_election=election,
    )
    celery_dq.setup(app)
    seen: list[tuple[int, int]] = []
    done = threading.Event()

    @app.task(bind=True, shared=False)
    def post(self: Any, number: int) -> None:
        seen.append((number, self.request.dq_token))
        if number == LAST:
            done.set()

    for number in range(LAST + 1):
        post.delay(number)
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=60):
        if not done.wait(60):
            raise TimeoutError(f"ran {seen}")
    print(*(number for number, _ in seen), "token", *{token for _, token in seen})


if __name__ == "__main__":
    main(sys.argv[1])
