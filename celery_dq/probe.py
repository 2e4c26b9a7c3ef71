"""Whether a worker lives, and whether it is ready, by the file that it keeps (``dq_probe_file``).

``celery dq alive`` and ``celery dq ready`` ask no broker and no worker. ``python -m celery_dq.probe alive
FILE`` does the same without loading the app, which costs more than the question. The output is one sentence,
the exit status 0 or 1.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from celery_dq.clock import Clock, SystemClock
from celery_dq.per_process import start_of
from celery_dq.private_files import read_file

__all__ = ["ProbeAnswer", "ProbeState", "WITHIN_S", "ask_probe"]

#: Seconds for which the main loop may be silent, by default.
WITHIN_S = 30.0

Phase: TypeAlias = Literal["connecting", "consuming", "stopping"]
Question: TypeAlias = Literal["alive", "ready"]


@dataclasses.dataclass(frozen=True)
class ProbeState:
    """The content of the file. Times are monotonic seconds of this machine, suspend included.

    Attributes:
        worker: Name of the worker.
        pid: Its main process.
        phase: ``connecting`` also after the connection was lost; ``stopping`` until the last task has ended.
        turned_at: When the main loop turned last.
        answered_at: When the broker confirmed the leases last; None on a broker without leases.
        lease_s: Seconds after which the broker gives the messages of a silent worker to others; 0 without.
        started: The start of the process, as `start_of` returns it: a restarted container has the same pid.
    """

    worker: str
    pid: int
    phase: Phase
    turned_at: float
    answered_at: float | None = None
    lease_s: float = 0.0
    started: str = ""

    @classmethod
    def read(cls, path: Path) -> ProbeState:
        """Return the state that a worker has written last.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is no such file.
            TypeError: It is no such file.
        """
        data = read_file(path, is_trusted=os.geteuid() != 0)
        return cls(**json.loads(data))

    def write(self, path: Path) -> None:
        """Replace the file in one step, so that no reader sees a part of it.

        Raises:
            OSError: The file cannot be written.
        """
        # Another thread may write, too, and another user may know the name of the process.
        beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(self), file)
            beside.replace(path)
        except OSError:
            beside.unlink()
            raise


@dataclasses.dataclass(frozen=True)
class ProbeAnswer:
    """An answer.

    Attributes:
        ok: Whether it is yes.
        reason: One sentence.
    """

    ok: bool
    reason: str


def ask_probe(
    question: Question, path: Path, *, within_s: float = WITHIN_S, clock: Clock | None = None
) -> ProbeAnswer:
    """Answer from the file of a worker.

    Args:
        question: ``alive``: its main loop turns, or it connects, or it stops. ``ready``: it consumes, and the
            broker answers.
        path: The file.
        within_s: Seconds for which the main loop may be silent.
        clock: The clock of this machine.
    """
    try:
        state = ProbeState.read(path)
        now = (clock or SystemClock()).monotonic()
        silent_s = now - state.turned_at
    except FileNotFoundError:
        return ProbeAnswer(False, f"No worker runs: there is no file {path}. Is dq_probe_file set?")
    except (OSError, ValueError, TypeError) as exc:
        return ProbeAnswer(False, f"The file {path} cannot be read: {exc}")
    if not _runs(state.pid):
        return ProbeAnswer(False, f"Worker {state.worker} is gone: process {state.pid} does not exist.")
    if state.started != start_of(state.pid):
        return ProbeAnswer(False, f"Worker {state.worker} is gone: process {state.pid} is another one.")
    if state.phase == "connecting":
        return ProbeAnswer(question == "alive", f"Worker {state.worker} connects to its broker.")
    if state.phase == "stopping":
        return ProbeAnswer(question == "alive", f"Worker {state.worker} stops after its running tasks.")
    # A negative age is a file from before a restart of the machine.
    if not 0 <= silent_s <= within_s:
        return ProbeAnswer(
            False,
            f"The main loop of worker {state.worker} has not turned for {silent_s:.0f} s (limit "
            f"{within_s:g} s).",
        )
    if question == "ready" and state.answered_at is not None and now - state.answered_at > state.lease_s:
        return ProbeAnswer(
            False,
            f"The broker has not answered worker {state.worker} for {now - state.answered_at:.0f} s.",
        )
    return ProbeAnswer(True, f"Worker {state.worker} consumes; its main loop turned {silent_s:.0f} s ago.")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists, and belongs to another user
    return True


def main(arguments: Sequence[str]) -> int:
    """Run ``alive FILE [SECONDS]`` or ``ready FILE [SECONDS]``; return the exit status."""
    question, *rest = arguments or [""]
    try:
        if question not in ("alive", "ready") or len(rest) not in (1, 2):
            raise ValueError
        within_s = float(rest[1]) if len(rest) > 1 else WITHIN_S
    except ValueError:
        print("usage: python -m celery_dq.probe alive|ready FILE [SECONDS]", file=sys.stderr)
        return 2
    answer = ask_probe("alive" if question == "alive" else "ready", Path(rest[0]), within_s=within_s)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The exit status is the answer, whatever the terminal can show.
        sys.stdout.reconfigure(errors="backslashreplace")
    print(answer.reason)
    return int(not answer.ok)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
