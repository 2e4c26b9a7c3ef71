"""``celery dq …``: the queues from the command line.

Celery loads this module with every ``celery`` command, before it loads the project. The URL schemes are
therefore known to ``celery purge``, ``celery amqp`` and all others too.

``output``     how every command takes ``--json``, prints and fails
``typos``      refuses unknown names, and suggests the nearest one
``status``     queues, consumers and leaders on one screen
``queues``     look at queues and tenants, move and delete messages
``messages``   look at messages, cancel them
``quotas``     quotas of tenants
``dead_letters``  dead letters
``leaders``    leaders of singleton queues and other elections
``doctor``     checks of the set-up
``dedup``      dedup locks
``spill``      buffered messages on disk
``zookeeper``  queues in ZooKeeper

The commands call ``app.dq`` and ``celery_dq.inspector``, and hold no logic of their own.
"""

from __future__ import annotations

import click

from celery_dq.cli.dead_letters import dead
from celery_dq.cli.dedup import dedup
from celery_dq.cli.doctor import doctor
from celery_dq.cli.leaders import leaders
from celery_dq.cli.messages import cancel, explain, find, peek
from celery_dq.cli.queues import move, purge, queues, tenants
from celery_dq.cli.quotas import quotas
from celery_dq.cli.spill import spill
from celery_dq.cli.status import status
from celery_dq.cli.zookeeper import zookeeper
from celery_dq.wiring import equip_every_app

equip_every_app()


@click.group(name="dq")
def dq() -> None:
    """Inspect tenant queues, cancel and move tasks, set quotas, replay dead letters."""


for command in (
    status,
    queues,
    tenants,
    quotas,
    peek,
    find,
    cancel,
    move,
    purge,
    dead,
    dedup,
    leaders,
    spill,
    explain,
    doctor,
    zookeeper,
):
    dq.add_command(command)
