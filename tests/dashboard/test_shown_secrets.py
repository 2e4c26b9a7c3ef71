"""No page of the dashboard shows a secret of a setting, whether the broker is away or refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from celery_dq.contrib.django.dashboard import broker_reads
from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from tests.dashboard.test_security import PAGES
from tests.integration.test_shown_secrets import SECRET, SETTINGS, outputs, with_port

#: Settings that are right, except that the server takes no such password, or has none.
REFUSED: tuple[Mapping[str, Any], ...] = (
    {"broker_url": f"dq-redis://user:{SECRET}@127.0.0.1:PORT/0"},
    {"broker_url": f"dq-redis://:{SECRET}@127.0.0.1:PORT/0"},
    {"broker_url": f"dq-rediscluster://user:{SECRET}@127.0.0.1:PORT"},
    {"broker_url": f"dq-sentinel://user:{SECRET}@127.0.0.1:PORT"},
    {"broker_url": f"redis://user:{SECRET}@127.0.0.1:PORT/0"},
    {"broker_url": f"amqp://user:{SECRET}@127.0.0.1:PORT//"},
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(has_password=True) as server:
        yield server


def pages(use_app: Any, operator: Any, conf: Mapping[str, Any]) -> Iterator[str]:
    others = {name: value for name, value in conf.items() if name != "broker_url"}
    try:
        use_app(conf["broker_url"], broker_connection_timeout=0.2, **others)
    except Exception as error:
        yield f"{error} {error!r}"
        return
    for path in PAGES:
        for suffix in ("", ("&" if "?" in path else "?") + "format=json"):
            answer = operator.get(f"/dq/{path}{suffix}")
            yield f"{answer.status_code} {answer.headers} {answer.content.decode()}"


@pytest.mark.parametrize("conf", SETTINGS, ids=str)
def test_a_page_without_a_broker_shows_no_secret(
    use_app: Any, operator: Any, monkeypatch: pytest.MonkeyPatch, conf: Mapping[str, Any]
) -> None:
    monkeypatch.setattr(broker_reads, "DEADLINE_S", 0.2)
    with dead_port() as port:
        shown = [*pages(use_app, operator, with_port(conf, port))]
    assert any(shown)
    assert not [text for text in shown if SECRET in text]


@pytest.mark.parametrize("conf", REFUSED, ids=str)
def test_a_refused_password_is_not_shown(
    use_app: Any,
    operator: Any,
    server: RedisServer,
    conf: Mapping[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    filled = with_port(conf, server.port)
    with caplog.at_level("INFO"):
        shown = [*outputs(filled), *pages(use_app, operator, filled)]
    assert not [text for text in (*shown, caplog.text) if SECRET in text]
