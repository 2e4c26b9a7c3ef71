"""``python -m tests.celery_suite --celery CHECKOUT``: Celery's own integration suite over two brokers.

The program runs ``t/integration`` of a checkout (or an unpacked sdist) of Celery with the installed Celery,
over Celery's Redis transport and over ``dq-redis://``, each in one process with its own Redis. A test that
passes over the first broker only is run again over both, and is printed if it differs again. The exit status
is 1 if such a test has no known reason.

The suite needs further packages: ``pip install celery[sqlalchemy,auth,yaml,msgpack] pydantic freezegun
pytest-celery pytest-rerunfailures pytest-subtests pytest-timeout``, and ``azure-storage-blob`` for one file.

Examples::

    python -m tests.celery_suite --celery ../celery
    python -m tests.celery_suite --celery ../celery -k test_canvas
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import celery

from celery_dq.testing.servers import RedisServer
from tests.celery_suite.plugin import OPTION, Outcome, has_ended, read_outcomes
from tests.celery_suite.verdict import Verdict

ROOT = Path(__file__).parents[2]
STOCK, OURS = "redis", "dq-redis"
#: Seconds that one test may take before pytest-timeout ends it, and before the process is killed.
TEST_TIMEOUT_S = 300
SILENCE_S = 450


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.celery_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--celery", type=Path, required=True, help="a checkout of Celery")
    parser.add_argument("-k", default="", dest="expression", help="only these tests, as pytest's -k")
    parser.add_argument("--again", type=int, default=2, help="times that a difference is run again")
    parser.add_argument("--out", type=Path, help="folder for the records and logs; default a temporary one")
    options = parser.parse_args(arguments)
    suite = options.celery / "t" / "integration"
    if not suite.is_dir():
        parser.error(f"--celery {options.celery}: there is no folder {suite}; give a checkout of Celery")
    _log(f"suite of Celery {_version(options.celery)}, run with Celery {celery.__version__}")
    out = options.out or Path(tempfile.mkdtemp(prefix="celery-suite-"))
    out.mkdir(parents=True, exist_ok=True)
    verdict = Verdict(*_run_both(options.celery, out, options.expression))
    for attempt in range(1, options.again + 1):
        if not verdict.faults:
            break
        _log(f"{len(verdict.faults)} differences, which are run again:")
        again = _run_both(options.celery, out / f"again-{attempt}", only=verdict.faults)
        verdict = verdict.after_another_run(*again)
    print(verdict)
    return 1 if verdict.faults else 0


def _run_both(
    checkout: Path, out: Path, expression: str = "", only: Sequence[str] = ()
) -> list[dict[str, Outcome]]:
    """Run the suite over both brokers at the same time, because most of its tests wait."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda scheme: _run(checkout, out, scheme, expression, only), (STOCK, OURS)))


def _run(checkout: Path, out: Path, scheme: str, expression: str, only: Sequence[str]) -> dict[str, Outcome]:
    """Run the suite over one broker, again after each hang, and return the outcomes."""
    out.mkdir(parents=True, exist_ok=True)
    record = (out / f"{scheme}.jsonl").resolve()
    record.unlink(missing_ok=True)
    log = out / f"{scheme}.log"
    with tempfile.TemporaryDirectory(prefix="celery-suite-") as folder, RedisServer() as server:
        # A copy without Celery itself, so that the suite imports the Celery that is installed.
        shutil.copytree(checkout / "t", Path(folder) / "t")
        shutil.copy(checkout / "pyproject.toml", folder)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.celery_suite.plugin",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-p", "celery.contrib.pytest", "--continue-on-collection-errors"]
        command += [OPTION, str(record), "-q", "-o", "addopts=", f"--timeout={TEST_TIMEOUT_S}"]
        command += ["-k", expression] if expression else []
        command += only or ["t/integration"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), folder]),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "TEST_BROKER": server.url(scheme=scheme),
            "TEST_BACKEND": server.url(1),
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(server.port),
        }
        while True:
            before = len(read_outcomes(record))
            _watch(command, Path(folder), environment, record, log)
            if has_ended(record):
                break
            if len(read_outcomes(record)) == before:
                raise SystemExit(f"pytest ended without running a test:\n{log.read_text()[-4000:]}")
    outcomes = read_outcomes(record)
    _log(f"{scheme}: {len(outcomes)} tests, log in {log}")
    return outcomes


def _watch(command: list[str], folder: Path, environment: dict[str, str], record: Path, log: Path) -> None:
    """Run pytest to its end, or kill it when it has not written for too long."""
    with log.open("a") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while True:
                size = record.stat().st_size if record.exists() else 0
                try:
                    process.wait(SILENCE_S)
                    return
                except subprocess.TimeoutExpired:
                    if not record.exists() or record.stat().st_size == size:
                        return
        finally:
            # This kills also the pool of its worker and the workers that tests started.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _version(checkout: Path) -> str:
    found = re.search(r"^__version__ = '(.+)'", (checkout / "celery" / "__init__.py").read_text(), re.M)
    return found[1] if found else "?"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
