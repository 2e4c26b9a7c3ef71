"""The queues of a busy hour, for pages and pictures."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from celery_dq.app.api.history import STEP_MS, HistorySample
from celery_dq.inspector.queue_counters import WAIT_BOUNDS_S
from celery_dq.keys import history_stream

__all__ = ["fill", "served", "write_history"]


def fill(app: Any, *, part: float = 1) -> None:
    """Publish the messages of a busy hour, or a part of them, and claim some."""
    numbers = random.Random(7)

    def send(tenant: str, count: int, **options: Any) -> None:
        for order in range(count):
            app.tasks["notify"].apply_async((tenant, order), **options)

    with app.dq.audit.through("app.dq", by="anna@ops-1"):
        _fill(app, numbers, send, part)


def _fill(app: Any, numbers: random.Random, send: Callable[..., None], part: float) -> None:
    quotas = app.dq.quotas
    quotas.set_default("push", rate="6/m", concurrency=8)
    quotas.set("push", "Bluebird Books", rate="200/s", burst=50, weight=2, concurrency=6)
    quotas.set("push", "kaffee-werk", rate="20/s", burst=5, concurrency=4)
    quotas.set("push", "Osaka Knives", rate="10/h", burst=3)
    quotas.set("mail", "kaffee-werk", concurrency=3)
    for tenant, count in (
        ("Bluebird Books", 940),
        ("kaffee-werk", 410),
        ("Osaka Knives", 260),
        ("Atelier Nord", 77),
    ):
        send(tenant, round(part * count))
    for _ in range(round(part * 160)):
        send(f"m-{numbers.randrange(10_000, 99_999)}", 1 + numbers.randrange(3))
    quotas.pause("push", "Atelier Nord")
    send("kaffee-werk", 30, queue="mail")
    send("m-10442", 4, queue="mail", countdown=4000)
    send("nightly", 12, queue="reports", countdown=9000)
    send("ledger", 2, queue="ledger")
    consumers = [
        ("push", "web-1:4121:9f2c", 3),
        ("push", "web-2:3988:a01b", 3),
        ("mail", "mail-1:77:0c0d", 1),
    ]
    for queue, worker, turns in consumers:
        with app.dq._broker.open_home(queue) as (partition, client):
            for turn in range(turns):
                time.sleep(0.12)  # the rates of tenants allow further messages
                entries = partition.claim(worker, lease_ms=3_600_000, want=24).run(client).entries
                tags = [entry.tag for entry in entries]
                for tag in tags[:2] if queue == "push" else ():
                    reason = numbers.choice(["5 workers were lost", "TimeoutError: push gateway", "rejected"])
                    partition.dead_letter(worker, tag, reason=reason, worker=worker).run(client)
                if turn < turns - 1:
                    partition.ack(worker, finish=tags[2:20]).run(client)


@contextlib.contextmanager
def served(app: Any, *, warm_up_s: float) -> Iterator[None]:
    """Claim and finish some messages of ``push`` every tenth of a second, so that tenants have rates.

    Args:
        app: The app.
        warm_up_s: Seconds before the block begins.
    """
    ended = threading.Event()

    def work() -> None:
        tags: list[bytes] = []
        while not ended.wait(0.1):
            with app.dq._broker.open_home("push") as (partition, client):
                partition.ack("web-1:4121:9f2c", finish=tags).run(client)
                claimed = partition.claim("web-1:4121:9f2c", lease_ms=3_600_000, want=5).run(client)
                tags = [entry.tag for entry in claimed.entries]

    worker = threading.Thread(target=work, name="busy-hour")
    worker.start()
    try:
        ended.wait(warm_up_s)
        yield
    finally:
        ended.set()
        worker.join()


def write_history(app: Any) -> None:
    """Write samples of an hour, with a burst that workers catch up with."""
    numbers = random.Random(7)
    waiting, published, buckets = 30.0, 0.0, [0] * len(WAIT_BOUNDS_S)
    with app.dq._broker.channel() as channel:
        now_ms = int(channel.client.time()[0]) * 1000
        for step in range(240, 1, -1):
            burst = 34 * math.exp(-(((step - 60) / 9) ** 2))
            arrived = (40 + 12 * math.sin(step / 30) + burst) * STEP_MS / 1000 * numbers.uniform(0.9, 1.1)
            done = min(waiting + arrived, 62 * STEP_MS / 1000 * numbers.uniform(0.92, 1.04))
            waiting, published = waiting + arrived - done, published + arrived
            wait_s = waiting / 60
            for part, factor in ((0.6, 0.3), (0.35, 1.0), (0.05, 4.0)):
                place = next(place for place, bound in enumerate(WAIT_BOUNDS_S) if wait_s * factor <= bound)
                buckets[place] += round(done * part)
            total = sum(buckets)
            sample = HistorySample(
                0, round(waiting), wait_s * 5, round(published), total, total, tuple(buckets)
            )
            channel.client.xadd(
                history_stream("online", "push"), {"s": sample.pack()}, id=f"{now_ms - step * STEP_MS}-0"
            )
