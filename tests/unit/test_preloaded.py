from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from celery_dq.testing.waiting import wait_until
from tests.preloaded import PythonFork, run_python


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["no-such-command"], 2)])
def test_a_fork_ends_with_the_exit_code_of_the_command(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    log = tmp_path / "log"
    fork = PythonFork(["-m", "celery", *arguments], os.environ, log)
    assert fork.wait(30) == fork.poll() == code
    fork.kill()  # does nothing after the end
    assert log.read_text()


PROGRAM = "import neighbour, sys; print(__name__, sys.argv[1:], neighbour.WORD); sys.exit('wrong')"


@pytest.mark.parametrize("words", [["-c", PROGRAM], ["-m", "program"], ["program.py"]])
def test_a_program_runs_as_python_runs_it(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python(*words, "a", "b", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "__main__ ['a', 'b'] found\n", "wrong\n")


def test_a_fork_has_the_given_environment_and_a_session_and_is_killed(tmp_path: Path) -> None:
    app = tmp_path / "blocking.py"
    app.write_text(
        "import os\nprint(os.environ['GIVEN'], os.getsid(0), flush=True)\nos.read(os.pipe()[0], 1)\n"
    )
    log = tmp_path / "log"
    fork = PythonFork(["blocking.py"], {**os.environ, "GIVEN": "given"}, log, folder=tmp_path)
    wait_until(lambda: log.exists() and log.read_text() == f"given {fork.pid}\n")
    assert fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0)
    fork.kill()
    assert fork.wait(30) == -signal.SIGKILL
