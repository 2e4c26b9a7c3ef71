"""A producer and a worker for the tests: publish, claim, dead-letter."""

from __future__ import annotations

from typing import Any

from celery_dq.app.api.pauses import extend_pause
from celery_dq.transport.partition_replies import PauseCause


def send(app: Any, *merchants: Any, **options: Any) -> list[str]:
    """Publish a `notify` for each merchant; return the task ids."""
    notify = app.tasks["notify"]
    return [notify.apply_async((merchant, place), **options).id for place, merchant in enumerate(merchants)]


def claim(app: Any, want: int = 1, queue: str = "push") -> list[Any]:
    """Take messages, as a worker would."""
    with app.dq._broker.open_home(queue) as (partition, client):
        claimed = partition.claim("worker:1", lease_ms=60_000, want=want).run(client)
        return list(claimed.entries)


def throttle(app: Any, tenant: str, reason: str = "429", queue: str = "push") -> PauseCause:
    """Pause a tenant for an hour, as a task of it that raises ``Throttled``; return the cause."""
    cause = PauseCause(reason, "notify", "7d3c")
    with app.dq._broker.open(queue) as opened:
        extend_pause(app.dq._broker, opened, tenant, 3_600_000_000, cause.pack())
    return cause


def receive(app: Any) -> Any:
    """Take a message of ``push`` through kombu."""
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        return channel.message_to_python(channel.basic_get("push", no_ack=True))


def dead_letter(app: Any, merchant: str = "a", *, reason: str = "rejected", **options: Any) -> str:
    """Publish a message and dead-letter it; return its id."""
    task_id = str(app.tasks["notify"].apply_async(**{"args": (merchant, 0), **options}).id)
    (entry,) = claim(app)
    with app.dq._broker.open_home("push") as (partition, client):
        partition.dead_letter("worker:1", entry.tag, reason=reason, worker="worker:1").run(client)
    return task_id
