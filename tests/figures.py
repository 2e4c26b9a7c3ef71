"""Makes the picture of ``celery dq top`` in the documentation: ``python -m tests.figures``."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

from celery import Celery
from rich.console import Console

import celery_dq
from celery_dq.cli.top_screen import TopState, screen
from celery_dq.testing.servers import RedisServer

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "top.svg"
#: Messages by queue and tenant.
BACKLOGS = {"push": {"flash sale": 240, "bakery": 12, "acme": 3}, "mail": {"acme": 1}, "ledger": {"": 2}}


def main() -> None:
    """Fill a Redis, claim and throttle, and draw the screen."""
    with RedisServer() as server:
        app: Any = Celery("shop", broker=server.url(0).replace("redis://", "dq-redis://", 1))
        celery_dq.setup(app)
        app.conf.update(task_default_queue="push", dq_queues={"mail": {}, "ledger": {}})
        state = TopState(app.dq, time.monotonic)
        app.dq.quotas.set("push", "flash sale", rate="2/s")
        for queue, tenants in BACKLOGS.items():
            for tenant, count in tenants.items():
                for _ in range(count):
                    app.send_task("notify", (tenant,), queue=queue, tenant=tenant)
        state.refresh()
        for queue, want in (("push", 6), ("mail", 1)):
            with app.dq._broker.open_home(queue) as (partition, client):
                partition.claim("worker-1:4711:9c2e", lease_ms=15_000, want=want).run(client)
        app.send_task("notify", ("acme",), queue="push", tenant="acme")
        while state.now() - state.reading.at < 2:
            time.sleep(0.1)
        state.refresh()
        console = Console(width=80, height=24, record=True, file=io.StringIO(), force_terminal=True)
        console.print(screen(state, 24))
        picture = console.export_svg(title="celery -A shop dq top")
        # Without the fonts that rich would load from a server.
        FIGURE.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
