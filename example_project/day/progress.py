"""The progress display: one redrawn line on a terminal, occasional lines in a pipe."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24


class Progress:
    """Shows the progress of the day.

    Args:
        title: Prefix of each line.
        stream: Output; default standard error.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._redraw = self._stream.isatty()
        self._every = 0.2 if self._redraw else 3.0
        self._next = 0.0
        self._drawn = 0

    def show(self, share: float, clock: str, published: int, settled: int, remark: str = "") -> None:
        """Show a state, unless another one was shown shortly before."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        filled = round(min(1.0, share) * WIDTH)
        bar = "#" * filled + "." * (WIDTH - filled)
        self._write(
            f"{self._title:<22} [{bar}] {clock}  published {published:>6,}  settled {settled:>6,}"
            f"  open {published - settled:>5,}  {remark}"
        )

    def print_line(self, text: str) -> None:
        """Write a permanent line."""
        self.close()
        self._stream.write(f"{self._title:<22} {text}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line that is being redrawn."""
        if self._redraw and self._drawn:
            self._stream.write("\n")
        self._drawn = 0

    def _write(self, line: str) -> None:
        if self._redraw:
            self._stream.write("\r" + line.ljust(self._drawn))
            self._drawn = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
