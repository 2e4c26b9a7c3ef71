"""``celery dq …``: the queues from the command line.

Celery loads this module with every ``celery`` command, before it loads the project, so the schemes
are known to ``celery purge``, ``celery amqp`` and all others too.
"""

from __future__ import annotations

import click

from celery_dq.cli.dedup import claims
from celery_dq.cli.keep import dead, doctor, quotas
from celery_dq.cli.operate import cancel, explain, find, move, peek, purge, queues, tenants
from celery_dq.cli.spill import spill
from celery_dq.wiring import equip_every_app

equip_every_app()


@click.group(name="dq")
def dq() -> None:
    """Tenant queues: look, cancel, move, set quotas, replay dead letters."""


for command in (
    queues,
    tenants,
    quotas,
    peek,
    find,
    cancel,
    move,
    purge,
    dead,
    claims,
    spill,
    explain,
    doctor,
):
    dq.add_command(command)
