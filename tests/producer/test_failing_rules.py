"""The error for a tenant or dedup key that cannot be computed names the task, the rule and the remedy."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from celery_dq.errors import DQError, InvalidKey, InvalidTenant
from tests.apps import task as make_task
from tests.producer.conftest import MakeApp


class Order:
    """An argument whose attribute runs code, like a related object in Django."""

    @property
    def merchant(self) -> str:
        raise RuntimeError("no such row")


def work(order: Any = None, region: str = "eu") -> None: ...


def needy(sku: int) -> None: ...


FAILING: dict[str, tuple[dict[str, Any], type[DQError], str, type[Exception]]] = {
    "tenant callable": (
        {"tenant": lambda args, kwargs: args[0][1]},
        InvalidTenant,
        "the tenant callable .*<lambda> failed .*IndexError.*apply_async.*tenant=",
        IndexError,
    ),
    "tenant template": (
        {"tenant": "{order[1]}"},
        InvalidTenant,
        r"the tenant template '\{order\[1\]\}' cannot be filled .*IndexError.*tenant=",
        IndexError,
    ),
    "key callable": (
        {"dedup": {"key": lambda order, region="eu": order[1]}},
        InvalidKey,
        "the dedup key callable .*<lambda> failed .*IndexError.*arguments that the key needs",
        IndexError,
    ),
    "key template": (
        {"dedup": {"key": "{order[1]}"}},
        InvalidKey,
        r"the dedup key '\{order\[1\]\}' cannot be filled .*IndexError.*arguments that the key needs",
        IndexError,
    ),
}


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "direct"])
@pytest.mark.parametrize("known", [True, False], ids=["template learnt", "first call"])
@pytest.mark.parametrize("rule", FAILING)
def test_a_rule_that_fails_is_named(make_app: MakeApp, rule: str, known: bool, buffered: bool) -> None:
    options, kind, text, cause = FAILING[rule]
    task = make_task(make_app(dq_buffer=buffered), name="shop.push", **options)(work)
    for number in range(3 * known):
        task.apply_async(([0, number],))
    with pytest.raises(kind, match=f"task shop.push: {text}") as caught:
        task.apply_async(([0],))
    assert type(caught.value.__cause__) is cause
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("options", [{"tenant": "{order.merchant}"}, {"dedup": {"key": "{order.merchant}"}}])
def test_an_attribute_that_fails_is_named(make_app: MakeApp, options: dict[str, Any]) -> None:
    app = make_app(dq_buffer=False, task_serializer="pickle")
    task = make_task(app, name="shop.push", **options)(work)
    with pytest.raises(DQError, match="task shop.push: .*order.merchant.*no such row") as caught:
        task.apply_async((Order(),))
    assert type(caught.value.__cause__) is RuntimeError


@pytest.mark.parametrize(
    ("options", "kind", "remedy"),
    [
        ({"tenant": "{sku}"}, InvalidTenant, "tenant="),
        ({"dedup": {"key": "{sku}"}}, InvalidKey, "arguments that the key needs"),
    ],
)
def test_a_missing_argument_is_named(
    make_app: MakeApp, options: dict[str, Any], kind: type[DQError], remedy: str
) -> None:
    task = make_task(make_app(dq_buffer=False), name="shop.push", typing=False, **options)(needy)
    with pytest.raises(kind, match=f"task shop.push: .*'sku'.*{remedy}"):
        task.delay()
