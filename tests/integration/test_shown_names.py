"""Names from messages cannot leave their line in a terminal, or their word in a command for pasting."""

from __future__ import annotations

import json
import re
import shlex
from datetime import datetime, timezone
from typing import Any

import pytest

from tests.dq_command import run_dq
from tests.hostile_readers import COMMANDS, output_of
from tests.integration.shop import claim

LATER = datetime(2100, 1, 1, tzinfo=timezone.utc)
#: A name that clears the screen, forges a line and runs a command where it is pasted.
EVIL = "a'b; $(touch /tmp/x)\x1b[2J\x9b2J\r\nERROR   forged\u2028\u202e"


@pytest.fixture
def forged(shop: Any) -> Any:
    """An app with messages whose names are hostile: waiting, dead, delayed."""
    for number in range(4):
        later = {"eta": LATER} if number % 2 else {}
        shop.send_task(
            EVIL, queue=EVIL, task_id=f"{EVIL}{number}", argsrepr=EVIL, tenant="a'b; $(x)", **later
        )
    with shop.dq._broker.open_home(EVIL) as (partition, client):
        (entry,) = claim(shop, queue=EVIL)
        partition.dead_letter("worker:1", entry.tag, reason=EVIL, worker=EVIL).run(client)
    return shop


@pytest.mark.parametrize("line", [*COMMANDS, "dead list push", "peek push", "find ID"])
def test_a_name_cannot_leave_its_line(forged: Any, line: str) -> None:
    task_id = f"{EVIL}2"
    for each in (line, f"{line} --json"):
        words = [{"push": EVIL, "ID": task_id}.get(word, word) for word in each.split()]
        text = output_of(forged, words)
        assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", text) is None, text
        assert not re.search(r"^ERROR   forged", text, re.M), text


def test_a_command_for_pasting_is_one_word_per_name(forged: Any) -> None:
    found = json.loads(output_of(forged, ["status", "--json"]))["findings"]
    (remedy,) = [each["remedy"] for each in found if "dead list" in each["remedy"]]
    words = shlex.split(re.search(r"celery dq dead list .*(?=', and)", remedy)[0])  # type: ignore[index]
    assert len(words) == 5


#: Names with letters, ideographs and a character outside the Basic Multilingual Plane.
FOREIGN = "größe", "łódź", "東京", "\U0001f600"


@pytest.mark.parametrize("charset", ["latin-1", "cp1252", "koi8-r"])
def test_a_terminal_without_the_characters_of_a_name(shop: Any, charset: str) -> None:
    def output(*words: str, status: int = 0) -> str:
        return run_dq(shop, *words, status=status, columns=120, charset=charset).stdout

    for name in FOREIGN:
        shop.send_task("notify", queue="push", tenant=name)
        output("pause", "push", "--tenant", name)
    assert {*shop.dq.quotas.paused("push")} == {*FOREIGN}
    assert {each["tenant"] for each in json.loads(output("tenants", "push", "--json"))} == {*FOREIGN}
    assert "東京" in json.loads(output("queues", "東京", "--json", status=1))["error"]
    for words in (("tenants", "push"), ("peek", "push"), ("top", "--once"), ("audit",)):
        assert r"\u6771\u4eac" in output(*words), words
    json.loads(output("quotas", "export", "push"))
