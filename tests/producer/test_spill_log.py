from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from celery_dq.errors import SpillFailed
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.spill_log import Segment, SpillLog, lock_file

ROOT = Path(__file__).parents[2]
PRODUCER = b"p" * 16


def log_of(root: Path, process: str) -> SpillLog:
    """Return a spill log with the name of another process."""
    log = SpillLog(root)
    log.process = process
    return log


def left_behind(root: Path) -> list[BufferedMessage]:
    """Adopt, read and remove all messages."""
    records: list[BufferedMessage] = []
    log = log_of(root, "adopter")
    for orphan in log.orphans():
        for segment in orphan.segments():
            records += log.read(segment) or ()
            segment.unlink()
        orphan.close()
    return records


class Child:
    """A process that runs a program, prints a line, and waits for its end."""

    def __init__(self, program: str, *args: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, args)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        with self.process as process:
            process.kill()


def orphans_of_another_process(root: Path) -> int:
    """Return how many folders another process adopts."""
    program = "import sys\nfrom pathlib import Path\nfrom celery_dq.producer.spill_log import SpillLog\n"
    child = Child(program + "print(len(list(SpillLog(Path(sys.argv[1])).orphans())))", root)
    found = int(child.line())
    child.kill()
    return found


WRITER = """
import sys
from pathlib import Path
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.spill_log import SpillLog
log = SpillLog(Path(sys.argv[1]))
segment = log.create(b"p" * 16, "lane")
for sequence in range(int(sys.argv[2])):
    segment.append(BufferedMessage(sequence, b"", b"message %d" % sequence))
print(log.folder, flush=True)
sys.stdin.read()
"""


def test_a_dead_process_leaves_all_it_wrote_and_a_living_one_is_let_alone(tmp_path: Path) -> None:
    writer = Child(WRITER, tmp_path, 100)
    folder = Path(writer.line())
    assert left_behind(tmp_path) == []
    writer.kill()
    records = left_behind(tmp_path)
    assert [(each.sequence, each.payload) for each in records] == [
        (sequence, b"message %d" % sequence) for sequence in range(100)
    ]
    assert not folder.exists()


def test_a_fork_that_outlives_its_parent_does_not_keep_the_folder(tmp_path: Path) -> None:
    program = WRITER.replace(
        "print(log.folder, flush=True)\n",
        "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint(log.folder, flush=True)\n",
    )
    writer = Child(program, tmp_path, 3)
    writer.line()
    pid = writer.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    try:
        writer.kill()
        assert len(left_behind(tmp_path)) == 3
    finally:
        os.kill(int(children[0]), signal.SIGKILL)


def test_own_folders_are_never_opened_for_adoption(tmp_path: Path) -> None:
    first, second = SpillLog(tmp_path), SpillLog(tmp_path)
    segment = first.create(PRODUCER, "lane")
    segment.append(BufferedMessage(1, b"", b"x"))
    assert list(second.orphans()) == []
    assert first.intact()
    # The lock still excludes other processes.
    assert orphans_of_another_process(tmp_path) == 0
    segment.unlink()
    first.close()
    assert first.owners() == []


def test_a_lost_folder_is_noticed_and_a_new_one_begun(tmp_path: Path) -> None:
    log = SpillLog(tmp_path)
    log.create(PRODUCER, "lane")
    assert log.intact()
    assert log.folder is not None
    # Another file with the name of the lock is not the lock.
    (log.folder / "lock").rename(log.folder / "old")
    (log.folder / "lock").touch()
    assert not log.intact()
    (log.folder / "lock").unlink()
    assert not log.intact()
    shutil.rmtree(log.folder)
    assert not log.intact()
    with pytest.raises(SpillFailed):
        log.create(PRODUCER, "lane")
    log.forsake()
    log.create(PRODUCER, "lane").append(BufferedMessage(1, b"", b"x"))
    assert log.intact()


def test_a_forsaken_folder_is_adopted_by_another_process_only(tmp_path: Path) -> None:
    """A clean-up job has removed the lock file and not yet the segment, whose messages are in memory."""
    log = SpillLog(tmp_path)
    log.create(PRODUCER, "lane").append(BufferedMessage(1, b"", b"x"))
    assert log.folder is not None
    (log.folder / "lock").unlink()
    assert not log.intact()
    log.forsake()
    assert list(log.orphans()) == []
    assert orphans_of_another_process(tmp_path) == 1


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_folders_that_were_removed_keep_no_descriptors(tmp_path: Path) -> None:
    log, before = SpillLog(tmp_path), descriptors()
    for _ in range(3):
        segment = log.create(PRODUCER, "lane")
        assert log.folder is not None
        shutil.rmtree(log.folder)
        log.forsake()
        segment.seal()
    assert descriptors() == before


def test_a_forked_child_closes_the_descriptors_of_the_folder(tmp_path: Path) -> None:
    child = Child(
        "import os, sys\nfrom pathlib import Path\nfrom celery_dq.producer.spill_log import SpillLog\n"
        "log, before = SpillLog(Path(sys.argv[1])), os.listdir('/proc/self/fd')\n"
        "log.create(b'p' * 16, 'lane').seal()\n"
        "if not os.fork():\n"
        "    log.forsake()\n"
        "    print(len(os.listdir('/proc/self/fd')) - len(before), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()",
        tmp_path,
    )
    assert child.line() == "0"
    child.kill()


def test_files_are_ours_alone(tmp_path: Path) -> None:
    log = SpillLog(tmp_path / "spill")
    segment = log.create(PRODUCER, "lane")
    assert log.folder is not None
    assert [each.stat().st_mode & 0o777 for each in (log.root, log.folder, log.folder / "lock")] == [
        0o700,
        0o700,
        0o600,
    ]
    assert segment.path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_record_is_kept_apart_and_the_rest_is_read(tmp_path: Path) -> None:
    log = log_of(tmp_path, "one")
    segment = log.create(PRODUCER, "lane")
    for sequence in range(10):
        segment.append(BufferedMessage(sequence, b"", b"x" * 20))
    with segment.path.open("r+b") as file:
        file.seek(-90, os.SEEK_END)  # within the eighth record
        file.write(b"\0\0\0")
    broken = log.create(PRODUCER, "lane")
    broken.append(BufferedMessage(10, b"", b"y"))
    broken.path.write_bytes(b"no segment")
    log.create(PRODUCER, "lane").append(BufferedMessage(11, b"", b"z"))
    empty = log.create(PRODUCER, "lane")
    empty.path.write_bytes(b"")
    log._drop_lock()
    assert [each.sequence for each in left_behind(tmp_path)] == [0, 1, 2, 3, 4, 5, 6, 8, 9, 11]
    sizes = [10, segment.header_size + 37]
    assert sorted(path.stat().st_size for path in log.quarantined_files()) == sizes
    assert log.usage() == sum(sizes)


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    """With a limit on the size of files, the last write is incomplete."""
    program = """
import resource, signal, sys
from pathlib import Path
from celery_dq.errors import SpillFailed
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.spill_log import SpillLog
log = SpillLog(Path(sys.argv[1]))
segment = log.create(b"p" * 16, "lane")
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
sequence = 0
while True:
    try:
        segment.append(BufferedMessage(sequence, b"", b"x" * 333))
    except SpillFailed as error:
        assert "could be written" in str(error), error
        break
    sequence += 1
try:
    segment.append(BufferedMessage(sequence, b"", b"x" * 333))
    raise AssertionError("still full")
except SpillFailed:
    pass
assert not segment.torn
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
segment.append(BufferedMessage(sequence, b"", b"there is room again"))
print(sequence, flush=True)
"""
    writer = Child(program, tmp_path)
    count = int(writer.line())
    writer.kill()
    assert count > 20
    records = left_behind(tmp_path)
    assert [each.sequence for each in records] == list(range(count + 1))
    assert records[-1].payload == b"there is room again"
    assert SpillLog(tmp_path).quarantined_files() == []


def redirect(segment: Segment, path: str) -> None:
    """Replace the file of a segment's descriptor by another file."""
    fd = os.open(path, os.O_RDWR)
    os.dup2(fd, segment.fd)
    os.close(fd)


def test_no_space_at_all_is_reported(tmp_path: Path) -> None:
    segment = log_of(tmp_path, "one").create(PRODUCER, "lane")
    segment.append(BufferedMessage(0, b"", b"kept"))
    redirect(segment, "/dev/full")
    with pytest.raises(SpillFailed, match="No space left"):
        segment.append(BufferedMessage(1, b"", b"lost"))
    assert segment.torn  # a device cannot be cut back


def test_a_failed_sync_is_reported(tmp_path: Path) -> None:
    segment = log_of(tmp_path, "one").create(PRODUCER, "lane")
    segment.append(BufferedMessage(0, b"", b"kept"))
    segment.sync()
    segment.append(BufferedMessage(1, b"", b"in doubt"))
    redirect(segment, "/dev/null")
    with pytest.raises(OSError, match="Invalid argument"):
        segment.sync()


class Disk(RuleBasedStateMachine):
    """Two processes write, deliver, die and adopt; a list has the expected messages."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.sequence = 0
        self.serial = 0
        self.alive: dict[int, tuple[SpillLog, list[Segment]]] = {}
        self.expected: dict[Path, list[int]] = {}
        self.dead: set[Path] = set()

    @rule(who=st.integers(0, 1), lane=st.sampled_from(["a", "b"]))
    def create(self, who: int, lane: str) -> None:
        if who not in self.alive:
            self.serial += 1
            self.alive[who] = (log_of(self.root, f"process{self.serial}"), [])
        log, segments = self.alive[who]
        segment = log.create(PRODUCER, lane)
        segments.append(segment)
        self.expected[segment.path] = []

    @rule(data=st.data(), payload=st.binary(max_size=30))
    def append(self, data: Any, payload: bytes) -> None:
        segment = self.one(data)
        if segment is not None:
            self.sequence += 1
            segment.append(BufferedMessage(self.sequence, b"", payload))
            self.expected[segment.path].append(self.sequence)
            assert [each.sequence for each in segment.read().messages] == self.expected[segment.path]

    @rule(data=st.data())
    def deliver(self, data: Any) -> None:
        segment = self.one(data)
        if segment is not None:
            segment.empty()
            self.expected[segment.path] = []

    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        segment = self.one(data)
        if segment is not None:
            segment.unlink()
            del self.expected[segment.path]
            for _, segments in self.alive.values():
                if segment in segments:
                    segments.remove(segment)

    @rule(who=st.integers(0, 1))
    def die(self, who: int) -> None:
        if who in self.alive:
            log, segments = self.alive.pop(who)
            for segment in segments:
                self.dead.add(segment.path)
                segment.seal()
            log._drop_lock()

    @rule(who=st.integers(0, 1))
    def leave(self, who: int) -> None:
        if who in self.alive:
            log, segments = self.alive.pop(who)
            for segment in segments:
                segment.seal()
                self.dead.add(segment.path)
            log.close()

    @precondition(lambda self: self.dead)
    @rule(cut=st.booleans())
    def adopt(self, cut: bool) -> None:
        # A lock does not exclude the process that holds it, so no other writer may be alive.
        self.die(0)
        self.die(1)
        if cut:  # the last write of a dead process is incomplete
            victim = min(self.dead)
            size = victim.stat().st_size
            if self.expected[victim]:
                os.truncate(victim, size - 1)
                self.expected[victim].pop()
        adopter = log_of(self.root, f"adopter{self.serial}")
        found: dict[Path, list[int]] = {}
        for orphan in adopter.orphans():
            for segment in orphan.segments():
                found[segment.path] = [each.sequence for each in segment.read().messages]
                segment.unlink()
            orphan.close()
        assert found == {path: self.expected[path] for path in self.dead}
        for path in self.dead:
            del self.expected[path]
        self.dead.clear()

    def one(self, data: Any) -> Segment | None:
        segments = [segment for _, owned in self.alive.values() for segment in owned]
        return data.draw(st.sampled_from(segments)) if segments else None

    def teardown(self) -> None:
        for log, segments in self.alive.values():
            for segment in segments:
                segment.seal()
            log._drop_lock()
        shutil.rmtree(self.root)


def test_the_files_hold_the_same_records_as_a_list() -> None:
    run_state_machine_as_test(Disk, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_a_folder_whose_process_died_while_it_made_it_goes(tmp_path: Path) -> None:
    (tmp_path / "1.2.3-nothing").mkdir()
    with_lock = tmp_path / "1.2.3-lock"
    with_lock.mkdir()
    (with_lock / "lock").touch()
    assert left_behind(tmp_path) == []
    assert SpillLog(tmp_path).owners() == []


def test_files_of_the_user_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "today.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    assert left_behind(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


def open_below(folder: Path) -> list[str]:
    """Return the open files of this process below a folder. Threads of other tests may open other ones."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or one that was closed meanwhile
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in names if name.startswith(str(folder))]


def test_a_lock_file_that_is_replaced_while_it_is_locked_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.touch()
    locked = fcntl.lockf

    def replaced_meanwhile(fd: int, how: int) -> None:
        # Its owner removed the folder, and another process made one with this name.
        path.unlink()
        path.touch()
        locked(fd, how)

    monkeypatch.setattr(fcntl, "lockf", replaced_meanwhile)
    assert lock_file(path) is None
    assert open_below(tmp_path) == []
    monkeypatch.undo()
    assert lock_file(path) is not None
