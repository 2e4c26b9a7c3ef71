"""The spill log trusts only files and folders that no other user can change, and follows no link."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_dq.app.api.buffer import quarantined_files, survey
from celery_dq.errors import ConfigurationError, SpillFailed
from celery_dq.per_process import start_of
from celery_dq.probe import ProbeState, ask_probe
from celery_dq.producer.segment_index import SegmentIndex
from celery_dq.producer.spill_log import SpillLog, make_folder, process_name
from tests.producer.producer_harness import ProducerHarness, arrived, put
from tests.producer.test_adoption import abandoned
from tests.producer.test_spill_log import PRODUCER, Child

Fault = Callable[[Path, pytest.MonkeyPatch], None]


def group_writable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWGRP)


def writable_by_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12_345, -1)
    else:  # only root can give a file away
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)


def link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    os.mkfifo(path)


SENTENCES: dict[Fault, str] = {
    group_writable: "other users may write to .*chmod go-w",
    writable_by_all: "other users may write to .*chmod go-w",
    of_another_user: "belongs to user id",
    link: "Too many levels of symbolic links|Not a directory",
    pipe: "is not a file",
}
OF_OTHERS = [group_writable, writable_by_all, of_another_user]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a broker, as in ``dq_buffer_folder/<broker>``."""
    made = tmp_path / "shop" / "spill" / "broker"
    make_folder(made)
    return made


@pytest.mark.parametrize(
    ("level", "fault"),
    [*(("broker", fault) for fault in [*OF_OTHERS, link]), *(("spill", fault) for fault in OF_OTHERS)],
)
def test_a_folder_that_others_can_change_is_an_error_of_the_first_call(
    folder: Path, level: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(folder)  # another user may have planted it
    fault(folder if level == "broker" else folder.parent, monkeypatch)
    harness = ProducerHarness(folder)
    with pytest.raises(ConfigurationError, match=SENTENCES[fault]):
        harness.producer().start()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        put(harness.producer(), 1)
    assert arrived(harness, "lane") == []


def test_a_folder_that_all_users_can_replace_is_an_error(folder: Path) -> None:
    top = folder.parent.parent
    top.chmod(0o777)
    with pytest.raises(SpillFailed, match=f"other users may write to {top} "):
        SpillLog(folder).create(PRODUCER, "lane")
    top.chmod(0o1777)  # as /tmp
    SpillLog(folder).create(PRODUCER, "lane").unlink()


def test_missing_folders_are_made_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        make_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in [tmp_path / "a", *(tmp_path / "a").glob("**/*")]}
    assert modes == {0o700}


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        *(("broker", fault) for fault in [*OF_OTHERS, link]),
        *(("process", fault) for fault in OF_OTHERS),
        *(("file", fault) for fault in [*OF_OTHERS, link, pipe]),
    ],
)
def test_messages_that_others_may_have_planted_are_not_adopted(
    folder: Path,
    place: str,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trusted, planted = abandoned(folder), abandoned(folder)
    (file,) = planted.glob("*.seg")
    fault({"broker": folder, "process": planted, "file": file}[place], monkeypatch)
    index = SegmentIndex(SpillLog(folder), 1_000_000)
    for _ in range(3):
        found = index.look_for_orphans()
        every = fault is of_another_user and os.geteuid() != 0  # then no file is this user's
        assert [orphan.folder for orphan, _ in found] == [trusted] * (place != "broker" and not every)
        for orphan, _ in found:
            orphan.close()
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record.__dict__["event"] == "spill_unreadable_began"
    assert re.search(SENTENCES[fault], record.getMessage())


def test_a_linked_folder_of_a_process_is_not_looked_into(folder: Path, tmp_path: Path) -> None:
    planted = abandoned(folder)
    planted.rename(tmp_path / "elsewhere")
    planted.symlink_to(tmp_path / "elsewhere")
    assert SegmentIndex(SpillLog(folder), 1_000_000).look_for_orphans() == []
    assert len(list((tmp_path / "elsewhere").glob("*.seg"))) == 1


def test_the_folder_is_the_one_that_was_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder takes the name of an orphan after the check."""
    orphan_folder, planted = abandoned(folder), abandoned(folder)
    (file,) = planted.glob("*.seg")
    content = file.read_bytes().replace(b"lane", b"evil")
    log = SpillLog(folder)
    (orphan,) = [each for each in log.orphans() if each.folder == orphan_folder]
    orphan_folder.rename(folder / "moved")
    planted.rename(orphan_folder)
    (orphan_folder / file.name).write_bytes(content)
    (segment,) = orphan.segments()
    assert segment.header.lane == "lane"
    segment.unlink()
    assert (orphan_folder / file.name).exists()
    orphan.close()


def test_nothing_is_written_through_a_link_to_a_quarantine(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    (folder / "quarantine").symlink_to(tmp_path / "elsewhere")
    damaged = abandoned(folder) / "ffffffffffffffff.seg"
    damaged.write_bytes(b"no segment")
    damaged.chmod(0o600)
    log = SpillLog(folder)
    for orphan in log.orphans():
        orphan.segments()
        orphan.close()
    with pytest.raises(OSError, match="symbolic link|Not a directory"):
        log.copy_to_quarantine("rejected", b"x")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert damaged.exists()


@pytest.mark.parametrize("fault", [link, pipe])
def test_a_survey_neither_follows_links_nor_waits_for_pipes(
    folder: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = abandoned(folder)
    (file,) = process.glob("*.seg")
    quarantined = folder / "quarantine" / "one.bad"
    quarantined.parent.mkdir(0o700)
    shutil.copy(file, quarantined)
    for path in (file, quarantined):
        fault(path, monkeypatch)
    assert survey(folder).pending == 0
    problems = {each.name: each.problem for each in quarantined_files(folder)}
    assert re.search(SENTENCES[fault], problems["one.bad"])


# -- whose folder it is

OTHER_PROCESS = """
import sys
from pathlib import Path
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.spill_log import SpillLog
log = SpillLog(Path(sys.argv[1]))
log.process = sys.argv[2]
log.create(b"p" * 16, "lane").append(BufferedMessage(0, b"", b"x"))
print(log.folder, flush=True)
sys.stdin.read()
"""


def test_a_dead_process_with_the_name_of_this_one_is_not_this_one(tmp_path: Path) -> None:
    """In a container each process has pid 1, and may have the same start time."""
    before = Child(OTHER_PROCESS, tmp_path, process_name())
    folder = Path(before.line())
    assert list(SpillLog(tmp_path).orphans()) == []  # it lives
    before.kill()
    log = SpillLog(tmp_path)
    log.create(PRODUCER, "lane")
    assert log.folder is not None
    assert {each.name: each.state for each in survey(tmp_path).owners} == {
        folder.name: "dead",
        log.folder.name: "this process",
    }
    (orphan,) = log.orphans()
    assert orphan.folder == folder
    (segment,) = orphan.segments()
    segment.unlink()
    orphan.close()
    assert [each.name for each in survey(tmp_path).owners] == [log.folder.name]


# -- the file of the probes


def state(worker: str = "w1") -> ProbeState:
    return ProbeState(worker, os.getpid(), "connecting", 0.0, started=start_of(os.getpid()))


def test_the_file_of_a_probe_replaces_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    probe = tmp_path / "probe"
    probe.symlink_to(precious)
    # The name of the file beside it as it was, which another user could know.
    for name in (f"probe.{os.getpid()}.{threading.get_ident()}",):
        (tmp_path / name).symlink_to(precious)
    state().write(probe)
    assert precious.read_text() == "content"
    assert not probe.is_symlink()
    assert ask_probe("alive", probe).ok
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("fault", [group_writable, writable_by_all, link, pipe])
def test_the_file_of_a_probe_that_others_can_change_is_no_answer(
    tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = tmp_path / "probe"
    state().write(probe)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() or 12_345)
    fault(probe, monkeypatch)
    answer = ask_probe("alive", probe)
    assert not answer.ok
    assert re.search(SENTENCES[fault], answer.reason)
