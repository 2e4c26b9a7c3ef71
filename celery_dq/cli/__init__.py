"""``celery dq …``: the queues from the command line.

Celery loads this module with every ``celery`` command, before it loads the project. The URL schemes are
therefore known to ``celery purge``, ``celery amqp`` and all others too.

``output``     how every command takes ``--json``, prints and fails
``bulk``       dry runs and questions of commands that change much
``progress``   progress of commands that take long, and their interruption
``times``      options that give a time or a duration
``typos``      refuses unknown names, and suggests the nearest one
``status``     queues, consumers and leaders on one screen
``top``        the same live, with keys; ``top_state`` and ``top_screen`` are its parts
``queues``     look at queues and tenants, move and delete messages
``partitions``  partitions of queues
``messages``   look at messages, cancel or edit them
``pauses``     stop and restart a queue or a tenant
``quotas``     quotas of tenants
``dead_letters``  dead letters
``migrate``    moves messages from kombu's Redis transport, or back
``audit``      who changed queues and quotas
``leaders``    leaders of singleton queues and other elections
``workers``    workers that share partitions
``doctor``     checks of the set-up
``dedup``      dedup locks
``spill``      buffered messages on disk
``zookeeper``  queues in ZooKeeper
``exporter``   metrics for Prometheus
``probe``      probes of a worker, for Kubernetes and others
``web``        the dashboard

The commands call ``app.dq`` and ``celery_dq.inspector``, and hold no logic of their own.
"""

from __future__ import annotations

import click

from celery_dq.cli.audit import audit
from celery_dq.cli.dead_letters import dead
from celery_dq.cli.dedup import dedup
from celery_dq.cli.doctor import doctor
from celery_dq.cli.exporter import exporter
from celery_dq.cli.leaders import leaders
from celery_dq.cli.messages import cancel, edit, explain, find, peek, reprioritise, reschedule
from celery_dq.cli.migrate import migrate
from celery_dq.cli.output import ErrorsAsJson, explain_configuration_errors
from celery_dq.cli.partitions import partitions
from celery_dq.cli.pauses import pause, resume
from celery_dq.cli.probe import alive, ready
from celery_dq.cli.queues import move, purge, queues, tenants
from celery_dq.cli.quotas import quotas
from celery_dq.cli.spill import spill
from celery_dq.cli.status import status
from celery_dq.cli.top import top
from celery_dq.cli.web import web
from celery_dq.cli.workers import workers
from celery_dq.cli.zookeeper import zookeeper
from celery_dq.wiring import equip_every_app

equip_every_app()
explain_configuration_errors()


@click.group(name="dq", cls=ErrorsAsJson)
def dq() -> None:
    """Inspect tenant queues, cancel and move tasks, pause, set quotas, replay dead letters."""


for command in (
    status,
    top,
    queues,
    partitions,
    tenants,
    quotas,
    peek,
    find,
    cancel,
    edit,
    reschedule,
    reprioritise,
    move,
    migrate,
    purge,
    pause,
    resume,
    dead,
    dedup,
    leaders,
    workers,
    audit,
    spill,
    explain,
    doctor,
    alive,
    ready,
    zookeeper,
    exporter,
    web,
):
    dq.add_command(command)
