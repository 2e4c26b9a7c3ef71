"""``celery dq spill``: another process lists and sends the messages of dead producers."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import Result

import celery_dq
from celery_dq.app.api.buffer import survey
from celery_dq.producer import flusher
from celery_dq.testing.servers import RedisServer
from tests.dq_command import run_dq
from tests.preloaded import run_python
from tests.producer.test_spill_log import WRITER, Child, orphans_of_another_process

PRODUCER = """
import os, signal, sys
from celery import Celery
import celery_dq
app = Celery("shop", broker=sys.argv[1])
app.conf.update(dq_buffer=True, dq_buffer_folder=sys.argv[2])
celery_dq.setup(app)
for number in range(7):
    app.send_task("job", (number,), task_id=f"job-{number}", queue="push")
os.kill(os.getpid(), signal.SIGKILL)
"""


def make_app(url: str, folder: str | None) -> Any:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(dq_buffer_folder=folder)
    celery_dq.setup(app)
    return app


def run(app: Any, *words: str, status: int = 0) -> Result:
    return run_dq(app, "spill", *words, status=status)


def kill_producer(url: str, folder: str) -> None:
    assert run_python("-c", PRODUCER, url, folder).returncode == -signal.SIGKILL


def test_the_messages_of_a_dead_process_are_shown_and_replayed(tmp_path: Path) -> None:
    folder = str(tmp_path / "spill")
    with RedisServer() as server:
        url = server.url(scheme="dq-redis")
        app = make_app(url, folder)
        server.kill()
        kill_producer(url, folder)
        found = json.loads(run(app, "list", "--json").stdout)
        assert (found["pending"], found["quarantined"]) == (7, [])
        (owner,) = found["owners"]
        assert (owner["state"], owner["pending"], owner["damaged"]) == ("dead", 7, 0)
        assert owner["bytes"] > 0 <= owner["age_s"]
        header, columns, row = run(app).output.splitlines()
        assert ": 7 pending or already delivered, " in header
        assert re.fullmatch(r"\d+\.\d", row.split()[columns.split().index("age_s")])
        assert run(app, "replay", "--yes", "--timeout", "0.2", status=1).output == "0 sent, 7 left.\n"
        server.start()
        assert run(app, "replay", "--dry-run").output == "7 messages would be sent; none was.\n"
        assert json.loads(run(app, "replay", "--dry-run", "--json").stdout) == {"found": 7, "sent": 0}
        question = run(app, "replay", status=2).output
        assert "Send 7 messages of 1 dead process?" in question
        assert run(app, "replay", "-y", "--timeout", "30").output == "7 sent, 0 left.\n"
        assert run(app, "replay").output == "0 sent, 0 left.\n"
        assert "0 pending" in run(app).output
        assert [message.id for message in app.dq.queues["push"].peek()] == [f"job-{n}" for n in range(7)]
        app.close()


@pytest.mark.parametrize("group", [(), ("quarantine",)])
@pytest.mark.parametrize("json_", [(), ("--json",)])
def test_a_group_without_a_command_lists(tmp_path: Path, group: tuple[str], json_: tuple[str]) -> None:
    app = make_app("dq-redis://127.0.0.1:1/0", str(tmp_path / "spill"))
    assert run(app, *group, *json_).output == run(app, *group, "list", *json_).output
    assert "Usage:" in run(app, *group, "--help").output
    assert "No such option" in run(app, *group, "--jsn", status=2).output
    app.close()


def test_messages_of_a_container_that_is_gone_are_replayed(tmp_path: Path) -> None:
    folder = str(tmp_path / "spill")
    with RedisServer() as server:
        app = make_app(server.url(scheme="dq-redis"), folder)
        server.kill()
        kill_producer(server.url(scheme="dq-redis"), folder)
        server.start()
        (dead,) = app.dq.buffer.folder.iterdir()
        # The container's host name was another one: the name of the folder has its CRC.
        dead.rename(dead.with_name(re.sub(r"\.\w+-", ".01234567-", dead.name)))
        assert run(app, "replay", "--dry-run").output == "7 messages would be sent; none was.\n"
        assert run(app, "replay", "-y", "--timeout", "30").output == "7 sent, 0 left.\n"
        app.close()


@pytest.mark.parametrize("host", ["this", "another"])
@pytest.mark.parametrize("pid", ["of this machine", "of a container"])
def test_the_lock_shows_whether_a_process_lives(tmp_path: Path, host: str, pid: str) -> None:
    writer = Child(WRITER, tmp_path, 3)
    folder = Path(writer.line())
    name = folder.name
    if host == "another":
        name = re.sub(r"\.\w+-", ".01234567-", name)
    if pid == "of a container":
        name = re.sub(r"^\d+\.\d*\.", "999999999.1.", name)
    folder.rename(folder.with_name(name))
    (lives,) = survey(tmp_path).owners
    assert (lives.state, lives.pending) == ("alive" if host == "this" else "elsewhere", 3)
    assert orphans_of_another_process(tmp_path) == 0  # it has its lock still
    writer.kill()
    (died,) = survey(tmp_path).owners
    assert (died.state, died.pending) == ("dead", 3)


def test_quarantine_and_damage_are_shown(tmp_path: Path) -> None:
    app = make_app("dq-redis://127.0.0.1:1/0", str(tmp_path / "spill"))
    kill_producer("dq-redis://127.0.0.1:1/0", str(tmp_path / "spill"))
    (segment,) = app.dq.buffer.folder.glob("*/*.seg")
    segment.write_bytes(segment.read_bytes()[:-3])
    quarantine = app.dq.buffer.folder / "quarantine"
    quarantine.mkdir()
    (quarantine / "old.bad").write_bytes(b"xyz")
    found = survey(app.dq.buffer.folder)
    assert (found.pending, found.owners[0].damaged) == (6, 1)
    assert "old.bad (3 bytes)" in run(app).output


def test_the_quarantine_is_shown_replayed_and_emptied(tmp_path: Path) -> None:
    folder = str(tmp_path / "spill")
    with RedisServer() as server:
        app = make_app(server.url(scheme="dq-redis"), folder)
        assert run(app, "quarantine").output == "Nothing is in the quarantine.\n"
        server.kill()
        kill_producer(server.url(scheme="dq-redis"), folder)
        (segment,) = app.dq.buffer.folder.glob("*/*.seg")
        quarantine = app.dq.buffer.folder / "quarantine"
        quarantine.mkdir()
        segment.rename(quarantine / "whole.bad")
        whole = (quarantine / "whole.bad").read_bytes()
        (quarantine / "cut.bad").write_bytes(whole[:-3])
        (quarantine / "noise.bad").write_bytes(b"xyz")
        files = json.loads(run(app, "quarantine", "list", "--json").stdout)
        assert {each["name"]: (len(each["messages"]), each["problem"]) for each in files} == {
            "whole.bad": (7, ""),
            "cut.bad": (6, "a record is cut short, or its length is damaged"),
            "noise.bad": (0, "the header is cut short: 3 bytes"),
        }
        assert files[0]["messages"][0] | {"bytes": 0} == {
            "id": "job-0",
            "queue": "push",
            "task": "job",
            "tenant": "",
            "bytes": 0,
        }
        assert "job-5" in run(app, "quarantine", "show", "cut.bad").output
        assert "The rest cannot be read: the header is cut short" in (
            run(app, "quarantine", "show", "noise.bad").output
        )
        assert "Did you mean 'whole.bad'?" in run(app, "quarantine", "show", "whole.bat", status=1).output
        assert "Send 13 messages of 2 files?" in run(app, "quarantine", "replay", "--all", status=2).output
        assert (
            run(app, "quarantine", "replay", "--all", "--dry-run").output
            == "13 messages would be sent; none was.\n"
        )
        run(app, "quarantine", "replay", "whole.bad", "-y", status=1)
        assert (quarantine / "whole.bad").exists()  # the server is away
        server.start()
        assert "cannot be sent" in run(app, "quarantine", "replay", "noise.bad", "-y", status=1).output
        assert run(app, "quarantine", "replay", "--all", "-y").output == "Sent 13.\n"
        # The end of the cut file is kept, and the messages before it are not.
        (cut,) = quarantine.glob("cut-*.bad")
        assert cut.stat().st_size < 400
        assert "cannot be sent" in run(app, "quarantine", "replay", cut.name, "-y", status=1).output
        assert run(app, "quarantine", "replay", "--all", "-y").output == "Sent 0.\n"
        (quarantine / "whole.bad").write_bytes(whole)  # as if the removal had been interrupted
        assert run(app, "quarantine", "replay", "whole.bad", "-y").output == "Sent 7.\n"
        waiting = [message.id.partition("~")[0] for message in app.dq.queues["push"].peek(20)]
        assert sorted(waiting) == sorted(f"job-{n}" for n in [*range(7), *range(6)])
        assert "Remove 2 files with 0 readable messages for good?" in (
            run(app, "quarantine", "rm", "--all", status=2).output
        )
        assert "either NAMES or --all" in run(app, "quarantine", "rm", status=2).output
        assert run(app, "quarantine", "rm", "noise.bad", "-y").output == (
            "Removed 1 file with 0 readable messages.\n"
        )
        assert run(app, "quarantine", "rm", "--all", "-y", "--json").stdout == '{\n  "removed": 1\n}\n'
        assert list(quarantine.iterdir()) == []
        app.close()


def test_an_error_reports_the_files_that_were_removed_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app("dq-redis://127.0.0.1:1/0", str(tmp_path / "spill"))
    quarantine = app.dq.buffer.folder / "quarantine"
    quarantine.mkdir(parents=True)
    for name in ("a.bad", "b.bad"):
        (quarantine / name).write_bytes(b"xyz")
    remove = type(app.dq.buffer).remove_quarantined

    def refuse_b(buffer: Any, name: str) -> None:
        if name == "b.bad":
            raise PermissionError(13, "Permission denied", name)
        remove(buffer, name)

    monkeypatch.setattr(type(app.dq.buffer), "remove_quarantined", refuse_b)
    text = run(app, "quarantine", "rm", "--all", "-y", status=1).output
    assert text.startswith("Removed 1 file with 0 readable messages.\nError: A file cannot be used")
    assert [each.name for each in quarantine.iterdir()] == ["b.bad"]
    app.close()


def test_ones_own_folder_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "ADOPT_S", 600.0)  # this process adopts nothing while a busy machine kills
    app = make_app("dq-redis://127.0.0.1:1/0", str(tmp_path / "spill"))
    app.send_task("job", task_id="mine", queue="push", buffered=True)
    try:
        seen = [survey(app.dq.buffer.folder).owners for _ in range(3)]
        assert [(owner.state, owner.pending) for (owner,) in seen] == [("this process", 1)] * 3
        name = seen[0][0].name
        kill_producer("dq-redis://127.0.0.1:1/0", str(tmp_path / "spill"))  # it looks for orphans too
        assert (app.dq.buffer.folder / name / "lock").exists()
        assert {each.state: each.pending for each in survey(app.dq.buffer.folder).owners} == {
            "this process": 1,
            "dead": 7,
        }
    finally:
        app.dq.buffer.close(0.1)


def test_without_a_folder_it_reports_it() -> None:
    app = make_app("dq-redis://127.0.0.1:1/0", None)
    assert "dq_buffer_folder is not set" in run(app, status=1).output
    assert "dq_buffer_folder is not set" in run(app, "replay", status=1).output
    assert "dq_buffer_folder is not set" in run(app, "quarantine", status=1).output
    assert json.loads(run(app, "list", "--json").stdout)["folder"] is None
