"""Work in forks and threads of the test process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_child(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a forked child, which fails or hangs only together with the test."""
    source, target = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            os.write(target, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(target)
    with os.fdopen(source) as answer:
        text = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(text)


def in_threads(*works: Callable[[], object]) -> None:
    """Run all of this at the same time, each in a thread, to the end."""
    with ThreadPoolExecutor(len(works)) as threads:
        list(threads.map(lambda work: work(), works))
