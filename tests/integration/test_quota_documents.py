"""``celery dq quotas export``, ``import`` and ``copy``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import celery_dq
from celery_dq.errors import InvalidQuota, InvalidRequest
from celery_dq.inspector.live_quotas import LiveQuotas, compare, read_document, written
from celery_dq.keys import audit_stream
from celery_dq.options import Quota
from celery_dq.options.quota import WHEN_FULL
from tests.dq_command import Run, run_dq


@pytest.fixture
def run(shop: Any) -> Run:
    """A function that runs ``celery dq quotas …``. Two queues exist, and one has live quotas."""
    shop.conf.dq_queues = {"push": {}, "pull": {}, "wide": {"partitions": 3}}
    shop.dq.quotas.set_default("push", rate=20)
    shop.dq.quotas.set("push", "007", weight=3)
    shop.dq.quotas.set("push", "no", rate="50/m", burst=10, concurrency=8)
    shop.dq.quotas.pause("push", "acme")
    return lambda *words, **options: run_dq(shop, "quotas", *words, **options).output


def test_a_folder_that_does_not_exist_is_no_fault_of_a_server(run: Run, tmp_path: Path) -> None:
    text = run("export", "--output", str(tmp_path / "none" / "quotas.json"), status=1)
    assert "A file cannot be used" in text


def test_export_and_import_give_the_same_quotas(run: Run, shop: Any, tmp_path: Path) -> None:
    file = tmp_path / "quotas.json"
    assert run("export", "--output", str(file)) == ""
    assert file.read_text() == run("export") == run("export", "--json")
    assert list(json.loads(file.read_text())) == ["push"]
    assert '"no": {"rate": "50/m", "burst": 10, "weight": 1, "concurrency": 8}' in file.read_text()
    assert run("import", str(file)) == "No difference.\n"
    before = shop.dq.quotas.live("push")
    shop.dq.quotas.remove("push", "no")
    shop.dq.quotas.set("push", "other", rate=1)
    shop.dq.quotas.remove_default("push")
    lines = run("import", str(file), "--dry-run").splitlines()
    assert [line[0] for line in lines] == ["+", "+", "-", "3"]
    assert lines[-1] == "3 changes, none made."
    assert "Aborted" in run("import", str(file), status=1, answer="n\n")
    assert "other" in shop.dq.quotas.list("push")
    assert "1 of them removals?" in run("import", str(file), answer="y\n")
    assert shop.dq.quotas.live("push") == before
    assert list(shop.dq.quotas.paused("push")) == ["acme"]
    (origin,) = shop.dq.quotas.origins("push", "no")
    assert origin.by


def test_a_bound_is_exported_and_imported(run: Run, shop: Any, tmp_path: Path) -> None:
    file = tmp_path / "quotas.json"
    shop.dq.quotas.set_default("push", max_waiting=50_000)
    shop.dq.quotas.set("push", "bounded", max_waiting=500, when_full="discard")
    # The choice outlives the bound, in the file as well.
    shop.dq.quotas.set("push", "former", max_waiting=1, when_full="wait")
    shop.dq.quotas.set("push", "former", max_waiting=None)
    run("export", "--output", str(file))
    (default,) = (line for line in file.read_text().splitlines() if '"default"' in line)
    assert default.endswith('"concurrency": null, "max_waiting": 50000, "when_full": "refuse"},')
    assert run("import", str(file)) == "No difference.\n"
    before = shop.dq.quotas.live("push")
    shop.dq.quotas.set("push", "bounded", max_waiting=499)
    shop.dq.quotas.set("push", "former", when_full="refuse", rate=1)
    text = run("import", str(file), "--yes")
    assert "max_waiting=499 when_full=discard -> " in text
    assert "max_waiting=500 when_full=discard\n" in text
    assert shop.dq.quotas.live("push") == before
    (origin,) = shop.dq.quotas.origins("push", "bounded")
    assert origin.source == "tenant"


def test_an_import_reads_yaml_and_takes_names_as_they_are_written(
    run: Run, shop: Any, tmp_path: Path
) -> None:
    file = tmp_path / "quotas.yaml"
    run("export", "--output", str(file))
    assert run("import", str(file)) == "No difference.\n"
    # Without quotes they are a number and a boolean in YAML.
    file.write_text(
        "# of the spring\npush:\n  default: {rate: 20}\n"
        "  tenants:\n    007: {weight: 3}\n    no:\n      rate: 50/m\n      burst: 10\n"
    )
    lines = run("import", str(file), "--yes").splitlines()
    assert [line.split(":")[0] for line in lines] == ["~ push  007", "~ push  no", "2 changes made."]
    assert list(shop.dq.quotas.live("push").tenants) == ["007", "no"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("push: {", "quotas.yml is not YAML: "),
        ("push: {}\npush: {}", "quotas.yml: 'push' stands twice"),
        ("push: {default: 2026-03-01}", "queue 'push', default is '2026-03-01': give an object"),
        ("? [push]\n: {}", "quotas.yml is not YAML: a name in line 1 is not text"),
    ],
)
def test_a_mistake_in_yaml_is_named(run: Run, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "quotas.yml"
    file.write_text(text)
    assert words in run("import", str(file), "--yes", status=1)


def test_yaml_without_its_library(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    file = tmp_path / "quotas.yaml"
    file.write_text("push: {}")
    assert "pip install PyYAML" in run("import", str(file), "--yes", status=1)


def test_an_interrupted_import_reports_how_far_it_got(
    run: Run, shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "quotas.json"
    file.write_text(json.dumps({"push": {}}))
    before = len(shop.dq.quotas.changes("push", LiveQuotas()))
    assert "--yes makes" in run("import", str(file), status=2)
    make = shop.dq.quotas.make

    def make_two(changes: Any, *, on_progress: Callable[[int], None]) -> int:
        def interrupt(done: int) -> None:
            on_progress(done)
            if done == 2:
                raise KeyboardInterrupt

        return int(make(changes, on_progress=interrupt))

    monkeypatch.setattr(shop.dq.quotas, "make", make_two)
    text = run("import", str(file), "--yes", status=130)
    assert text.splitlines()[-1] == f"Interrupted: at least 2 changes of {before} made."
    assert len(shop.dq.quotas.changes("push", LiveQuotas())) == before - 2


def test_copy_makes_the_other_queue_equal(run: Run, shop: Any) -> None:
    shop.dq.quotas.set("pull", "old", rate=3)
    outcome = json.loads(run("copy", "push", "--to", "pull", "--yes", "--json"))
    assert outcome["made"] == 4
    changes = {change["tenant"]: change for change in outcome["changes"]}
    assert changes["old"]["after"] is None
    assert changes["007"]["before"] is None
    assert shop.dq.quotas.live("pull") == shop.dq.quotas.live("push")
    assert shop.dq.quotas.paused("pull") == {}
    assert run("copy", "push", "--to", "pull") == "No difference.\n"


def test_the_quotas_of_a_sandbox_go_online_after_a_look(run: Run, shop: Any) -> None:
    with shop.dq.quotas.in_environment("sandbox") as sandbox:
        sandbox.set("push", "old", rate=3)
        wanted = shop.dq.quotas.live("push")
        shown = run("copy", "push", "--to-environment", "sandbox", "--dry-run")
        assert "- push  old:" in shown
        assert list(sandbox.list("push")) == ["old"]
        assert json.loads(run("copy", "push", "--to-environment", "sandbox", "--yes", "--json"))["made"] == 4
        assert sandbox.live("push") == wanted
        sandbox.set("push", "007", weight=5)
        (change,) = shop.dq.quotas.copy("push", to="sandbox", dry_run=True)
        assert (change.tenant, change.before.weight, change.after.weight) == ("007", 5, 3)
        assert shop.dq.quotas.copy("push", to="sandbox") == [change]
        assert shop.dq.quotas.copy("push", to="sandbox") == []
        run("copy", "push", "--to", "pull", "--to-environment", "sandbox", "--yes")
        assert sandbox.live("pull") == wanted == shop.dq.quotas.live("push")
    assert shop.dq.quotas.live("pull") == LiveQuotas()


def test_a_spread_goes_to_an_environment_that_has_no_such_queue(run: Run, shop: Any) -> None:
    for queue in ("news", "jobs"):  # no setting names them
        shop.dq.queues[queue].set_partitions(3)
        shop.dq.quotas.set(queue, "big", spread=3)
    to_sandbox = ("--to-environment", "sandbox", "--yes")
    # Without partitions in the settings, the queue cannot have the spread there.
    with pytest.raises(InvalidQuota, match=r"set dq_queues\['news'\]\['partitions'\] = 3 in the settings"):
        shop.dq.quotas.copy("news", to="sandbox")
    assert "1 change, none made." in run("copy", "news", "--to", "wide", *to_sandbox[:2], "--dry-run")
    run("copy", "news", "--to", "wide", *to_sandbox)
    with shop.dq.quotas.in_environment("sandbox") as sandbox:
        assert sandbox.get("wide", "big").spread == 3
        sandbox.set("jobs", "small", rate=1)
        # It exists there now, with one partition.
        with pytest.raises(InvalidQuota, match="partitions jobs --set 3 with dq_environment = 'sandbox'"):
            shop.dq.quotas.copy("jobs", to="sandbox")
    with Celery("elsewhere", broker=shop.conf.broker_url, set_as_current=False) as app:
        celery_dq.setup(app).conf.dq_environment = "sandbox"
        run_dq(app, "partitions jobs --set 3")
    assert len(shop.dq.quotas.copy("jobs", to="sandbox")) == 2


def test_a_copy_to_another_environment_is_audited_there(run: Run, shop: Any) -> None:
    before = len(shop.dq.audit())
    with shop.dq.audit.through("admin", by="ada"):
        shop.dq.quotas.copy("push", to="sandbox")
    assert len(shop.dq.audit()) == before
    with shop.dq._broker.channel() as channel:
        ((_, entry),) = channel.client.xrange(audit_stream("sandbox"))
    assert (entry[b"by"], entry[b"door"], entry[b"action"]) == (b"ada", b"admin", b"quotas_made")


@pytest.mark.parametrize("environment", ["online", "onlyne", ""])
def test_an_environment_that_is_none_or_the_own_one_is_refused(shop: Any, environment: str) -> None:
    with (
        pytest.raises(InvalidRequest, match="not the app's own"),
        shop.dq.quotas.in_environment(environment),
    ):
        pass


def test_a_queue_without_live_quotas_is_not_copied(run: Run, shop: Any) -> None:
    shop.dq.quotas.set("pull", "old", rate=3)
    shop.dq.quotas.remove("pull", "old")
    assert "'pull' has no live quotas to copy" in run("copy", "pull", "--to", "push", "--yes", status=1)
    assert list(shop.dq.quotas.list("push")) != []


def test_nothing_is_applied_from_a_document_with_one_mistake(run: Run, shop: Any, tmp_path: Path) -> None:
    before = shop.dq.quotas.live("push")
    file = tmp_path / "quotas.json"
    mistakes: list[Any] = [{"push": {}, "pusj": {}}, {"push": {"tenants": {"a": {}, "b": {"rate": "fast"}}}}]
    for mistake in mistakes:
        file.write_text(json.dumps(mistake))
        assert run("import", str(file), "--yes", status=1)
        assert shop.dq.quotas.live("push") == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"push": {"tenants": {"42": {"rate": "fast"}}}}', "f: queue 'push', tenant '42': rate = 'fast'"),
        ('{"push": {"default": {"weight": 0}}}', "f: queue 'push', default: weight = 0 is not from 0.001"),
        ('{"push": {"default": {"wait": 1}}}', "did you mean 'weight'?"),
        ('{"push": {"tenants": {"42": {"max_wating": 5}}}}', "did you mean 'max_waiting'?"),
        ('{"push": {"tenants": {"42": {"max_waiting": "5"}}}}', "max_waiting = '5' is not a whole number"),
        ('{"push": {"tenants": {"42": {"when_full": ["wait"]}}}}', "when_full = ['wait'] is not one of"),
        ('{"push": {"tenant": {}}}', "queue 'push': 'tenant' is unknown: did you mean 'tenants'?"),
        ('{"push": {"tenants": {"a": {}, "a": {}}}}', "'a' stands twice"),
        ('{"push": {"tenants": {"a\\u0001": {}}}}', "control characters"),
        ('{"push": {"tenants": ["a"]}}', "'tenants' is ['a']: give an object"),
        ('{"push": {"tenants": {"a": 5}}}', "tenant 'a' is 5: give an object"),
        ('{"push": {"default": {"rate": NaN}}}', "rate = nan"),
        ("[]", "f is []: give an object"),
        ('{\n"push": }', "f is not JSON: Expecting value: line 2"),
        ("[" * 100_000, "f is not JSON"),
        (b"\xff\xfe\xfd", "f is not JSON"),
    ],
)
def test_a_mistake_names_its_place_and_value(text: str | bytes, words: str) -> None:
    with pytest.raises(InvalidQuota) as caught:
        read_document(text, "f")
    assert words in str(caught.value)


def test_every_quota_survives_the_document() -> None:
    quotas = [Quota(rate=rate) for rate in (None, 1, 0.5, 50 / 60, 7 / 3_600, 3 / 86_400, 1 / 3, 99_999.5)]
    quotas += [Quota(burst=2.5, weight=0.001, concurrency=1_000_000), Quota(paused=True)]
    quotas += [Quota(max_waiting=5, when_full=each) for each in WHEN_FULL]
    quotas += [Quota(when_full=each) for each in WHEN_FULL]
    tenants = {f'"{number}\\ é': quota for number, quota in enumerate(quotas)}
    before = {"a": LiveQuotas(None, tenants), "b": LiveQuotas(Quota(rate=5), {}), "c": LiveQuotas()}
    after = read_document(written(before), "f")
    assert list(after) == ["a", "b", "c"]
    assert [compare(queue, before[queue], after[queue]) for queue in before] == [[], [], []]
    assert written({}) == "{}"
