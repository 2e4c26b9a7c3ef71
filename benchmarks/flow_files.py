"""The own files that one call runs through, and one message, in the order of their first use.

A reader who wants to follow a call or a message reads these files. Each flow is recorded in a steady state,
one call or message at a time. A message is recorded in the main and the consumer thread of a worker, which is
a process of its own: ``python -m benchmarks.flow_files URL ACKS AMOUNT``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import celery_dq
from benchmarks.buffering import flush, shop
from benchmarks.measure import Report, benchmark, short
from benchmarks.shop import NAME, quiet_worker
from benchmarks.workers import app_of, await_end, settings
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis.consuming.consumer_thread import ConsumerThread
from tests.brokers import BROKERS
from tests.workers import ROOT

PACKAGE = f"{Path(celery_dq.__file__).parent}{os.sep}"
#: Way of the app -> name of the flow -> options of its calls.
CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "buffered": {"buffered call": {}, "buffered call with own headers": {"headers": {"trace": "1"}}},
    "dq": {"direct call": {}, "direct call with own headers": {"headers": {"trace": "1"}}},
}
ACKS = {"early": "message, early ack", "late": "message, late ack"}


@benchmark(
    "flow | file | function calls",
    """
    in the order of first use; function calls per call or message, one at a time
    call: the calling thread; message: the main and the consumer thread of a prefork worker
    """,
)
def flow_files(report: Report, quick: bool) -> None:
    """Count the files of celery-dq that a call or a message runs through, and the function calls in each."""
    amount = 50 if quick else 500
    flows: dict[str, dict[str, float]] = {}
    with RedisServer() as server:
        for way, calls in CALLS.items():
            with shop(way, server) as task:
                for flow, options in calls.items():
                    flows[flow] = files_of_calls(task, options, amount)
    for acks, flow in ACKS.items():
        with RedisServer() as server:
            flows[flow] = files_of_messages(BROKERS["dq"].url(server.port), acks, amount)
    for flow, files in flows.items():
        report.row(flow, f"{len(files)} files", short(sum(files.values())))
        for file, count in files.items():
            report.row("", file, short(count))
    report.data = {flow: {"files": len(files), "calls": files} for flow, files in flows.items()}


class FileRecorder:
    """A profiler that counts the function calls in the package's files, in the threads that set it."""

    def __init__(self) -> None:
        self.recording = False
        #: File -> function calls, in the order of first use.
        self.calls: dict[str, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """See :func:`sys.setprofile`."""
        if self.recording and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            file = frame.f_code.co_filename.removeprefix(PACKAGE)
            self.calls[file] = self.calls.get(file, 0) + 1

    def per(self, amount: int) -> dict[str, float]:
        """The function calls in each file per call or message.

        A file that fewer than one in ten uses is left out.
        """
        return {file: count / amount for file, count in self.calls.items() if count * 10 >= amount}


def files_of_calls(task: Any, options: dict[str, Any], amount: int) -> dict[str, float]:
    """Call a task with two arguments twice as often as `amount`, and record the second half.

    Returns:
        File -> function calls in it per call, in the order of first use.
    """
    recorder = FileRecorder()
    for recorder.recording in (False, True):  # the first calls of their kind make the template
        sys.setprofile(recorder)
        try:
            for _ in range(amount):
                task.apply_async((42, "A-1"), **options)
        finally:
            sys.setprofile(None)
        flush(task.app)
    return recorder.per(amount)


def files_of_messages(url: str, acks: str, amount: int) -> dict[str, float]:
    """Let a worker with ``early`` or ``late`` acks run twice `amount` messages, and record the second half.

    Returns:
        File -> function calls in it per message, in the order of first use.
    """
    program = [sys.executable, "-m", "benchmarks.flow_files", url, acks, str(amount)]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    files: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return files


def main(url: str, acks: str, amount: int) -> None:
    """Run a worker, send it messages one at a time, and print the files of both its threads in JSON."""
    # A long lease: on a slow machine, the heartbeats of a short one would be a part of each tenth message.
    conf = settings(url, task_acks_late=acks == "late", worker_redirect_stdouts=False, dq_lease=600)
    app = app_of("dq", conf)
    recorder = FileRecorder()

    def publish() -> None:
        for recorder.recording in (False, True):
            for _ in range(amount):
                app.tasks["noop"].apply_async((1,))
                await_end(app, NAME, 10.0)
        recorder.recording = False
        os.kill(os.getpid(), signal.SIGTERM)

    # The consumer thread is none of the module `threading`, and has no profiler of it.
    run = ConsumerThread._run

    def run_recorded(thread: ConsumerThread) -> None:
        sys.setprofile(recorder)
        run(thread)

    ConsumerThread._run = run_recorded  # type: ignore[method-assign, assignment]  # records it
    threading.Thread(target=publish, daemon=True).start()
    worker = quiet_worker(app, "prefork")
    sys.setprofile(recorder)
    try:
        worker.start()
    finally:
        sys.setprofile(None)
        print(json.dumps(recorder.per(amount)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
