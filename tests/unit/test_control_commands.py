"""The answers of ``celery control`` to commands without what they need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker.control import Panel

import celery_dq.worker.commands  # noqa: F401  # registers the commands
from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.options import Options


def answer(command: str, **arguments: str) -> Any:
    """Call a command as a worker does that shares no partitions."""
    options = {APP_CONTEXT: AppContext("w1", Options)}
    consumer = SimpleNamespace(conninfo=SimpleNamespace(transport_options=options))
    return Panel.data[command](SimpleNamespace(consumer=consumer, hostname="w1@host"), **arguments)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("drain", "name the worker that is to be emptied, such as: celery control drain celery@host-7"),
        ("resign", "name the singleton queue to hand over, such as: celery control resign ledger"),
    ],
)
def test_a_command_without_its_argument_teaches_it(command: str, words: str) -> None:
    assert words in answer(command)["error"]


def test_a_worker_without_an_allocation_is_emptied_by_its_end() -> None:
    error = answer("drain", worker="w1@host")["error"]
    assert "no allocated partitions (dq_allocation)" in error
    assert "stop it with SIGTERM" in error
