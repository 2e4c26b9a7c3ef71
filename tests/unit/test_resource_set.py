"""``AnyOf``: the name of a set of resources."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from celery_dq import AnyOf
from celery_dq.errors import ConfigurationError, InvalidTenant
from celery_dq.transport.tenant import check_tenant, tenant_rule


def render(scene: str, node: int = 1) -> None: ...


def test_a_set_has_one_name_in_any_order_of_its_resources() -> None:
    assert AnyOf("b", "a", "b") == AnyOf("a", "b") == "any_of(a,b)"
    assert AnyOf("b", 7).resources == ("7", "b")
    assert repr(AnyOf("b", "a")) == "AnyOf('a', 'b')"
    assert check_tenant(AnyOf("gpu 1", "a")) == "any_of(a,gpu 1)"
    assert json.dumps(AnyOf("a", "b")) == '"any_of(a,b)"'


def test_a_set_of_one_resource_is_that_resource() -> None:
    assert AnyOf("a") == "a"
    assert AnyOf("a").resources == ("a",)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_set_is_copied_and_pickled(names: tuple[str, ...]) -> None:
    one = AnyOf(*names)
    for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert (type(other), other) == (AnyOf, one)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "names no resource"),
        (("a", ""), "'' is empty"),
        (("a", "b,c"), "'b,c' holds a comma"),
        (("a", "gpu 1 "), "'gpu 1 ' begins or ends with a blank"),
        (("a", " "), "' ' begins or ends with a blank"),
        (("a", None), "NoneType"),
        (("a", True), "bool"),
        (("a", AnyOf("b", "c")), "is a set itself"),
    ],
)
def test_an_unusable_resource_is_named(names: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidTenant, match=words):
        AnyOf(*names)


def test_a_written_set_becomes_the_name_of_the_set() -> None:
    assert check_tenant("any_of(b, a)") == check_tenant(AnyOf("a", "b")) == "any_of(a,b)"
    assert type(check_tenant(AnyOf("a", "b"))) is str
    assert check_tenant("any_of(a)") == "a"
    assert check_tenant("any_of") == "any_of"
    with pytest.raises(InvalidTenant, match=r"tenant of t: AnyOf\('',\): '' is empty"):
        check_tenant("any_of()", where="tenant of t")
    with pytest.raises(InvalidTenant, match="at most 255"):
        check_tenant(AnyOf(*(f"resource-{number}" for number in range(30))))


@pytest.mark.parametrize(
    "option",
    [AnyOf("gpu-1", "cpu-1"), "any_of(gpu-{node},cpu-{node})", lambda args, kwargs: AnyOf("gpu-1", "cpu-1")],
)
def test_a_task_names_a_set_as_any_tenant(option: Any) -> None:
    rule = tenant_rule(option, "render", render)
    assert rule is not None
    assert check_tenant(rule(("a",), {})) == "any_of(cpu-1,gpu-1)"


@pytest.mark.parametrize("option", ["any_of(gpu-1", "any_of(gpu-{node}"])
def test_a_set_without_its_bracket_is_an_error_of_its_option(option: str) -> None:
    with pytest.raises((InvalidTenant, ConfigurationError), match="task render.*AnyOf"):
        tenant_rule(option, "render", render)
    with pytest.raises(InvalidTenant, match=r"tenant: 'any_of\(gpu-1,a' .*AnyOf\('a', 'b'\)"):
        check_tenant("any_of(gpu-1,a")


def test_an_unusable_set_of_a_task_is_an_error_of_its_option() -> None:
    with pytest.raises((InvalidTenant, ConfigurationError), match="'' is empty"):
        tenant_rule("any_of(a,)", "render", render)
