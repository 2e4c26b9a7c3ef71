"""The verdict on the example's ledger. Each finding has constructed lines here."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PLAN = [(1, "pay", 1000), (2, "interest", 100), (3, "pay", -100)]
RIGHT = [1000, 1100, 1000]


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "example_project"))
    importlib.import_module("books.plan")
    return importlib.import_module("books.judge")


def judged(books: ModuleType, lines: list[tuple[int, int, int]], refused: int = 0) -> dict[str, Any]:
    """Judge lines of (number, balance, token), a second apart."""
    plan = [books.Entry(*entry) for entry in PLAN]
    posted = [
        books.Line(*PLAN[number - 1], balance, token, "w", float(at))
        for at, (number, balance, token) in enumerate(lines)
    ]
    verdict: dict[str, Any] = books.judge(plan, posted, refused).as_dict()
    return verdict


def test_a_right_ledger(books: ModuleType) -> None:
    verdict = judged(books, [(1, 1000, 1), (2, 1100, 1), (3, 1000, 4)], refused=2)
    assert verdict["clean"]
    assert (verdict["terms"], verdict["refused"], verdict["balance"]) == (2, 2, 1000)
    assert verdict["pauses"] == (1.0,)


def test_order_shows(books: ModuleType) -> None:
    verdict = judged(books, [(1, 1000, 1), (3, 900, 1), (2, 990, 1)])
    assert not verdict["clean"]
    assert (verdict["disordered"], verdict["wrong"], verdict["missing"]) == (1, 0, ())
    assert verdict["balance"] != RIGHT[-1]


def test_an_overlap_shows(books: ModuleType) -> None:
    # Two postings read the same balance.
    verdict = judged(books, [(1, 1000, 1), (2, 1100, 1), (3, 900, 1)])
    assert not verdict["clean"]
    assert verdict["wrong"] == 1


def test_a_missing_message_and_an_old_token_show(books: ModuleType) -> None:
    assert judged(books, [(1, 1000, 1), (2, 1100, 1)])["missing"] == (3,)
    verdict = judged(books, [(1, 1000, 5), (2, 1100, 4), (3, 1000, 5)])
    assert not verdict["clean"]
    assert verdict["fallen"] == 1
