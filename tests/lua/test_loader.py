from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from celery_dq.errors import ScriptError
from celery_dq.scripts import ScriptSet, is_noscript
from tests.lua.desk import Desk

CONTRACT = """-- Adds.
-- Twice.
--
-- KEYS
--   state HASH: where
-- DERIVES
--   none
-- ARGV
--   by: how much,
--     in units
--   (claim, id)*: tags
-- RETURNS
--   the sum
-- COST
--   one command
-- GUARANTEE
--   adds
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "include").mkdir()
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.lua").write_text(text)


def test_contract_is_read(folder: Path) -> None:
    write(folder, "add", CONTRACT + "return 1\n")
    contract = ScriptSet(folder)["add"].contract
    assert contract.summary == "Adds. Twice."
    assert contract.keys == ("state HASH",)
    assert contract.derives == ()
    assert contract.argv == ("by", "(claim, id)*")
    assert contract.returns == "the sum"
    assert contract.guarantee == "adds"


def test_missing_section_is_named(folder: Path) -> None:
    write(folder, "add", CONTRACT.replace("-- COST\n--   one command\n", ""))
    with pytest.raises(ScriptError, match="script 'add'.*lacks COST"):
        ScriptSet(folder)["add"]


def test_doubled_section_is_named(folder: Path) -> None:
    write(folder, "add", CONTRACT + "-- COST\n--   more\n")
    with pytest.raises(ScriptError, match="two sections COST"):
        ScriptSet(folder)["add"]


def test_includes_stand_once_and_first(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include b\n--@include a\nreturn a + b\n")
    write(folder, "include/a", "local a = 1")
    write(folder, "include/b", "--@include a\nlocal b = a")
    source = ScriptSet(folder)["add"].source
    assert source.count("local a = 1") == 1
    assert source.index("local a = 1") < source.index("local b = a") < source.index("return")


def test_circle_is_told_with_its_chain(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include a\n")
    write(folder, "include/a", "--@include b")
    write(folder, "include/b", "--@include a")
    with pytest.raises(ScriptError, match="circle: add -> a -> b -> a"):
        ScriptSet(folder)["add"]


def test_include_may_be_called_like_the_script(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include add\nreturn add()\n")
    write(folder, "include/add", "local function add() return 1 end")
    assert "local function add()" in ScriptSet(folder)["add"].source


def test_missing_include_is_told_with_its_chain(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include a\n")
    write(folder, "include/a", "--@include nowhere")
    with pytest.raises(ScriptError, match=r"'nowhere' is missing \(add -> a -> nowhere\)"):
        ScriptSet(folder)["add"]


def test_missing_script(folder: Path) -> None:
    with pytest.raises(ScriptError, match="'nothing' is missing"):
        ScriptSet(folder)["nothing"]


def test_command(folder: Path) -> None:
    write(folder, "add", CONTRACT + "return 1\n")
    script = ScriptSet(folder)["add"]
    assert script.command(["k"], ["a", 2]) == ("EVALSHA", script.sha1, 1, "k", "a", 2)
    assert script.command(["k"], ["a", 2], full=True) == ("EVAL", script.source, 1, "k", "a", 2)


def test_forgotten_script_is_sent_again_once(desk: Desk) -> None:
    desk.push("a")
    desk.client.script_flush()
    desk.client.config_resetstat()
    assert desk.take() == ["a"]
    stats: Any = desk.client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 1
    assert stats["cmdstat_eval"]["calls"] == 1
    assert desk.take() == []
    stats = desk.client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 2
    assert stats["cmdstat_eval"]["calls"] == 1


def test_noscript_is_known(desk: Desk) -> None:
    call = desk.partition.nudge()
    desk.client.script_flush()
    with pytest.raises(redis.exceptions.NoScriptError) as caught:
        desk.client.execute_command(*call.command())
    assert is_noscript(caught.value)
    assert call.parse(desk.client.execute_command(*call.command(full=True))) is False
    assert not is_noscript(ValueError("other"))


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_replies_are_read_however_the_client_gives_them(redis_url: str, protocol: int, decode: bool) -> None:

    options: Any = {"decode_responses": decode, "encoding_errors": "surrogateescape"}
    with redis.Redis.from_url(redis_url, protocol=protocol, **options) as client:
        desk = Desk(client)
        assert desk.push("ä", tenant="ö", body=b"\xff\x00")[0][:2] == ("accepted", "ä")
        (entry,) = desk.claim().entries
        assert (entry.id, entry.record[-2:], entry.reason) == ("ä", b"\xff\x00", "")
        assert desk.partition.locate("ä").run(client)["consumer"] == "c1"
        assert desk.partition.cancel(["ä", "x"]).run(client) == ["claimed", "tombstone"]
        assert desk.finish(entry.tag) == 0
