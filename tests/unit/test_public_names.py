from __future__ import annotations

import subprocess
import sys

import pytest

import celery_dq
from celery_dq import errors


def test_public_names_are_found_when_used() -> None:
    assert celery_dq.ConfigurationError is errors.ConfigurationError
    assert celery_dq.Quota(rate=5).interval_us == 200_000


def test_every_error_is_public() -> None:
    assert {name for name in vars(errors) if isinstance(vars(errors)[name], type)} <= set(celery_dq.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        celery_dq.nothing  # noqa: B018 - it raises


def test_dir_lists_the_public_names() -> None:
    assert set(celery_dq.__all__) <= set(dir(celery_dq))


@pytest.mark.parametrize(
    "imports",
    [
        "from celery_dq import dedup",
        "import celery_dq; dedup = celery_dq.dedup",
        "import celery_dq.dedup.signals; from celery_dq import dedup",
        "from celery_dq.dedup import dedup",
        "from celery_dq import dedup; import celery_dq.dedup.signals; dedup = celery_dq.dedup",
        "from celery_dq import dedup; import celery_dq.dedup.signals; celery_dq.dedup.signals.verdict_given",
        "from celery_dq import *",
    ],
)
def test_dedup_is_the_decorator_in_every_order_of_imports(imports: str) -> None:
    program = f"""
{imports}
@dedup(key="{{sku}}", timeout=60)
def index(sku): ...
from celery_dq.dedup.rule import _ATTRIBUTE
print(getattr(index, _ATTRIBUTE).key)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{sku}\n", "")


@pytest.mark.parametrize("wrong", [None, "shop", celery_dq])
def test_setup_refuses_other_objects_than_an_app(wrong: object) -> None:
    with pytest.raises(celery_dq.InvalidRequest, match=r"^setup\(.*: give the Celery app"):
        celery_dq.setup(wrong)
