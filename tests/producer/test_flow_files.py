"""A reader can hold a call or a message in the head: each runs through few files of the package."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.flow_files import files_of_calls, files_of_messages
from celery_dq.testing.servers import RedisServer
from tests.brokers import BROKERS
from tests.producer.conftest import MakeApp

OWN = {"headers": {"trace": "1"}}


@pytest.mark.parametrize(
    ("buffered", "options", "most"), [(True, {}, 10), (True, OWN, 11), (False, {}, 11), (False, OWN, 12)]
)
def test_a_call_runs_through_few_files(
    make_app: MakeApp, buffered: bool, options: dict[str, Any], most: int
) -> None:
    app = make_app(dq_buffer=buffered)

    def notify(merchant: int, order: str) -> None: ...

    files = files_of_calls(app.task(name="notify", shared=False)(notify), options, 21)
    assert 5 < len(files) <= most, files


def test_a_message_runs_through_few_files(redis_server: RedisServer) -> None:
    files = files_of_messages(BROKERS["dq"].url(redis_server.port), "early", 50)
    # On a busy machine, some messages take more turns of the consumer thread than others.
    assert 5 < len(files) <= 16, files
    assert sum(files.values()) <= 400, files
