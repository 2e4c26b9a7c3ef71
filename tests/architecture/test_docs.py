"""The documentation is true: its programs run, and it names all public parts."""

from __future__ import annotations

import configparser
import importlib
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from celery import Celery

import celery_dq
from celery_dq.app.checks.doctor import check_server
from celery_dq.cli import dq
from celery_dq.keys import PartitionKeys
from celery_dq.options.quota import QUOTA_KEYS
from celery_dq.options.sections import QUEUE_SETTINGS, SETTINGS
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.transport.resource_set import resources_of
from celery_dq.znodes import (
    JOURNALS,
    PRESENCES,
    AllocationNodes,
    AllocatorNodes,
    BrokerNodes,
    LeadershipNodes,
)
from tests.dq_command import run_dq
from tests.preloaded import run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.rst").read_text()
TUTORIAL = (DOCS / "tutorial.rst").read_text()

_BLOCK = re.compile(
    r"^\.\. code-block:: (?P<language>\w+)\n(?P<options>(?:   +:.*\n)*)\n(?P<text>(?:(?:   .*)?\n)+)", re.M
)


def blocks(document: str) -> Iterator[tuple[str, str, str]]:
    """(language, caption, text) of every code block."""
    for found in _BLOCK.finditer(document):
        caption = re.search(r":caption: (.+)", found["options"])
        text = textwrap.dedent(found["text"]).strip("\n") + "\n"
        yield found["language"], caption[1] if caption else "", text


def _indented_blocks(document: str) -> Iterator[tuple[str, str, str]]:
    """The same as :func:`blocks`, of lists and other indented parts too."""
    for depth in ("", "   ", "      "):
        yield from blocks("".join(line.removeprefix(depth) for line in document.splitlines(keepends=True)))


def everything() -> str:
    """All pages in one text, the generated ones filled in."""
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        generated = importlib.import_module("generated")
    finally:
        sys.path.pop(0)
    pages = "\n".join(path.read_text() for path in sorted(DOCS.rglob("*.rst")))
    for page in generated.PAGES:
        directive = f".. generated:: {page.__name__}"
        assert len(re.findall(rf"{re.escape(directive)}$", pages, re.M)) == 1, directive
        pages = page().join(re.split(rf"{re.escape(directive)}$", pages, flags=re.M))
    return pages


def commands(group: click.Group, path: str = "celery dq") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}"


@pytest.fixture(scope="module")
def pages() -> str:
    return everything()


@pytest.fixture
def bin_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the tests' own ``python`` and ``celery``, and the package as if installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    site = tmp_path_factory.mktemp("site")
    installed = site / "celery_dq-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: celery-dq\nVersion: 0\n")
    registered = setup["options.entry_points"]["celery.commands"].strip()
    (installed / "entry_points.txt").write_text(f"[celery.commands]\n{registered}\n")
    folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{site}",
        "PYTHONUNBUFFERED": "1",
    }


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    # The theme does not matter, and that of the published pages is not a requirement of the tests.
    options = ["-W", "--keep-going", "-q", "-E", "-b", "dummy"]
    options += ["-D", "html_theme=basic", "-D", "smartquotes=0"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_is_in_the_documentation(pages: str) -> None:
    names = set(celery_dq.__all__) - {"__version__"}
    errors = names & set(vars(celery_dq.errors))
    assert ".. automodule:: celery_dq.errors" in pages
    missing = [name for name in sorted(names - errors) if f"celery_dq.{name}" not in pages]
    assert missing == [], "document them in docs/reference"


def test_the_readme_and_the_index_list_each_guide_once_in_one_order() -> None:
    links = README[README.index("\nDocumentation\n---") :]
    linked = re.findall(r"<docs/(guides/[\w-]+)\.rst>", links)
    assert linked == re.findall(r"^   (guides/[\w-]+)$", (DOCS / "index.rst").read_text(), re.M)
    assert sorted(linked) == sorted(f"guides/{page.stem}" for page in (DOCS / "guides").glob("*.rst"))


def test_every_setting_and_every_part_of_a_quota_is_in_the_documentation(pages: str) -> None:
    missing = [setting.name for setting in SETTINGS if f"``{setting.name}``" not in pages]
    assert missing == [], "see docs/_ext/generated.py"
    own = [setting.name.removeprefix("dq_") for setting in QUEUE_SETTINGS]
    assert [key for key in (*QUOTA_KEYS, *own) if f"``{key}``" not in pages] == []


def test_every_command_is_in_the_documentation(pages: str) -> None:
    assert [path for path in commands(dq) if f"\n{path}\n---" not in pages] == []


def test_every_script_and_key_is_in_the_documentation(pages: str) -> None:
    scripts = [path for path in (ROOT / "celery_dq").rglob("*.lua") if path.parent.name != "include"]
    assert len(scripts) > 40
    missing = [path for path in scripts if not re.search(rf"^([a-z ]+: )?{path.stem}\n---", pages, re.M)]
    assert missing == [], "see docs/_ext/generated.py"
    example = PartitionKeys("online", "push")
    names = [name for name, member in vars(PartitionKeys).items() if isinstance(member, property)]
    keys = [getattr(example, name).removeprefix(example.prefix) for name in names]
    keys += ["tenant:<tenant>", "held:<consumer>", "producer:<producer>"]
    assert [key for key in keys if f"``{key}``" not in pages] == []


def test_every_node_in_zookeeper_is_in_the_documentation(pages: str) -> None:
    broker = BrokerNodes("online")
    leader = LeadershipNodes("online", "name")
    nodes = [leader, AllocatorNodes("online"), AllocationNodes("online"), broker, broker.queue("queue")]
    paths = {
        getattr(each, name)
        for each in nodes
        for name, member in inspect.getmembers(type(each))
        if isinstance(member, property) and name != "folders"
    }
    assert len(paths) > 15
    shown = pages.replace("<name>", "name").replace("<queue>", "queue")
    assert [path for path in (*paths, JOURNALS, PRESENCES) if f"``{path}``" not in shown] == []


def test_every_finding_of_the_doctor_is_explained() -> None:
    guide = (DOCS / "guides" / "operating.rst").read_text()
    sources = (ROOT / "celery_dq" / "app" / "checks").glob("*.py")
    codes = {code for path in sources for code in re.findall(r'"([EW]\d{3})"', path.read_text())}
    assert {code for code in codes if f"``{code}``" not in guide} == set()
    assert {*re.findall(r"^``([EW]\d{3})``", guide, re.M)} == codes


def test_the_programs_of_the_readme_run(bin_path: dict[str, str], tmp_path: Path) -> None:
    programs = [text for language, _, text in blocks(README) if language == "python"]
    printed = re.search(r"It prints this[^:]*:[^:]*::\n\n((?:    .*\n)+)", README)
    assert printed is not None
    for program in programs:
        (tmp_path / "shop.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "shop.py"],
            cwd=tmp_path,
            env=bin_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == textwrap.dedent(printed[1])


def test_the_tutorial_runs(bin_path: dict[str, str], tmp_path: Path) -> None:
    worker: subprocess.Popen[str] | None = None
    shop = tmp_path / "shop.py"
    with RedisServer() as server:
        try:
            for language, caption, text in blocks(TUTORIAL):
                text = text.replace("localhost:6379", f"127.0.0.1:{server.port}")
                if caption:
                    (tmp_path / caption).write_text(text)
                elif language == "python":
                    shop.write_text(shop.read_text() + text)
                elif language == "console":
                    for command, expected in steps(text):
                        if command.startswith("celery -A shop worker"):
                            worker = start(command, tmp_path, bin_path)
                            continue
                        assert_prints(command, expected, tmp_path, bin_path)
        finally:
            if worker is not None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


def test_the_program_for_plain_kombu_runs(bin_path: dict[str, str], tmp_path: Path) -> None:
    found = list(blocks((DOCS / "guides" / "plain-kombu.rst").read_text()))
    program = next(text for _, caption, text in found if caption == "letters.py")
    printed = next(text for language, _, text in found if language == "text")
    with RedisServer() as server:
        (tmp_path / "letters.py").write_text(program.replace("localhost:6379", f"127.0.0.1:{server.port}"))
        assert_prints("python letters.py", printed.splitlines(), tmp_path, bin_path)


def test_the_program_for_a_bounded_backlog_runs(bin_path: dict[str, str], tmp_path: Path) -> None:
    section = (DOCS / "guides" / "tenants-and-quotas.rst").read_text().partition(".. _backlog-bound:")[2]
    found = list(blocks(section))
    program = next(text for _, caption, text in found if caption == "bounded.py")
    printed = next(text for language, _, text in found if language == "text")
    (console,) = (text for language, _, text in found if language == "console" and "max-waiting" in text)
    with RedisServer() as server:
        program = program.replace("localhost:6379", f"127.0.0.1:{server.port}")
        (tmp_path / "bounded.py").write_text(program)
        (tmp_path / "shop.py").write_text(program.partition("app.dq.")[0])
        assert_prints("python bounded.py", printed.splitlines(), tmp_path, bin_path)
        for command, output in steps(console):
            assert_prints(command, output, tmp_path, bin_path)


def test_the_program_for_asyncio_runs(bin_path: dict[str, str], tmp_path: Path) -> None:
    found = list(blocks((DOCS / "guides" / "asyncio.rst").read_text()))
    program = next(text for _, caption, text in found if caption == "asynchronous.py")
    printed = next(text for language, _, text in found if language == "text")
    with RedisServer() as server:
        (tmp_path / "asynchronous.py").write_text(
            program.replace("localhost:6379", f"127.0.0.1:{server.port}")
        )
        command = [sys.executable, "-m", "celery", "-A", "asynchronous", "worker", "--pool", "solo"]
        with subprocess.Popen(command, cwd=tmp_path, env=bin_path, stderr=subprocess.DEVNULL) as worker:
            try:
                assert_prints("python asynchronous.py", printed.splitlines(), tmp_path, bin_path)
            finally:
                worker.terminate()


def test_the_broker_in_a_file_runs(bin_path: dict[str, str], tmp_path: Path) -> None:
    found = blocks((DOCS / "guides" / "another-store.rst").read_text())
    (tmp_path / "in_a_file.py").write_text(
        next(text for _, caption, text in found if caption == "in_a_file.py")
    )
    assert_prints("python in_a_file.py", ["30"], tmp_path, bin_path)


def test_the_recipe_of_a_write_ahead_log_runs(bin_path: dict[str, str], tmp_path: Path) -> None:
    found = blocks((DOCS / "guides" / "recipes.rst").read_text())
    (tmp_path / "wal.py").write_text(next(text for _, caption, text in found if caption == "wal.py"))
    assert_prints("python wal.py", ["True True"], tmp_path, bin_path)
    assert len((tmp_path / "wal.log").read_bytes().splitlines()) == 1000


RECIPES = [
    text
    for language, caption, text in blocks((DOCS / "guides" / "recipes.rst").read_text())
    if language == "python" and not caption
]


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_the_quotas_of_a_recipe_hold_for_its_tasks(number: int, redis_url: str, tmp_path: Path) -> None:
    recipe = RECIPES[number].replace("/var/lib/shop", str(tmp_path))
    app: Any = Celery("shop", broker=redis_url.replace("redis://", "dq-redis://"), set_as_current=False)
    celery_dq.setup(app)
    module: dict[str, Any] = {"__name__": "shop.tasks", "app": app, "validate": lambda request: request}
    exec(compile(recipe, f"recipe {number}", "exec"), module)
    tasks = [task for name, task in app.tasks.items() if not name.startswith("celery.")]
    assert tasks
    for task in tasks:
        task.delay(*["7"] * len(inspect.signature(task.run).parameters))
    if "handle" in module:
        assert module["handle"]({"order": 7}) == 202
    app.dq.buffer.close(timeout=10)
    limited = [each.name for each in app.dq.options.queues if each.names_quota]
    for name in limited:
        app.dq.quotas.apply_settings(name)  # as a worker of the queue does
    limited += [each for each in app.dq.queues if each not in limited and app.dq.quotas.list(each)]
    for name in limited or ["celery"]:
        queue = app.dq.queues[name]
        waiting = queue.peek()
        assert {each.task for each in waiting} == {task.name for task in tasks}
        tenants = {one for each in waiting for one in resources_of(each.tenant) or (each.tenant,)}
        unlimited = {each for each in tenants if queue.tenant(each).quota == celery_dq.Quota()}
        assert unlimited == (set() if limited else tenants)
    assert [each.problem for each in check_server(app) if each.code in ("W026", "W035")] == []
    app.close()


def test_the_commands_of_the_recipe_of_two_environments_run(redis_url: str, tmp_path: Path) -> None:
    recipe = (DOCS / "guides" / "recipes.rst").read_text()
    shop: Any = Celery("shop", broker=redis_url.replace("redis://", "dq-redis://"), set_as_current=False)
    celery_dq.setup(shop)
    (text,) = (text for _, caption, text in blocks(recipe) if caption == "sandbox.py")
    module: dict[str, Any] = {}
    sandbox: Any = Celery("shop", broker=shop.conf.broker_url, set_as_current=False)
    celery_dq.setup(sandbox)
    exec(text.replace("from shop import app\n", ""), module | {"app": sandbox})
    sandbox.dq.quotas.set("push", "acme", rate="5/s")
    (console,) = (text for language, _, text in blocks(recipe) if language == "console" and "sandbox" in text)
    for command, _ in steps(console):
        command = command.replace("quotas.json", str(tmp_path / "quotas.json"))
        celery, option, name, *words = shlex.split(command)
        assert (celery, option, words.pop(0)) == ("celery", "-A", "dq")
        run_dq({"shop": shop, "sandbox": sandbox}[name], *words, answer="y\n")
        if name == "sandbox" and "copy" in words:
            assert shop.dq.quotas.get("push", "acme").rate == 5
            shop.dq.quotas.remove("push", "acme")
    assert shop.dq.quotas.get("push", "acme").rate == 5
    shop.close()
    sandbox.close()


def test_the_careers_outside_of_celery_run(
    bin_path: dict[str, str], tmp_path: Path, zookeeper: ZooKeeperServer, hosts: str
) -> None:
    found = list(blocks((DOCS / "guides" / "singleton.rst").read_text()))
    elections = [text for _, caption, text in found if caption == "election.py"]
    program = next(text for _, caption, text in found if caption == "ledger.py")
    printed = next(text for language, _, text in found if language == "text")
    (tmp_path / "ledger.py").write_text(program)
    with RedisServer() as server:
        assert len(elections) == 2
        for text in elections:
            here = text.replace("localhost:6379", f"127.0.0.1:{server.port}").replace(
                "localhost:2181/shop", hosts
            )
            assert here != text
            (tmp_path / "election.py").write_text(here)
            assert_prints("python ledger.py", printed.splitlines(), tmp_path, bin_path)


def test_the_test_that_users_are_shown_passes(bin_path: dict[str, str], tmp_path: Path) -> None:
    guide = (DOCS / "guides" / "testing.rst").read_text()
    for _, caption, text in (*list(blocks(TUTORIAL))[:3], *blocks(guide)):
        if caption:
            (tmp_path / caption).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_notify.py"]
    done = subprocess.run(command, cwd=tmp_path, env=bin_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def examples() -> Iterator[tuple[str, str]]:
    """(where, source) of every Python program that a user may copy."""
    for page in (ROOT / "README.rst", *DOCS.rglob("*.rst")):
        for language, _, text in _indented_blocks(page.read_text()):
            if language == "python":
                yield page.name, text
    for path in (*(ROOT / "example_project").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        yield path.name, path.read_text()


def test_no_example_uses_a_task_option_that_celery_has_deprecated() -> None:
    found = list(examples())
    assert len(found) > 60
    deprecated = {"queue", "exchange", "exchange_type", "routing_key", "delivery_mode", "priority"}
    calls = re.compile(r"\b(?:shared_task|(?<!send_)task)\(([^()]*)\)")
    options = {
        (where, option)
        for where, text in found
        for call in calls.findall(text)
        for option in re.findall(r"(\w+)=", call)
    }
    assert ("tasks.py", "tenant") in options
    assert {each for each in options if each[1] in deprecated} == set()


def steps(console: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block with the lines that it is to print."""
    command, expected = "", list[str]()
    for line in [*console.splitlines(), "$ "]:
        if line.startswith("$ "):
            if command:
                yield command, expected
            command, expected = line[2:], []
        else:
            expected.append(line)


def start(command: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a worker; return when it is ready."""
    log = folder / "worker.log"
    with log.open("w") as output:
        worker = subprocess.Popen(
            f"exec {command} -l INFO",
            shell=True,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    wait_until(lambda: " ready." in log.read_text(), 60, what=lambda: log.read_text())
    return worker


def assert_prints(command: str, expected: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a command of Python or Celery; blanks count as one, and … stands for anything."""

    def printed_lines() -> list[str]:
        program, *words = shlex.split(command)
        words = ["-m", "celery", *words] if program == "celery" else words
        done = run_python(*words, environment=environment, folder=folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return [" ".join(line.split()) for line in done.stdout.splitlines()]

    wanted = [" ".join(line.split()) for line in expected]
    patterns = [r"\s*.+?\s*".join(map(re.escape, line.split("…"))) for line in wanted]
    found: list[str] = []

    def matches() -> bool:
        found[:] = printed_lines()
        return len(found) == len(patterns) and all(map(re.fullmatch, patterns, found))

    # `explain` is asked again: at its next allowed time, it may be the tenant's turn.
    again = 40.0 if " explain " in command else 0.0
    wait_until(matches, again, what=lambda: f"{command} printed {found}, not {wanted}")


#: Commands that serve, draw on a terminal, or need another server, a file or a fault to show something.
SILENT = {
    *("alive", "ready", "exporter", "top", "web", "zookeeper", "workers", "dead edit", "dedup release"),
    *("quotas apply", "quotas import"),
    *("spill quarantine replay", "spill quarantine rm", "spill quarantine show"),
}


def test_the_reference_shows_the_output_of_each_command() -> None:
    outputs = json.loads((DOCS / "reference" / "cli_outputs.json").read_text(encoding="utf-8"))
    known = {path.removeprefix("celery dq ") for path in commands(dq)}
    assert known - SILENT == outputs.keys()
    for name, shown in outputs.items():
        assert all(line.startswith(name) and output for line, output in shown)
        assert not any("Error" in output or "Usage:" in output for _, output in shown), name
