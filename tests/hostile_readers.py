"""All commands and pages that read a queue. None may end with a traceback, whatever a queue holds."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_dq.cli import dq

#: Commands that change nothing. ``ID`` is the id of a message.
COMMANDS = (
    "status",
    "top --once",
    "queues",
    "queues push",
    "partitions",
    "partitions push",
    "tenants push",
    "peek push --limit 20",
    "peek push --delayed",
    "find ID",
    "explain ID",
    "explain --queue push --tenant a",
    "dead list push",
    "dead list push --task notify",
    "dead show push ID",
    "dead replay push --all --task nothing --yes",
    "dead replay push --all --dry-run",
    "dead recover push --dry-run",
    "cancel push --task-name notify --dry-run",
    "cancel push --tenant a --dry-run",
    "move push other --create --tenant a --dry-run",
    "purge push --dry-run",
    "dedup list push",
    "dedup verdicts push",
    "dedup repetition push",
    "quotas get push a",
    "quotas get push",
    "quotas export push",
    "leaders",
    "workers",
    "audit",
    "doctor",
)
#: Those that name no message.
LISTS = tuple(line for line in COMMANDS if "ID" not in line)
#: Commands that change the message, in the order of their harm.
CHANGES = (
    "reprioritise ID 3",
    "reschedule ID --countdown 5",
    "edit ID --args [1]",
    "dead edit push ID --args [1]",
    "dead edit push ID --eta 2030-01-01",
    "dead edit push ID --priority 4",
    "move push other --create --task-id ID --yes",
    "cancel push ID --yes",
    "dead replay push ID --yes",
    "dead purge push ID --yes",
)
PAGES = (
    "",
    "queue/?queue=push",
    "tenant/?queue=push&tenant=a",
    "message/?queue=push&id=ID",
    "message/?id=ID",
    "message/arguments/?queue=push&id=ID",
    "dead-letters/?queue=push",
    "dead-letters/?queue=push&task=notify",
    "dead-letters/letter/?queue=push&id=ID",
    "dedup/?queue=push",
    "leaders/",
    "workers/",
    "audit/",
)


def output_of(app: Any, words: list[str]) -> str:
    """Run a command, and return what it prints."""
    context = CLIContext(app=app, no_color=True, workdir=None)
    return CliRunner().invoke(dq, words, obj=context, input="").output


def run(app: Any, line: str, task_id: str) -> str:
    """Run a command as the shell would; return what is wrong with it, or ""."""
    words = [task_id if word == "ID" else word for word in line.split()]
    result = CliRunner().invoke(dq, words, obj=CLIContext(app=app, no_color=True, workdir=None), input="")
    if result.exception is None or isinstance(result.exception, SystemExit):
        return ""
    return f"{line}: {''.join(traceback.format_exception(result.exception)[-5:])}"


def faults_of_commands(app: Any, task_id: str, commands: tuple[str, ...] = COMMANDS) -> Iterator[str]:
    """Run the commands, each also with --json; yield the faults."""
    for line in commands:
        for each in (line, f"{line} --json"):
            fault = run(app, each, task_id)
            if fault:
                yield fault


def faults_of_pages(client: Any, task_id: str) -> Iterator[str]:
    """Read the pages, each also as JSON; yield the faults."""
    for page in PAGES:
        path, _, query = page.partition("?")
        filled = query.replace("ID", "") + (urlencode({"": task_id}) if "ID" in query else "")
        for suffix in ("", "&format=json"):
            try:
                answer = client.get(f"/dq/{path}?{filled}{suffix}")
            except Exception as error:
                yield f"{page}: {''.join(traceback.format_exception(error)[-6:])}"
                continue
            if answer.status_code >= 500:
                yield f"{page}: {answer.status_code} {answer.content[:300]!r}"
            elif suffix and answer.status_code == 200:
                json.loads(answer.content)
