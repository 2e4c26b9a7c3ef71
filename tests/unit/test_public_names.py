from __future__ import annotations

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
