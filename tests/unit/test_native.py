"""Native threads beside the greenlets of gevent and eventlet."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Greenlets and a native thread log at the same time. It prints how many lines were logged.
PROGRAM = """
import {library} as library
{patch}
import logging, sys
from celery_dq.native import start_thread, unpatched

lines = []
class Lists(logging.Handler):
    def emit(self, record):
        unpatched("time", "sleep")(0.0002)
        lines.append(record.getMessage())

sys.setswitchinterval(1e-5)
logging.basicConfig(handlers=[Lists()], level=logging.INFO)
ended = unpatched("_thread", "allocate_lock")()
ended.acquire()

def log(times):
    for each in range(times):
        logging.getLogger(f"other.{{each}}").info("line %d", each)
        library.sleep(0)

def log_outside(times):
    for each in range(times):
        logging.getLogger(f"native.{{each}}").info("line %d", each)
    ended.release()

def beside():
    while True:
        library.sleep(0.001)

library.spawn(beside)  # as in a worker, whose loop never waits for a lock only
start_thread(log_outside, 300)
greenlets = [library.spawn(log, 100) for _ in range(3)]
for each in greenlets:
    {join}
while not ended.acquire(False):
    library.sleep(0.001)
print(len(lines))
"""


@pytest.mark.parametrize(
    ("library", "patch", "join"),
    [
        ("gevent", "import gevent.monkey; gevent.monkey.patch_all()", "each.join()"),
        ("eventlet", "library.monkey_patch()", "each.wait()"),
    ],
)
def test_a_native_thread_and_greenlets_log_at_the_same_time(library: str, patch: str, join: str) -> None:
    program = PROGRAM.format(library=library, patch=patch, join=join)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.split() == ["600"]
    assert "Traceback" not in ran.stderr
