from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_dq.beat import schedule_store
from celery_dq.errors import ScriptError
from celery_dq.leadership import redis_election
from celery_dq.other_brokers import redis_coordinator as dedup
from celery_dq.scripts import ScriptSet, is_noscript
from celery_dq.transport.redis.store import script_calls
from tests.lua.partition_scripts import PartitionScripts

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
    contract = ScriptSet(folder, "add")["add"].contract
    assert contract.summary == "Adds. Twice."
    assert contract.keys == ("state HASH",)
    assert contract.derives == ()
    assert contract.argv == ("by", "(claim, id)*")
    assert contract.returns == "the sum"
    assert contract.guarantee == "adds"


def test_missing_section_is_named(folder: Path) -> None:
    write(folder, "add", CONTRACT.replace("-- COST\n--   one command\n", ""))
    with pytest.raises(ScriptError, match="script 'add'.*lacks COST"):
        ScriptSet(folder, "add")


def test_doubled_section_is_named(folder: Path) -> None:
    write(folder, "add", CONTRACT + "-- COST\n--   more\n")
    with pytest.raises(ScriptError, match="two sections COST"):
        ScriptSet(folder, "add")


def test_includes_stand_once_and_first(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include b\n--@include a\nreturn a + b\n")
    write(folder, "include/a", "local a = 1")
    write(folder, "include/b", "--@include a\nlocal b = a")
    source = ScriptSet(folder, "add")["add"].source
    assert source.count("local a = 1") == 1
    assert source.index("local a = 1") < source.index("local b = a") < source.index("return")


def test_a_script_derives_the_keys_of_its_includes(folder: Path) -> None:
    write(folder, "add", CONTRACT.replace("--   none", "--   turn ZSET") + "--@include a\nreturn 1\n")
    write(folder, "include/a", "-- Reads.\n--\n-- DERIVES\n--   messages HASH\n--@include b")
    write(
        folder, "include/b", "-- Also reads.\n--\n-- DERIVES\n--   held:<consumer> HASH\n--   messages HASH"
    )
    derives = ScriptSet(folder, "add")["add"].contract.derives
    assert derives == ("held:<consumer> HASH", "messages HASH", "turn ZSET")


def test_an_include_that_lists_no_key_is_named(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include a\n")
    write(folder, "include/a", "-- DERIVES\nlocal a = 1")
    with pytest.raises(ScriptError, match="script 'include/a': section DERIVES has no line"):
        ScriptSet(folder, "add")


def test_circle_is_reported_with_its_chain(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include a\n")
    write(folder, "include/a", "--@include b")
    write(folder, "include/b", "--@include a")
    with pytest.raises(ScriptError, match="circular: add -> a -> b -> a"):
        ScriptSet(folder, "add")


def test_an_include_that_is_used_runs_when_one_of_its_names_is_read(folder: Path, client: Any) -> None:
    body = "--@uses b\n--@uses c\nif ARGV[1] == '1' then return dq.twice(4) end\nreturn 0\n"
    write(folder, "add", CONTRACT + body)
    write(folder, "include/a", "local one = 1")
    write(
        folder,
        "include/b",
        "--@include a\n--@uses c\nfunction dq.twice(n)\n  return n + n + one - one\nend\n",
    )
    write(folder, "include/c", "redis.call('INCR', KEYS[1])\nfunction dq.none() end\n")
    script = ScriptSet(folder, "add")["add"]
    assert script.source.count("local one = 1") == 1
    assert [script.run(client, ["k"], [each]) for each in (0, 1)] == [0, 8]
    assert client.exists("k") == 0


def test_of_definitions_only_those_run_whose_names_are_read(folder: Path, client: Any) -> None:
    body = "--@uses b\nlocal sum = dq.twice(0) + dq.LIMIT\nreturn rawget(dq, 'none') and 0 or sum\n"
    write(folder, "add", CONTRACT + body)
    twice = "-- Doubles.\nfunction dq.twice(n)\n  return n + n\nend\n\n"
    write(folder, "include/b", twice + "dq.LIMIT, dq.MOST = 5, 6\nfunction dq.none() end\n")
    assert ScriptSet(folder, "add")["add"].run(client, ["k"], []) == 5


def test_every_name_of_an_include_is_found(folder: Path, client: Any) -> None:
    names = [f"{'f' * length}{number}" for length in (1, 3, 4, 9) for number in range(5)]
    write(
        folder, "add", CONTRACT + "--@uses a\nreturn {" + ", ".join(f"dq.{each}()" for each in names) + "}\n"
    )
    functions = [f"function dq.{each}() return {place} end\n" for place, each in enumerate(names)]
    write(folder, "include/a", "".join(functions))
    assert ScriptSet(folder, "add")["add"].run(client, ["k"], []) == list(range(len(names)))


@pytest.mark.parametrize(
    ("body", "include", "refusal"),
    [
        ("return dq.thrice(1)", "function dq.twice() end", "no include that it uses defines dq.thrice"),
        ("return 1", "function dq.twice() end\nfunction dq.twice() end", "dq.twice is defined twice"),
        ("return 1", "--@uses a", "circular: add -> a -> a"),
    ],
)
def test_a_library_that_does_not_fit_is_refused(folder: Path, body: str, include: str, refusal: str) -> None:
    write(folder, "add", CONTRACT + f"--@uses a\n{body}\n")
    write(folder, "include/a", f"{include}\n")
    with pytest.raises(ScriptError, match=refusal):
        ScriptSet(folder, "add")


def test_include_may_be_called_like_the_script(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include add\nreturn add()\n")
    write(folder, "include/add", "local function add() return 1 end")
    assert "local function add()" in ScriptSet(folder, "add")["add"].source


def test_missing_include_is_reported_with_its_chain(folder: Path) -> None:
    write(folder, "add", CONTRACT + "--@include a\n")
    write(folder, "include/a", "--@include nowhere")
    with pytest.raises(ScriptError, match=r"'nowhere' of celery-dq is missing \(add -> a -> nowhere\)"):
        ScriptSet(folder, "add")


def test_missing_script_is_an_error_before_it_is_asked_for(folder: Path) -> None:
    write(folder, "add", CONTRACT + "return 1\n")
    with pytest.raises(ScriptError, match=r"'nothing' of celery-dq is missing .*install celery-dq again"):
        ScriptSet(folder, "add", "nothing")


@pytest.mark.parametrize(
    "scripts", [script_calls, dedup, redis_election, schedule_store], ids=lambda module: module.__name__
)
def test_every_script_of_a_folder_belongs_to_its_set(scripts: ModuleType) -> None:
    loaded = scripts.load_scripts()
    assert loaded.names() == sorted(path.stem for path in Path(str(loaded.directory)).glob("*.lua"))


def test_command(folder: Path) -> None:
    write(folder, "add", CONTRACT + "return 1\n")
    script = ScriptSet(folder, "add")["add"]
    assert script.command(["k"], ["a", 2]) == ("EVALSHA", script.sha1, 1, "k", "a", 2)
    assert script.command(["k"], ["a", 2], full=True) == ("EVAL", script.source, 1, "k", "a", 2)


def test_forgotten_script_is_sent_again_once(scripts: PartitionScripts) -> None:
    scripts.push("a")
    scripts.client.script_flush()
    scripts.client.config_resetstat()
    assert scripts.take() == ["a"]
    stats: Any = scripts.client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 1
    assert stats["cmdstat_eval"]["calls"] == 1
    assert scripts.take() == []
    stats = scripts.client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 2
    assert stats["cmdstat_eval"]["calls"] == 1


def test_noscript_is_known(scripts: PartitionScripts) -> None:
    call = scripts.partition.hand_over_wakeup()
    scripts.client.script_flush()
    with pytest.raises(redis.exceptions.NoScriptError) as caught:
        scripts.client.execute_command(*call.command())
    assert is_noscript(caught.value)
    assert call.parse(scripts.client.execute_command(*call.command(full=True))) is False
    assert not is_noscript(ValueError("other"))


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_replies_are_read_however_the_client_gives_them(redis_url: str, protocol: int, decode: bool) -> None:

    options: Any = {"decode_responses": decode, "encoding_errors": "surrogateescape"}
    with redis.Redis.from_url(redis_url, protocol=protocol, **options) as client:
        scripts = PartitionScripts(client)
        assert scripts.push("ä", tenant="ö", body=b"\xff\x00")[0][:2] == ("accepted", "ä")
        (entry,) = scripts.claim().entries
        assert (entry.id, entry.record[-2:], entry.reason) == ("ä", b"\xff\x00", "")
        assert scripts.partition.locate("ä").run(client)["consumer"] == "c1"
        assert scripts.partition.cancel(["ä", "x"]).run(client) == ["claimed", "tombstone"]
        assert scripts.finish(entry.tag) == 0
