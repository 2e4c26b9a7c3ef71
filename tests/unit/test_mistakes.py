"""The mistakes at random places: the kinds, what is left out, and that a seed chooses the same ones."""

from __future__ import annotations

import pytest

from tests.mutations.mistakes import AREAS, PACKAGE, Edit, area_of, choose, edits_of, lua_edits, python_edits

PYTHON = '''
def claim(self, consumer: str, tenant: str, timeout_s: float) -> None:
    """Claim 5 messages."""
    if timeout_s < self.limit:
        self.deadline_us = micros(timeout_s)
    self.push(consumer, tenant, wait_s=timeout_s)
    self.count += 1
    names = client.zrange(self.keys.turn, 0, 7)
    logger.warning("%s > %s", consumer, tenant)
    raise ValueError(f"{consumer} is not {tenant}", consumer == tenant)
'''
LUA = """
-- if a < b then call('DEL', P .. 'turn') end
local name = 'x == y'
if count < 10 and not seen then
  call('ZADD', P .. 'turn', score, id)
  state.held = state.held + 1
end
place(first, second)
call('DEL', P .. 'paused')
return due / 1000
"""


def kinds_with(source: str, edits: list[Edit]) -> set[tuple[str, str, str]]:
    return {(kind, source[start:end].strip(), new.strip()) for kind, start, end, new in edits}


def test_the_mistakes_of_python() -> None:
    assert kinds_with(PYTHON, python_edits(PYTHON)) == {
        ("turned comparison", "<", ">"),
        ("bound off by one", "<", "<="),
        ("bound off by one", "7", "8"),
        ("negated condition", "timeout_s < self.limit", "(not (timeout_s < self.limit))"),
        ("dropped statement", "self.deadline_us = micros(timeout_s)", "pass"),
        ("dropped statement", "self.push(consumer, tenant, wait_s=timeout_s)", "pass"),
        ("dropped statement", "self.count += 1", "pass"),
        ("wrong unit", "micros(timeout_s)", "1000 * (micros(timeout_s))"),
        ("wrong unit", "timeout_s", "1000 * (timeout_s)"),
        ("swapped arguments", "consumer, tenant", "tenant, consumer"),
        ("wrong key", "self.keys.turn", next(iter(wrong_keys()))),
    }


def wrong_keys() -> set[str]:
    return {
        new for kind, _, _, new in python_edits(PYTHON) if kind == "wrong key" and new != "self.keys.turn"
    }


def test_the_mistakes_of_lua() -> None:
    found = kinds_with(LUA, lua_edits(LUA))
    assert found >= {
        ("turned comparison", "<", ">"),
        ("bound off by one", "<", "<="),
        ("bound off by one", "10", "11"),
        ("negated condition", "and", "or"),
        ("negated condition", "not", ""),
        ("dropped statement", "call('ZADD', P .. 'turn', score, id)", ""),
        ("dropped statement", "state.held = state.held + 1", ""),
        ("swapped arguments", "first, second", "second, first"),
        ("wrong key", "'turn'", "'paused'"),
        ("wrong unit", "1000", "1000000"),
    }
    comment_ends = LUA.index("local")
    assert all(each.start > comment_ends for each in lua_edits(LUA)), "a comment is not code"
    assert not any("x == y"[2:4] == LUA[each.start : each.end] for each in lua_edits(LUA)), "nor is a text"


def test_each_area_has_its_own_files() -> None:
    paths = [(path, name) for name, area in AREAS.items() for path in area.paths]
    assert [path for path, _ in paths if not (PACKAGE / path).exists()] == []
    assert [path for path, name in paths if area_of(PACKAGE / path) != name] == []
    assert area_of(PACKAGE / "transport/redis/lua/push.lua") == "lua"
    assert area_of(PACKAGE / "transport/in_flight.py") == "transport"
    assert area_of(PACKAGE / "clock.py") == "words"


def test_a_seed_chooses_the_same_mistakes_and_each_area_its_share() -> None:
    areas = ["lua", "words"]
    chosen = choose(7, 10, areas)
    assert chosen == choose(7, 10, areas)
    assert chosen != choose(8, 10, areas)
    assert {name: sum(each.promise == name for each in chosen) for name in areas} == dict.fromkeys(areas, 5)
    for each in chosen:
        assert each.apply((PACKAGE / each.file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", ["keys.py", "transport/tenant.py", "producer/spill_log.py"])
def test_the_mistakes_of_python_are_programs(file: str) -> None:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    for _, start, end, new in edits_of(PACKAGE / file):
        compile(source[:start] + new + source[end:], file, "exec")
