"""Makes calls under the real Sentry SDK, each in its own transaction.

Run it as ``python -m tests.producer.sentry_shop ORDER URL``, with the URL of a broker. With the order
``first`` Sentry is initialised before set-up, with ``last`` after the message templates were made. The
program prints a JSON list of ``[task id, id of the caller's trace]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import sentry_sdk
from celery import Celery
from sentry_sdk.integrations.celery import CeleryIntegration

import celery_dq


def begin_sentry() -> None:
    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        traces_sample_rate=1.0,
        default_integrations=False,
        integrations=[CeleryIntegration()],
        transport=lambda event: None,
    )


def main(order: str, url: str) -> None:
    if order == "first":
        begin_sentry()
    app: Any = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(dq_buffer_folder="")
    celery_dq.setup(app)

    def work(a: int) -> None: ...

    task = app.task(name="known", shared=False)(work)
    calls: list[Callable[..., Any]] = [
        lambda **options: task.apply_async((1,), **options),
        lambda **options: app.send_task("known", (1,), **options),
        lambda **options: app.send_task("known elsewhere", (1,), **options),
    ]
    if order == "last":
        for call in calls * 3:
            call(buffered=True)
            call(buffered=False)
        with app.dq.buffer.buffered():
            for _ in range(3):
                task.delay(1)  # installs the fast path on the task
        begin_sentry()
    made = []
    for call in calls:
        for options in ({"buffered": True}, {"buffered": False}):
            for number in range(3):
                with sentry_sdk.start_transaction(name=f"request {number}") as transaction:
                    made.append((call(**options).id, transaction.trace_id))
    with app.dq.buffer.buffered():
        for number in range(3):
            with sentry_sdk.start_transaction(name=f"request {number}") as transaction:
                made.append((task.delay(1).id, transaction.trace_id))
    assert app.dq.buffer.flush(30) == 0
    print(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
