"""Runs the commands of ``celery dq`` against a small shop, and writes their outputs for the reference.

``python docs/_ext/cli_outputs.py`` starts a Redis of its own, and writes ``docs/reference/cli_outputs.json``:
command -> its words and its output. The reference shows them below the usage of each command.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from getpass import getuser
from pathlib import Path
from socket import gethostname
from typing import Any

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

import celery_dq
from celery_dq.cli import dq
from celery_dq.testing.servers import RedisServer

FILE = Path(__file__).parents[1] / "reference" / "cli_outputs.json"
#: The commands in the order in which they run, without ``celery -A shop dq``.
COMMANDS = """\
status
queues
queues push
tenants push
tenants push --like rist
peek push --limit 3
find order-1
explain order-4
explain --tenant acme --queue push
quotas set push acme --rate 50/s --burst 10 --max-waiting 1000
quotas get push
quotas export push
quotas copy push --to mail --yes
quotas rm push acme
pause push --tenant bakery --for 15m
resume push --tenant bakery
reschedule order-1 --countdown 15m
reprioritise order-2 9
edit order-2 --args '["bakery", 7]'
cancel push --tenant florist --dry-run
cancel push order-3
move push mail --tenant florist --yes
purge mail --yes
dead list push
dead list push --tenant acme --since 2h
dead show push order-0
dead purge push --all --dry-run
dead replay push --all --yes
dead recover push --dry-run
dedup list push
dedup verdicts push
dedup repetition --log calls.txt --consumers 4
partitions push --set 4
partitions push
leaders
spill list
spill replay --dry-run
spill quarantine list
migrate dq-redis://localhost:{port}/0 redis://localhost:{port}/1 --priorities same --dry-run
audit --limit 3
doctor
"""


def main() -> None:
    """Write the file."""
    with (
        RedisServer(appendonly=True) as server,
        tempfile.TemporaryDirectory() as folder,
        Celery("shop", broker=server.url(scheme="dq-redis"), set_as_current=False) as app,
    ):
        _fill(app, Path(folder))
        log = Path(folder) / "calls.txt"
        log.write_text("".join(f"refresh(sku={number % 5})\n" for number in range(40)))
        found = {}
        for line in COMMANDS.format(port=server.port).splitlines():
            words = shlex.split(line.replace("calls.txt", str(log)))
            result = CliRunner().invoke(
                dq, words, obj=CLIContext(app=app, no_color=True, workdir=None), terminal_width=100
            )
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            stable = (
                (str(server.port), "6379"),
                ("127.0.0.1", "localhost"),
                (folder, "/var/lib/shop"),
                (f"{getuser()}@{gethostname()}", "ops@host"),
            )
            output = result.output
            for here, everywhere in stable:
                line, output = line.replace(here, everywhere), output.replace(here, everywhere)
            found.setdefault(_name(words), []).append([line, output])
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _name(words: list[str]) -> str:
    """Return the name of the command: one word, or two or three of nested commands."""
    command: Any = dq
    names = []
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
        names.append(word)
    return " ".join(names)


def _fill(app: Any, folder: Path) -> None:
    """Publish some messages; one is a dead letter, one has a dedup key, and a worker has one."""
    celery_dq.setup(app)
    app.conf.update(dq_buffer_folder=str(folder / "buffer"), task_default_queue="push")
    (folder / "buffer").mkdir()
    notify = app.task(shared=False, name="shop.notify")(_notify)
    for number, tenant in enumerate(("acme", "acme", "acme", "bakery", "florist", "florist")):
        notify.apply_async((tenant, number), task_id=f"order-{number}", tenant=tenant)
        if number == 0:
            with app.dq._broker.open("push") as (partitions, client):
                (entry,) = partitions[0].claim("w1", lease_ms=60_000, want=1).run(client).entries
                partitions[0].dead_letter("w1", entry.tag, reason="failed: timeout", worker="w1").run(client)
    notify.apply_async(("acme", 7), task_id="order-7", tenant="acme", countdown=3600)
    notify.apply_async(("acme", 8), task_id="order-8", tenant="acme", dedup={"key": "{merchant}"})
    notify.apply_async(("acme", 9), task_id="order-9", queue="mail", tenant="acme")


def _notify(merchant: str, order: int) -> None: ...


if __name__ == "__main__":
    main()
