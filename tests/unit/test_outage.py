"""An outage gives one record at its beginning and one at its end."""

from __future__ import annotations

import logging

import pytest

from celery_dq.clock import ManualClock
from celery_dq.outage import Outage


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
