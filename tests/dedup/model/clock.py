"""The time of the scripts, set by the model: a key answers instead of ``TIME``."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from celery_dq.scripts.loader import Script, ScriptSet

CLOCK = "model:clock"
ASKS, IS_SET = "call('TIME')", f"call('HMGET', '{CLOCK}', 's', 'us')"
#: The model's time is ahead of the server's, so that no key expires during a story.
AHEAD_S = 86_400


class TimedScripts(ScriptSet):
    """Scripts that read the time of the model.

    Args:
        scripts: the scripts to change.
    """

    def __init__(self, scripts: ScriptSet) -> None:
        super().__init__(scripts.directory, *scripts.names())
        self._timed: dict[str, Script] = {}

    def __getitem__(self, name: str) -> Script:
        script = self._timed.get(name)
        if script is None:
            script = super().__getitem__(name)
            # A script that needs no clock asks for none.
            assert script.source.count("'TIME'") == script.source.count(ASKS) <= 1
            script = dataclasses.replace(script, source=script.source.replace(ASKS, IS_SET))
            self._timed[name] = script
        return script


class ScriptClock:
    """Sets the time of :class:`TimedScripts`, in whole seconds since its construction."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._start = int(time.time()) + AHEAD_S
        self.now = 0.0
        self.at(0)

    def at(self, seconds: float) -> None:
        self.now = seconds
        self._client.hset(CLOCK, mapping={"s": self._start + int(seconds), "us": 0})

    def seconds(self, micros: float) -> float:
        return micros / 1e6 - self._start

    def micros(self, seconds: float | None = None) -> int:
        return int((self._start + (self.now if seconds is None else seconds)) * 1e6)
