"""The time of the scripts, told by the model: they are as they are, but a key answers for ``TIME``."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from celery_dq.scripts.loader import Script, ScriptSet

CLOCK = "model:clock"
ASKS, IS_TOLD = "call('TIME')", f"call('HMGET', '{CLOCK}', 's', 'us')"
#: Ahead of the server, so that no key expires by itself while a story is told.
AHEAD_S = 86_400


class TimedScripts(ScriptSet):
    """Scripts that ask the model for the time.

    Arguments:
        scripts: those that are to be told.
    """

    def __init__(self, scripts: ScriptSet) -> None:
        super().__init__(scripts.directory)
        self._timed: dict[str, Script] = {}

    def __getitem__(self, name: str) -> Script:
        script = self._timed.get(name)
        if script is None:
            script = super().__getitem__(name)
            assert script.source.count("'TIME'") == script.source.count(ASKS) == 1
            script = dataclasses.replace(script, source=script.source.replace(ASKS, IS_TOLD))
            self._timed[name] = script
        return script


class ScriptClock:
    """Sets the time of :class:`TimedScripts`: whole seconds, from when it was made."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._start = int(time.time()) + AHEAD_S
        self.now = 0.0
        self.at(0)

    def at(self, seconds: float) -> None:
        """So many seconds after the start it is now."""
        self.now = seconds
        self._client.hset(CLOCK, mapping={"s": self._start + int(seconds), "us": 0})

    def seconds(self, micros: float) -> float:
        """Seconds after the start, of a time that a script has stored."""
        return micros / 1e6 - self._start

    def micros(self, seconds: float | None = None) -> int:
        """What a script stores for that time; None is now."""
        return int((self._start + (self.now if seconds is None else seconds)) * 1e6)
