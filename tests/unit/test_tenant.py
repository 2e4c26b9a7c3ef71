"""The rules for a tenant's name, for a priority, and for the templates that name tenants."""

from __future__ import annotations

import enum
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from celery_dq.errors import ConfigurationError, InvalidPriority, InvalidTenant
from celery_dq.transport.tenant import check_priority, check_tenant, tenant_rule


class Merchant(str, enum.Enum):
    SHOP = "shop-1"


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "tenant"),
    [
        (None, ""),
        ("", ""),
        ("vip", "vip"),
        (42, "42"),
        (-1, "-1"),
        ("*", "*"),
        ("{a}", "{a}"),
        ("商户", "商户"),
        ("a" * 255, "a" * 255),
        ("é" * 127, "é" * 127),
        (Merchant.SHOP, "shop-1"),
        (Number.ONE, "1"),
    ],
)
def test_a_tenant_is_text_or_a_number(value: Any, tenant: str) -> None:
    checked = check_tenant(value)
    assert checked == tenant
    assert type(checked) is str


@pytest.mark.parametrize(
    ("value", "lesson"),
    [
        ("a" * 256, "256 bytes"),
        ("é" * 128, "256 bytes"),
        ("x" * 10_000, "10000 bytes"),
        ("a\nb", "line breaks"),
        ("a\u2028b", "line breaks"),
        ("\x00", "control characters"),
        ("\x85", "control characters"),
        ("\udcff", "Unicode"),
        (True, "bool"),
        (1.5, "float"),
        (b"vip", "bytes"),
        ([1], "list"),
    ],
)
def test_an_unusable_tenant_is_refused_with_the_reason(value: Any, lesson: str) -> None:
    with pytest.raises(InvalidTenant, match=lesson) as caught:
        check_tenant(value, where="shop.notify: tenant")
    assert "shop.notify: tenant" in str(caught.value)
    assert len(str(caught.value)) < 400
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(("value", "priority"), [(None, 0), (0, 0), (9, 9)])
def test_a_priority_goes_from_0_to_9(value: Any, priority: int) -> None:
    assert check_priority(value) == priority


@pytest.mark.parametrize("value", [-1, 10, 1.0, "5", True, float("nan"), []])
def test_an_unusable_priority_is_refused(value: Any) -> None:
    with pytest.raises(InvalidPriority, match="0 to 9"):
        check_priority(value)


def notify(merchant_id: Any, order: Any = None, /, *more: Any, urgent: bool = False, **rest: Any) -> None:
    """A task with every kind of argument."""


def plain(merchant_id: Any, order: Any = 7) -> None:
    """An ordinary task."""


@pytest.mark.parametrize(
    ("template", "args", "kwargs", "tenant"),
    [
        ("{merchant_id}", (42,), {}, 42),
        ("{merchant_id}", (), {"merchant_id": "m"}, "m"),
        ("{order}", (1,), {}, 7),
        ("eu-{merchant_id:04d}", (42,), {}, "eu-0042"),
        ("{merchant_id!r}", ("m",), {}, "'m'"),
        ("{order.merchant.id}", (1, SimpleNamespace(merchant=SimpleNamespace(id=9))), {}, "9"),
        ("{order[merchant]}", (1, {"merchant": 9}), {}, "9"),
        ("{order[0]}/{merchant_id}", (1, ["x"]), {}, "x/1"),
        ("{{{merchant_id}}}", (1,), {}, "{1}"),
        ("m-{merchant_id}", (None,), {}, None),
        ("vip", (1,), {}, "vip"),
        (5, (1,), {}, "5"),
    ],
)
def test_a_template_is_filled_from_the_bound_arguments(
    template: Any, args: Any, kwargs: Any, tenant: Any
) -> None:
    rule = tenant_rule(template, "shop.plain", plain)
    assert rule is not None
    assert rule(args, kwargs) == tenant


@pytest.mark.parametrize(
    ("template", "args", "kwargs", "tenant"),
    [
        ("{more[1]}", (1, 2, "a", "b"), {}, "b"),
        ("{urgent}", (1,), {}, False),
        ("{region}", (1,), {"region": "eu"}, "eu"),
        ("{rest[region]}", (1,), {"region": "eu", "urgent": True}, "eu"),
    ],
)
def test_a_template_reaches_star_arguments(template: str, args: Any, kwargs: Any, tenant: Any) -> None:
    rule = tenant_rule(template, "shop.notify", notify)
    assert rule is not None
    assert str(rule(args, kwargs)) == str(tenant)


@pytest.mark.parametrize(
    ("option", "lesson"),
    [
        ("{merchant}", "'merchant', which the task does not take: merchant_id, order"),
        ("{}", "without a name"),
        ("{0}", "without a name"),
        ("{merchant_id", "not a format template"),
        ("a\nb", "line breaks"),
        (1.5, "float"),
        (["x"], "list"),
    ],
)
def test_a_template_that_cannot_work_is_an_error_that_names_task_and_template(
    option: Any, lesson: str
) -> None:
    with pytest.raises((ConfigurationError, InvalidTenant), match=lesson) as caught:
        tenant_rule(option, "shop.plain", plain)
    assert "shop.plain" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "args"),
    [("{merchant_id}", ()), ("{order.nothing}", (1,)), ("{order[x]}", (1, {})), ("{merchant_id:d}", ("m",))],
)
def test_a_call_that_does_not_fit_its_template_is_an_error_of_the_call(template: str, args: Any) -> None:
    rule = tenant_rule(template, "shop.plain", plain)
    assert rule is not None
    with pytest.raises(InvalidTenant, match=r"shop\.plain"):
        rule(args, {})


def test_a_bound_task_does_not_count_itself() -> None:
    class Task:
        def run(self, merchant_id: int) -> None:
            """Bound, as in `@app.task(bind=True)`."""

    assert list(inspect.signature(Task().run).parameters) == ["merchant_id"]
    rule = tenant_rule("{merchant_id}", "shop.bound", Task().run)
    assert rule is not None
    assert rule((3,), {}) == 3
