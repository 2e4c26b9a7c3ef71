from __future__ import annotations

import enum
import subprocess
import sys
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from celery_dq.dedup.key import MAX_KEY_BYTES, Key, canonical
from celery_dq.errors import ConfigurationError, InvalidKey


def refresh(sku: Any, region: Any = "eu", *, force: bool = False) -> None: ...


class Colour(enum.IntEnum):
    RED = 1


class Order:
    id = 7


class TestSameCall:
    @pytest.mark.parametrize(
        "rule", [None, "{sku}", "{sku}-{region}", lambda sku, region="eu", **_: [sku, region]]
    )
    def test_however_it_is_spelled(self, rule: Any) -> None:
        key = Key("t", refresh, rule)
        assert len({key((1,), {}), key((), {"sku": 1}), key((1, "eu"), {}), key((1,), {"region": "eu"})}) == 1

    def test_types_are_reported_apart(self) -> None:
        key = Key("t", refresh, "{sku}")
        values = [
            1,
            "1",
            1.0,
            True,
            "true",
            None,
            "null",
            b"1",
            Decimal(1),
            [1],
            {"1": 1},
            {1: 1},
            "[1]",
            Colour.RED,
        ]
        assert len({key((value,), {}) for value in values}) == len(values)

    def test_text_cannot_imitate_structure(self) -> None:
        key = Key("t", refresh, "{sku}{region}")
        assert key((1, 23), {}) != key((12, 3), {})
        assert key(('1"', '"2'), {}) != key(('1""', "2"), {})
        every = Key("t", refresh)
        assert every(('1,region="b"',), {}) != every(("1", "b"), {})

    def test_a_bound_self_is_dropped(self) -> None:
        class Task:
            def run(self, sku: int) -> None: ...

        assert Key("t", Task().run)((1,), {}) == Key("t", Task().run)((), {"sku": 1}) == "t(sku=1)"

    def test_order_of_kwargs_and_dicts(self) -> None:
        def anything(*args: Any, **kwargs: Any) -> None: ...

        key = Key("t", anything)
        assert key((), {"a": 1, "b": 2}) == key((), {"b": 2, "a": 1})
        assert key(({"a": 1, "b": 2},), {}) == key(({"b": 2, "a": 1},), {})
        assert key(({1, 2, 3},), {}) == key(({3, 2, 1},), {})

    def test_a_tuple_is_a_list(self) -> None:
        assert canonical((1, (2,))) == canonical([1, [2]])

    def test_other_process_same_key(self) -> None:
        program = (
            "from celery_dq.dedup.key import canonical; from uuid import UUID\n"
            "print(canonical([{'b': 'ä', 'a': {3, 'x'}}, UUID(int=5), 1.5]))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == canonical([{"a": {"x", 3}, "b": "ä"}, UUID(int=5), 1.5])


class TestReadable:
    def test_forms(self) -> None:
        assert Key("shop.refresh", refresh, "{sku}")(("x",), {}) == 'shop.refresh(sku="x")'
        assert Key("t", refresh)((1,), {}) == 't(sku=1,region="eu",force=false)'
        assert Key("t", refresh, "price-{sku}")((1,), {}) == "tprice-{sku}(sku=1)"
        assert Key("t", refresh, "{sku.id}")((Order(),), {}) == "t(sku.id=7)"
        assert Key("t", refresh, "{sku[id]:04d}")(({"id": 7},), {}) == 't(sku[id]="0007")'
        assert Key("t", refresh, "all")((1,), {}) == "tall()"
        assert Key("t", refresh, lambda sku: 1)((1,), {}) == "t(=1)"

    def test_a_long_one_is_cut_and_still_its_own(self) -> None:
        key = Key("t", refresh, "{sku}")
        long, other = key(("ä" * 500 + "a",), {}), key(("ä" * 500 + "b",), {})
        assert long != other
        assert len(long.encode()) <= MAX_KEY_BYTES
        assert long.startswith('t(sku="ää')


class TestRefuses:
    def test_an_object_is_named(self) -> None:
        with pytest.raises(InvalidKey, match=r"task t: sku is of type .*Order.*key='\{sku.id\}'"):
            Key("t", refresh)((Order(),), {})
        with pytest.raises(InvalidKey, match="region is of type"):
            Key("t", refresh, "{region}")((1, [Order()]), {})
        with pytest.raises(InvalidKey, match="what the key callable returned"):
            Key("t", refresh, lambda sku: Order())((1,), {})

    def test_a_list_that_holds_itself(self) -> None:
        endless: list[Any] = []
        endless.append(endless)
        with pytest.raises(InvalidKey, match="sku is nested more than 20 deep"):
            Key("t", refresh)((endless,), {})

    def test_a_missing_argument(self) -> None:
        with pytest.raises(InvalidKey, match="missing a required argument: 'sku'"):
            Key("t", refresh, "{sku}")((), {})

    def test_a_missing_attribute(self) -> None:
        with pytest.raises(InvalidKey, match="cannot be filled"):
            Key("t", refresh, "{sku.id}")((1,), {})

    @pytest.mark.parametrize(
        ("rule", "problem"),
        [
            ("{sku", "not a format template"),
            ("{}", "without a name"),
            ("{ksu}", "names 'ksu'"),
            (3, "of type int"),
        ],
    )
    def test_a_misspelt_rule(self, rule: Any, problem: str) -> None:
        with pytest.raises(ConfigurationError, match=f"task t: the dedup key .*{problem}"):
            Key("t", refresh, rule)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


def typed(value: Any) -> Any:
    """Return an identity of a value, computed in another way than in the code under test."""
    if isinstance(value, list):
        return ("list", *map(typed, value))
    if isinstance(value, dict):
        return ("dict", frozenset((key, typed(item)) for key, item in value.items()))
    return (type(value).__name__, repr(value))


@given(plain, plain)
def test_two_values_have_one_text_only_if_they_are_one(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


def test_dates() -> None:
    assert canonical(datetime(2026, 1, 2, tzinfo=timezone.utc)) == "datetime(2026-01-02T00:00:00+00:00)"
