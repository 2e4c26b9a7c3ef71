"""Private names of other libraries: the guard at start-up, and the releases that were read."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

import pytest
from celery.app.task import Task

from celery_dq.compat import guard
from celery_dq.compat.guard import READ_VERSIONS, TABLE, PrivateName, unread
from celery_dq.errors import ConfigurationError


def named(name: str, parameters: str = "", module: str = "celery.app.task") -> PrivateName:
    return PrivateName("", module, name, "a test", "none", parameters)


@pytest.mark.parametrize("name", TABLE, ids=lambda each: f"{each.user}:{each.name}")
def test_the_installed_libraries_have_each_name(name: PrivateName) -> None:
    assert guard.problem_of(name) == ""


def test_each_user_of_a_name_exists() -> None:
    for user in {each.user for each in TABLE} - {"worker"}:
        import_module(f"celery_dq.compat.{user}")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (named("Task._gone"), "celery.app.task.Task._gone does not exist"),
        (named("Gone._get_exec_options"), "does not exist"),
        (named("_gone"), "does not exist"),
        (
            named("Task._get_exec_options", "self args"),
            "has the parameters (self) instead of (self, args, …)",
        ),
        (named("Request._gone", module="celery.worker.request"), "does not exist"),
    ],
)
def test_a_name_that_is_gone_is_found(name: PrivateName, problem: str) -> None:
    assert problem in guard.problem_of(name)


def test_more_parameters_at_the_end_are_no_problem() -> None:
    assert guard.problem_of(named("Task.apply_async", "self args kwargs")) == ""


def test_a_replacement_that_passes_on_its_arguments_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Monitoring tools replace methods, not all of them with ``functools.wraps``."""
    original = Task.apply_async
    monkeypatch.setattr(Task, "apply_async", lambda *args, **kwargs: original(*args, **kwargs))
    assert guard.problem_of(named("Task.apply_async", "self args kwargs")) == ""
    monkeypatch.setattr(Task, "apply_async", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    assert guard.problem_of(named("Task.apply_async", "self args kwargs")) == ""
    monkeypatch.setattr(Task, "apply_async", lambda other, *args, **kwargs: None)
    assert "has the parameters" in guard.problem_of(named("Task.apply_async", "self args kwargs"))


def test_an_attribute_of_instances_is_found_in_the_code_of_the_class() -> None:
    assert guard.problem_of(named("Request._on_ack", module="celery.worker.request")) == ""


def test_a_missing_name_stops_the_process_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "TABLE", (named("Task._gone")._replace(user="ours"),))
    guard.check("others")
    with pytest.raises(ConfigurationError) as caught:
        guard.check("ours")
    installed = version("celery")
    assert f"celery {installed}: celery.app.task.Task._gone does not exist" in str(caught.value)
    assert "Install celery 5.5 to 5.7, or a later celery-dq" in str(caught.value)


def test_a_release_outside_of_those_that_were_read_is_named() -> None:
    assert unread({"celery": "5.5.0", "kombu": "5.7.99", "redis": "8.1.0", "django": "99.0"}) == {}
    assert unread({"celery": "5.4.9", "kombu": "5.8.0rc1", "kazoo": "3.0"}) == {
        "celery 5.4.9": "5.5 to 5.7",
        "kombu 5.8.0rc1": "5.5 to 5.7",
        "kazoo 3.0": "2.10 to 2.11",
    }


def test_each_library_of_the_table_has_releases() -> None:
    assert {each.library for each in TABLE} == {*READ_VERSIONS}
