"""No error, output or log line shows a secret of a setting, however the setting is misspelt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from celery import Celery
from kombu import pools

import celery_dq
from celery_dq.testing.processes import dead_port
from tests.hostile_readers import output_of

#: Both halves are looked for: a character that is not encoded may split a password.
SECRET = "hush1"
BROKER = "dq-redis://127.0.0.1:PORT/0"
SPELLINGS = (SECRET, *(f"hush1{each}hush1" for each in ("%2F", "/", "#", "?", ":", "@", "[")))
SETTINGS: tuple[Mapping[str, Any], ...] = (
    *({"broker_url": f"dq-redis://user:{each}@127.0.0.1:PORT/0"} for each in SPELLINGS),
    *(
        {"broker_url": f"{each}://user:{SECRET}@127.0.0.1:PORT/no-number"}
        for each in ("dq-redis", "dq-rediss", "dq-rediscluster", "dq-zookeeper", "redis", "amqp", "dq-rediz")
    ),
    {"broker_url": f"dq-redis//user:{SECRET}@127.0.0.1:PORT"},
    {"broker_url": f"dq-redis://user:{SECRET}@127.0.0.1:port"},
    {"broker_url": f"{BROKER}?pasword={SECRET}"},
    {"broker_url": f"dq-redis+socket:///no/socket?pasword={SECRET}&virtual_host=1"},
    *(
        {"broker_url": BROKER, "dq_election": f"zookeeper://user:{each}@127.0.0.1:PORT/0"}
        for each in SPELLINGS
    ),
    *(
        {"broker_url": BROKER, setting: url}
        for setting in ("dq_election", "dq_dedup_url", "result_backend")
        for url in (f"redis://user:{SECRET}/x@127.0.0.1:PORT/0", [f"redis://user:{SECRET}@127.0.0.1:PORT"])
    ),
    *(
        {"broker_url": BROKER, **place, "dq_election_options": value}
        for place in ({}, {"dq_election": "zookeeper://127.0.0.1:PORT"})
        for value in ({"pasword": SECRET}, {"auth": SECRET}, {"auth": [("digest", SECRET)]})
    ),
    {"broker_url": BROKER, "broker_transport_options": {"pasword": SECRET}},
    {
        "broker_url": "dq-zookeeper://127.0.0.1:PORT",
        "broker_transport_options": {"auth": [("digest", SECRET)]},
    },
    *(
        {"broker_url": url, setting: options, "result_backend": "rediss://127.0.0.1:PORT/0"}
        for url in (BROKER, "dq-rediss://127.0.0.1:PORT/0", "dq-zookeeper://127.0.0.1:PORT")
        for setting in ("broker_use_ssl", "redis_backend_use_ssl")
        for options in (
            {"ssl_password": SECRET},
            {"ssl_pasword": SECRET},
            {"keyfile_password": SECRET},
            {"ca": "/no/file", "keyfile_password": SECRET},
            SECRET,
            [SECRET],
        )
    ),
    *(
        {"broker_url": BROKER, "dq_election": election}
        for election in (
            f"user:{SECRET}@127.0.0.1:PORT",
            {"url": f"redis://user:{SECRET}@127.0.0.1:PORT"},
            {"pasword": SECRET},
            f"redis://127.0.0.1:PORT/0?ssl_password={SECRET}",
        )
    ),
    *(
        {"broker_url": f"dq-rediss://127.0.0.1:PORT/0?{option}={SECRET}"}
        for option in ("ssl_password", "ssl_pasword", "ssl_keyfile_password")
    ),
)
COMMANDS = ("status --timeout 0.2", "doctor --json", "leaders")


def outputs(conf: Mapping[str, Any]) -> Iterator[str]:
    with Celery("shop", set_as_current=False) as app:
        app.conf.update(task_publish_retry_policy={"max_retries": 0}, broker_connection_timeout=0.2, **conf)
        try:
            celery_dq.setup(app)
            app.send_task("x", queue="push", ignore_result=True)
        except Exception as error:
            yield f"{error} {error!r} {error.__cause__}"
        for line in COMMANDS:
            yield output_of(app, line.split())
    pools.reset()


def with_port(value: Any, port: int) -> Any:
    if isinstance(value, dict):
        return {name: with_port(each, port) for name, each in value.items()}
    if isinstance(value, list):
        return [with_port(each, port) for each in value]
    return value.replace("PORT", str(port)) if isinstance(value, str) else value


@pytest.mark.parametrize("conf", SETTINGS, ids=str)
def test_a_secret_is_not_shown(conf: Mapping[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with dead_port() as port, caplog.at_level("INFO"):
        shown = [*outputs(with_port(conf, port))]
    assert any(shown)
    assert not [text for text in (*shown, caplog.text) if SECRET in text]
