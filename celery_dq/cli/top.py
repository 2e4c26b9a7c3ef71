"""``celery dq top``: the queues live, on one screen of a terminal."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import redis
from kombu.exceptions import OperationalError

from celery_dq.app.api.api import DQ
from celery_dq.cli.arguments import seconds_option
from celery_dq.cli.output import command, show
from celery_dq.clock import SystemClock
from celery_dq.errors import DQError, InvalidRequest, MissingLibrary

if TYPE_CHECKING:
    from rich.console import Console

    from celery_dq.cli.top_screen import TopState

#: The bytes of keys that are not characters.
_NAMED = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\t": "tab",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
    b"\x7f": "backspace",
    b"\x08": "backspace",
}
#: A control sequence of a terminal (ECMA-48), a key of its application mode, or one character.
_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


@click.command()
@seconds_option("--interval", 2.0, "Seconds between two readings.", click.FloatRange(0.1, 3600))
@click.option("--once", is_flag=True, help="Print one screen, and end.")
@command
def top(dq: DQ, as_json: bool, interval: float, once: bool) -> None:
    """Show queues, tenants, workers and leaders live; pause or throttle by keys. Needs the extra 'tui'.

    Arrows choose a queue, or after Tab a tenant; s sorts, p pauses or resumes, t sets a rate, q quits. Each
    change asks before it is made, and is in the audit stream. --once and --json print one reading.
    """
    try:
        from rich.console import Console

        from celery_dq.cli.top_screen import TopState, screen
    except ImportError as exc:
        raise MissingLibrary.needed_by("celery dq top", "rich", "tui") from exc
    if not dq.serves_queues():
        raise InvalidRequest(
            "celery dq top needs a broker with tenants (dq-redis://…); 'celery dq status' shows other queues"
        )
    state = TopState(dq, SystemClock.monotonic)
    state.refresh()
    if as_json:
        show(True, state.reading)
        return
    if once:
        console = Console(highlight=False)
        console.print(screen(state, console.height if console.is_terminal else 24))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest("celery dq top needs a terminal: give --once to print one screen")
    _show_live(Console(highlight=False), state, interval)


def _show_live(console: Console, state: TopState, interval_s: float) -> None:
    from rich.live import Live

    from celery_dq.cli.top_screen import screen

    with _keys_one_by_one(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not state.is_over:
            live.update(screen(state, console.height), refresh=True)
            # A question is about what is on the screen, which stays meanwhile.
            wait_s = interval_s if state.prompt else state.reading.at + interval_s - state.now()
            try:
                if select.select([sys.stdin], [], [], max(wait_s, 0.0))[0]:
                    for key in _read_keys():
                        state.press(key)
                elif not state.prompt:
                    state.refresh()
            except KeyboardInterrupt:
                return
            except (OperationalError, redis.RedisError, OSError, DQError) as exc:
                state.notice = f"The latest reading failed: {exc}"
                live.update(screen(state, console.height), refresh=True)
                select.select([sys.stdin], [], [], interval_s)


def _read_keys() -> Iterator[str]:
    """Yield the keys that were pressed; several may come at once, as of a key that is held down."""
    for key in _KEY.findall(os.read(sys.stdin.fileno(), 1024).decode(errors="ignore")):
        # A key without a meaning here, such as Page Up, has a sequence too, and is not an Escape.
        if len(key) == 1 or key.encode() in _NAMED:
            yield _NAMED.get(key.encode(), key)


@contextmanager
def _keys_one_by_one() -> Iterator[None]:
    """Let the terminal give each key at once, without showing it."""
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    tty.setcbreak(file)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
