"""``celery dq …``: the queues from the command line.

Celery loads this module with every ``celery`` command, before it loads the project. The URL schemes are
therefore known to ``celery purge``, ``celery amqp`` and all others too.

``output``     how every command takes ``--json``, prints and fails
``bulk``       dry runs, questions and progress of commands that change much
``arguments``  times, durations and arguments of tasks; refuses unknown names
``status``     queues, consumers and leaders on one screen; leaders, workers, audit, checks of the set-up
``top``        the same live, with keys; ``top_screen`` has its state and draws it
``queues``     look at queues and tenants, move and delete messages, partitions, pauses
``messages``   look at messages, cancel or edit them
``quotas``     quotas of tenants
``dead_letters``  dead letters
``migrate``    moves messages from kombu's Redis transport, or back
``dedup``      dedup locks
``spill``      buffered messages on disk
``zookeeper``  queues in ZooKeeper
``monitoring``  metrics for Prometheus, probes for Kubernetes and others, the dashboard

The commands call ``app.dq`` and ``celery_dq.inspector``, and hold no logic of their own.
"""

from __future__ import annotations

import click

from celery_dq.cli.dead_letters import dead
from celery_dq.cli.dedup import dedup
from celery_dq.cli.messages import cancel, edit, explain, find, peek, reprioritise, reschedule
from celery_dq.cli.migrate import migrate
from celery_dq.cli.monitoring import alive, exporter, ready, web
from celery_dq.cli.output import ErrorsAsJson, explain_configuration_errors
from celery_dq.cli.queues import move, partitions, pause, purge, queues, resume, tenants
from celery_dq.cli.quotas import quotas
from celery_dq.cli.spill import spill
from celery_dq.cli.status import audit, doctor, leaders, status, workers
from celery_dq.cli.top import top
from celery_dq.cli.zookeeper import zookeeper
from celery_dq.wiring import equip_every_app

equip_every_app()
explain_configuration_errors()


@click.group(name="dq", cls=ErrorsAsJson)
def dq() -> None:
    """Inspect tenant queues, cancel and move tasks, pause, set quotas, replay dead letters."""


for command in (
    *(status, top, queues, partitions, tenants, quotas, peek, find, cancel, edit, reschedule, reprioritise),
    *(move, migrate, purge, pause, resume, dead, dedup, leaders, workers, audit, spill, explain, doctor),
    *(alive, ready, zookeeper, exporter, web),
):
    dq.add_command(command)
