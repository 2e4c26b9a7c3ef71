"""The ZooKeeper session in a process of greenlets: it waits and fails as in a process of threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.chaos.proxy import Proxy

ROOT = Path(__file__).parents[2]

#: Opens a session, waits for an outage, and sends a request. The session outlives the outage.
PROGRAM = """
import sys
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import ask_all

def report(ask):
    try:
        ask()
    except Exception as error:
        print(type(error).__name__, flush=True)

session = Session(sys.argv[1], timeout_s=60)
client = session.open()
print(client.handler.name, flush=True)
sys.stdin.readline()
"""
UNANSWERED = """
report(lambda: session.ask(lambda client: client.get_async("/"), 0.2))
report(lambda: ask_all(session, lambda client: [client.get_async("/")], 0.2))
report(client.get_async("/").get_nowait)
"""
#: The caller's own timeout is shorter than the timeout of the session.
IMPATIENT = """
import gevent
try:
    with gevent.Timeout(0.1):
        session.ask(lambda client: client.get_async("/"), 30)
except gevent.Timeout:
    print("Timeout", flush=True)
"""


def unheard(patch: str, program: str, hosts: str, server: ZooKeeperServer) -> list[str]:
    """Return the output of the program after its server has stopped to answer."""
    proxy = Proxy(server.port).start()
    child = subprocess.Popen(
        [
            *(sys.executable, "-W", "ignore", "-c"),
            f"import {patch.rpartition('.')[0]}; {patch}()\n" + PROGRAM + program,
            f"127.0.0.1:{proxy.port}/{hosts.rpartition('/')[2]}",
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        kind = child.stdout.readline()
        assert kind.startswith(f"sequential_{patch.partition('.')[0]}"), kind
        proxy.black_hole()
        printed, _ = child.communicate("now\n", timeout=60)
        return printed.split()
    finally:
        child.kill()
        child.wait(30)
        proxy.stop()


@pytest.mark.parametrize("patch", ["gevent.monkey.patch_all", "eventlet.monkey_patch"])
def test_no_answer_in_time_is_an_ordinary_error(patch: str, zookeeper: ZooKeeperServer, hosts: str) -> None:
    """A timeout of another kind would end the waiting greenlet, and with it the elector of a leader."""
    reported = unheard(patch, UNANSWERED, hosts, zookeeper)
    late = "TimeoutError" if patch.startswith("eventlet") else "KazooTimeoutError"
    assert reported == ["ZooKeeperUnreachable", "ZooKeeperUnreachable", late]


def test_a_timeout_of_the_callers_goes_through(zookeeper: ZooKeeperServer, hosts: str) -> None:
    assert unheard("gevent.monkey.patch_all", IMPATIENT, hosts, zookeeper) == ["Timeout"]
