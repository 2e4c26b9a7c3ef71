"""``celery dq top``: one screen, and the keys, also in a real terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError
from rich.console import Console

import celery_dq
from celery_dq.cli.top import _read_keys
from celery_dq.cli.top_screen import TopState, screen
from celery_dq.testing.servers import RedisServer
from tests.dq_command import run_dq
from tests.integration.shop import claim, send

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def busy(shop: Any) -> Any:
    """A shop with two queues and three tenants; `push` has a worker."""
    send(shop, *["acme"] * 3, "bakery")
    send(shop, "x", queue="ledger")
    claim(shop, want=1)
    shop.dq.quotas.set("push", "acme", rate="1/h")
    return shop


@pytest.fixture
def state(busy: Any) -> TopState:
    made = TopState(busy.dq, time.monotonic)
    made.refresh()
    return made


def press(state: TopState, *keys: str) -> None:
    for key in keys:
        for each in [key] if key in ("up", "down", "tab", "enter", "escape", "backspace") else key:
            state.press(each)


def text_of(state: TopState, width: int = 80, height: int = 24) -> str:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(screen(state, height))
    return console.export_text()


def test_one_screen_and_json(busy: Any) -> None:
    def run(*words: str) -> str:
        result = run_dq(busy, "top", *words, status=None)
        return f"{result.output}{result.exit_code}"

    output = run("--once")
    assert re.search(r"> push +3 +0 +1 +0 +\d\.\ds +- +- +tenants' turn", output), output
    assert re.search(r"ledger +1 +0 +0 +0 +\d\.\ds +- +- +a worker", output), output
    assert "worker worker:1  held 1" in output
    assert [each["name"] for each in json.loads(run("--json")[:-1])["queues"]] == ["ledger", "push"]
    assert run() == "Error: celery dq top needs a terminal: give --once to print one screen\n1"


def test_rates_are_of_the_last_two_readings(state: TopState, busy: Any) -> None:
    assert state.rate_of(state.queues[0], "pushed") is None
    send(busy, "acme", "acme")
    state.refresh()
    push = next(each for each in state.reading.queues if each.name == "push")
    seconds = state.reading.at - state.before.at
    assert state.rate_of(push, "pushed") == pytest.approx(2 / seconds)
    press(state, "ss")
    assert state.sort == "claimed/s"
    claim(busy, want=1, queue="ledger")
    state.refresh()
    assert [each.name for each in state.queues] == ["ledger", "push"]


def test_a_queue_and_a_tenant_are_paused_and_resumed_after_a_question(state: TopState, busy: Any) -> None:
    press(state, "p")
    assert state.prompt == "Pause queue 'push' until it is resumed? [y/N]"
    press(state, "n", "enter")
    assert (state.notice, busy.dq.queues["push"].snapshot().pause) == ("Nothing was changed.", None)
    press(state, "p", "y", "enter")
    assert busy.dq.queues["push"].snapshot().pause is not None
    assert "paused" in text_of(state)
    press(state, "p", "y", "enter")
    assert busy.dq.queues["push"].snapshot().pause is None
    press(state, "tab", "down", "p", "escape")
    assert state.tenant == "bakery"
    press(state, "p", "y", "enter")
    assert [*busy.dq.quotas.paused("push")] == ["bakery"]
    assert state.notice == "Paused until it is resumed: tenant 'bakery' of queue 'push'."
    press(state, "p", "y", "enter")
    assert [*busy.dq.quotas.paused("push")] == []


def test_a_tenant_gets_a_rate(state: TopState, busy: Any) -> None:
    press(state, "t")
    assert state.notice == "Choose a tenant (Tab) to set its rate."
    press(state, "tab", "t", "7/sx", "backspace", "enter")
    assert state.prompt == "Set rate 7/s of tenant 'acme' of queue 'push'? [y/N]"
    press(state, "y", "enter")
    assert busy.dq.quotas.get("push", "acme").rate == 7
    press(state, "t", "fast", "enter", "y", "enter")
    assert "rate = 'fast' is not a rate" in state.notice
    assert busy.dq.quotas.get("push", "acme").rate == 7
    press(state, "t", "unlimited", "enter", "y", "enter")
    assert busy.dq.quotas.get("push", "acme").rate is None


@pytest.mark.parametrize("height", [3, 5, 6, 12, 15, 16])
def test_the_screen_fits_a_low_terminal(state: TopState, height: int) -> None:
    text = text_of(state, height=height)
    assert len(text.splitlines()) <= height
    assert "> push" in text  # the chosen queue
    press(state, "p")
    assert state.prompt in text_of(state, height=height)


def test_the_screen_fits_a_small_terminal(state: TopState, busy: Any) -> None:
    for number in range(30):
        send(busy, f"tenant-{number}", queue=f"queue-{number:02}\x1b[31m")
    send(busy, *(f"t{number}" for number in range(40)))
    state.refresh()
    lines = text_of(state).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in each for each in lines)
    press(state, *["down"] * 29)
    assert f"> {state.queue[:8]}" in text_of(state)
    assert state.queue.startswith("queue-")


def test_names_that_look_like_markup(state: TopState, busy: Any) -> None:
    send(busy, "[/x]", queue="[red]push[/b]")
    state.refresh()
    state.queue = "[red]push[/b]"
    state.refresh()
    text = text_of(state, 120)
    assert "> [red]push[/b]" in text
    assert "tenant of [red]push[/b]" in text
    assert "[/x]" in text


@pytest.mark.parametrize("away", ["broker", "elections"])
def test_a_reading_that_fails_leaves_a_screen_for_each_key(away: str) -> None:
    app: Any
    with (
        RedisServer() as broker,
        RedisServer() as elections,
        Celery("shop", broker=broker.url(scheme="dq-redis"), set_as_current=False) as app,
    ):
        app.conf.update(dq_election=elections.url(), task_publish_retry_policy={"max_retries": 0})
        celery_dq.setup(app)
        for tenant in ("acme", "acme", "bakery"):
            app.send_task("notify", queue="push", tenant=tenant)
        app.send_task("notify", queue="ledger")
        state = TopState(app.dq, time.monotonic)
        state.refresh()
        press(state, "tab", "down")
        {"broker": broker, "elections": elections}[away].kill()
        with pytest.raises((OperationalError, redis.RedisError, OSError)):
            state.refresh()
        assert (state.queue, state.tenant) == ("push", "bakery")
        press(state, "up")
        assert "> acme" in text_of(state)
        press(state, "tab")
        with pytest.raises((OperationalError, redis.RedisError, OSError)):
            press(state, "down")
        # The queues are shown without the elections. The tenants are those of the queue in their heading.
        assert state.queue == {"broker": "push", "elections": "ledger"}[away]
        shown = text_of(state)
        assert f"tenant of {state.queue}" in shown
        assert ("acme" in shown) == (state.queue == "push")
        app.pool.force_close_all()


def test_keys_that_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(read) as keyboard, os.fdopen(write, "wb", buffering=0) as typist:
        monkeypatch.setattr(sys, "stdin", keyboard)
        typist.write(b"\x1b[A\x1bOB\x1b[5~\x1b[1;5Cs\r\xc3\xbc")
        assert list(_read_keys()) == ["up", "down", "s", "enter", "ü"]
        typist.write(b"\x1b")
        assert list(_read_keys()) == ["escape"]


def until(terminal: int, pattern: str, seen: str = "") -> str:
    """Read the terminal until a text appears; return the text after it."""
    deadline = time.monotonic() + 30
    while not (found := re.search(pattern, seen)):
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], seen[-2000:]
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen[found.end() :]


@pytest.fixture
def terminal(busy: Any, broker_url: str, tmp_path: Path) -> Iterator[tuple[int, Any]]:
    """A terminal of 80 columns and 24 lines in which the command runs."""
    program = f"from celery import Celery\napp = Celery(broker={broker_url!r}, task_default_queue='push')\n"
    (tmp_path / "shop.py").write_text(program)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "shop", "dq", "top", "--interval", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    os.close(theirs)
    yield ours, process
    process.kill()
    process.wait()
    os.close(ours)


def test_in_a_terminal(terminal: tuple[int, Any], busy: Any) -> None:
    screen_of, process = terminal
    seen = until(screen_of, r"> push")
    send(busy, "late")
    seen = until(screen_of, r"late", seen)  # a later reading
    os.write(screen_of, b"p")
    seen = until(screen_of, r"Pause queue 'push' until it is resumed\?", seen)
    os.write(screen_of, b"y\r")
    until(screen_of, r"Paused until it is resumed: queue 'push'", seen)
    assert [(each.action, each.door) for each in busy.dq.audit(limit=1)] == [("paused", "celery dq")]
    os.write(screen_of, b"q")
    assert process.wait(30) == 0
