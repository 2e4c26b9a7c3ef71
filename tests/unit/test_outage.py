"""An outage gives one record at its beginning and one at its end."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis

from celery_dq.clock import ManualClock
from celery_dq.outage import Outage
from celery_dq.transport.redis.store.server_errors import RefusalLog


def test_an_outage_is_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    outage = Outage(logging.getLogger("celery_dq.test"), "test_outage", clock)
    assert not outage.over("%s answers.", "It")
    for _ in range(2):
        assert outage.began("%s is silent.", "It")
        assert not outage.began("%s is silent.", "It")
        assert outage.lasts
        clock.advance(2.5)
        assert outage.over("%s answers.", "It")
        assert not outage.over("%s answers.", "It")
        assert not outage.lasts
    assert caplog.messages == ["It is silent.", "It answers. The outage lasted 2.5 s."] * 2
    events = [vars(record)["event"] for record in caplog.records]
    assert events == ["test_outage_began", "test_outage_over"] * 2
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_two_threads_whose_commands_are_accepted_at_one_moment_end_one_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RefusalLog(lambda: "w1")

    class Reasons(dict[tuple[str, str], str]):
        def values(self) -> Any:
            log.accepted("heartbeat", "b")  # the other thread
            return super().values()

    log.reasons = Reasons()
    for queue in ("a", "b"):
        log.refused("heartbeat", redis.ResponseError("MISCONF"), queue)
    log.accepted("heartbeat", "a")
    assert not log.reasons
    events = [vars(record)["event"] for record in caplog.records]
    assert events == ["redis_refuses_began", "redis_refuses_over"]
