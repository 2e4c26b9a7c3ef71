"""A process of the project that runs one program after the other.

``python -m tests.outbox.shop.console PATH`` listens at the path. A test sends a text, and gets the value of
the variable ``answer`` or a traceback.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback

import django


class Undo(Exception):
    """Rolls a transaction back."""


def names() -> dict[str, object]:
    """Return what every program of a test uses; Django must be set up."""
    from django.db import connections, transaction

    from celery_dq.contrib.django.models import OutboxRow
    from tests.outbox.shop import celery
    from tests.outbox.shop.models import Order

    tasks = {name: getattr(celery, name) for name in ("app", "notify", "order_in_task", "report", "resize")}
    own = {"connections": connections, "transaction": transaction, "OutboxRow": OutboxRow, "Order": Order}
    return {**tasks, **own, "Undo": Undo}


def main(path: str) -> None:
    """Run the programs that come, until the end of the connection."""
    django.setup()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        connection, _ = server.accept()
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            scope = names()
            try:
                exec(json.loads(line), scope)
                answer = [None, scope.get("answer")]
            except Exception:
                answer = [traceback.format_exc(), None]
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


if __name__ == "__main__":
    main(sys.argv[1])
