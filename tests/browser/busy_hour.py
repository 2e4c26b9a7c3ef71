"""The queues of a busy hour, for pages and pictures."""

from __future__ import annotations

import random
import time
from typing import Any

__all__ = ["fill"]


def fill(app: Any, *, part: float = 1) -> None:
    """Publish the messages of a busy hour, or a part of them, and claim some."""
    numbers = random.Random(7)

    def send(tenant: str, count: int, **options: Any) -> None:
        for order in range(count):
            app.tasks["notify"].apply_async((tenant, order), **options)

    quotas = app.dq.quotas
    quotas.set_default("push", rate="6/m", concurrency=8)
    quotas.set("push", "Bluebird Books", rate="200/s", burst=50, weight=2, concurrency=2)
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
                time.sleep(0.12)
                entries = partition.claim(worker, lease_ms=3_600_000, want=24).run(client).entries
                tags = [entry.tag for entry in entries]
                for tag in tags[:2] if queue == "push" else ():
                    reason = numbers.choice(["5 workers were lost", "TimeoutError: push gateway", "rejected"])
                    partition.dead_letter(worker, tag, reason=reason, worker=worker).run(client)
                if turn < turns - 1:
                    partition.ack(worker, finish=tags[2:20]).run(client)
