"""What lies in the folder of the buffered producers, whoever put it there.

Lock files are not touched: to open one that this process holds, and to close it again, would end the lock.
Whether an owner lives is told by its name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from celery_dq.errors import CorruptSegment
from celery_dq.producer.segment import read_header, scan
from celery_dq.producer.spill_log import SUFFIX, SpillLog, process_name

__all__ = ["Owner", "Spill", "survey"]

OwnerState: TypeAlias = Literal["this process", "alive", "dead", "elsewhere"]


@dataclass(frozen=True)
class Owner:
    """The folder of one process.

    :param name: of the folder.
    :param state: of the process that made it; ``elsewhere`` is another machine or container. What a dead one
        left is sent by any other process of the app, or by ``celery dq spill replay``.
    :param pending: messages in its files. Of a file whose end is not sent yet all count.
    :param bytes: of its files.
    :param age_s: seconds since the oldest of them was written to.
    :param damaged: files of which only the beginning can be read, or nothing.
    """

    name: str
    state: OwnerState
    pending: int
    bytes: int
    age_s: float
    damaged: int


@dataclass(frozen=True)
class Spill:
    """The folder of an app's buffered messages.

    :param folder: its path; None when messages are in memory only.
    :param pending: messages in it.
    :param bytes: of their files.
    :param age_s: seconds since the oldest file was written to.
    :param owners: one per process.
    :param quarantined: files with what could not be read or was refused.
    """

    folder: Path | None
    pending: int
    bytes: int
    age_s: float
    owners: tuple[Owner, ...]
    quarantined: tuple[Path, ...]


def survey(folder: Path | None) -> Spill:
    """Look at everything below `folder`. Costs reading all of it."""
    if folder is None:
        return Spill(None, 0, 0, 0.0, (), ())
    log = SpillLog(folder)
    owners = tuple(_look_at(folder / name) for name in log.owners())
    return Spill(
        folder,
        sum(owner.pending for owner in owners),
        sum(owner.bytes for owner in owners),
        max((owner.age_s for owner in owners), default=0.0),
        owners,
        tuple(log.quarantined_files()),
    )


def _look_at(folder: Path) -> Owner:
    pending = size = damaged = 0
    oldest = now = time.time()
    for data, written_at in _files(folder):
        size += len(data)
        try:
            _, start, seed = read_header(data)
        except CorruptSegment:
            damaged += bool(data)
            continue
        found = scan(data, start, seed)
        if found.records:
            pending += len(found.records)
            oldest = min(oldest, written_at)
        # The last record of a file that is being written may not be whole yet.
        damaged += bool(found.problem)
    return Owner(folder.name, _state_of(folder.name), pending, size, max(now - oldest, 0.0), damaged)


def _files(folder: Path) -> Iterator[tuple[bytes, float]]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError):  # it is sent, and gone
            yield path.read_bytes(), path.stat().st_mtime


def _state_of(name: str) -> OwnerState:
    process = name.partition("-")[0]
    ours = process_name()
    if process == ours:
        return "this process"
    pid, _, rest = process.partition(".")
    started, _, host = rest.rpartition(".")
    if host != ours.rpartition(".")[2] or not pid.isdecimal():
        return "elsewhere"
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return "dead"
    except OSError:
        pass  # there is one, of somebody else
    with suppress(OSError, IndexError):
        # The number may have been given to another process since.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[19] != started or fields[0] in "ZX":
            return "dead"
    return "alive"
