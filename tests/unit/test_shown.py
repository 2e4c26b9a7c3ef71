"""URLs, settings and names as they are shown."""

from __future__ import annotations

import io
import logging
import shlex

import pytest

from celery_dq.shown import (
    shell_word,
    shown_logger,
    shown_name,
    shown_setting,
    shown_url,
    why_unreadable,
)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user:pw@host/0", "redis://**@host/0"),
        ("redis://user:p/w@host/0", "redis://**@host/0"),
        ("redis://user:p?w@host/0", "redis://**@host/0"),
        ("redis://user:p#w@host/0", "redis://**@host/0"),
        ("redis://user:p@w@host/0", "redis://**@host/0"),
        ("redis//user:pw@host", "**@host"),
        ("amqp://guest:**@redis%2F%2Fuser%3Apw%40host//", "amqp://**@host//"),
        ("redis://:pw@a/0;redis://:pw@b/0", "redis://**@a/0;redis://**@b/0"),
        ("zookeeper://user:pw@a:2181,b:2181/chroot", "zookeeper://**@a:2181,b:2181/chroot"),
        ("redis://host/0?pasword=pw&db=1", "redis://host/0?pasword=**&db=1"),
        (
            "redis+socket:///path?virtual_host=1&password=pw",
            "redis+socket:///path?virtual_host=1&password=**",
        ),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_a_setting_is_shown_without_its_secrets() -> None:
    value = {"hosts": ["redis://u:pw@h"], "auth_data": [("digest", "u:pw")], "pasword": "pw", "timeout": 3}
    assert shown_setting(value) == (
        "{'hosts': ['redis://**@h'], 'auth_data': '**', 'pasword': '**', 'timeout': 3}"
    )


def test_a_url_that_cannot_be_read_is_explained_without_its_password() -> None:
    assert why_unreadable("redis://host:port", ValueError("no port")) == "no port"
    text = why_unreadable("redis://u:p/w@host", ValueError("Port could not be cast to integer value as 'p'"))
    assert text.startswith("'redis://**@host': percent-encode")
    assert "'p'" not in text


def test_a_name_cannot_leave_its_line_or_its_word() -> None:
    name = "a'b $(id)\x1b[2J\r\nERROR forged\u2028\u202e"
    assert shown_name(name) == "a'b $(id)\\x1b[2J\\r\\nERROR forged\\u2028\\u202e"
    assert shown_name("Grüße 世界") == "Grüße 世界"
    assert shlex.split(f"celery dq find {shell_word(name)}")[3:] == [shown_name(name)]


def test_no_argument_of_a_log_call_leaves_its_line(caplog: pytest.LogCaptureFixture) -> None:
    hostile = "a\x1b[2J\r\nERROR forged\u2028\u202e"
    escaped = "a\\x1b[2J\\r\\nERROR forged\\u2028\\u202e"
    logger = shown_logger("celery_dq.tests")
    with caplog.at_level(logging.INFO):
        logger.warning(
            "%s, %r, %s, %s, %.2s, %d",
            hostile,
            hostile,
            ValueError(hostile),
            shown_name(hostile),
            hostile,
            3,
            extra={"queue": hostile},
        )
    (record,) = caplog.records
    assert record.getMessage() == f"{escaped}, '{escaped}', {escaped}, {escaped}, a\\, 3"
    assert vars(record)["queue"] == hostile, "a field is for programs, and stays as it is"


def test_numbers_and_harmless_names_are_those_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    shown_logger("celery_dq.tests").warning("%s %d %g", "Grüße 世界", 3, 0.5)
    (record,) = caplog.records
    assert record.args == ("Grüße 世界", 3, 0.5)


def test_an_argument_that_has_no_text_does_not_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError("no text")

    logger = shown_logger("celery_dq.tests.broken")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.addHandler(handler := logging.StreamHandler(io.StringIO()))
    try:
        logger.warning("%s", Broken())
    finally:
        logger.removeHandler(handler)
