"""A Chromium without a window, driven by its DevTools protocol over a pipe. Standard library only."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from celery_dq.testing.waiting import wait_until

#: Seconds for one answer of the browser.
ANSWER_S = 20.0


class Chromium:
    """A browser with one page. A context manager.

    Args:
        width: Width of the page, in CSS pixels.
        height: Height of the page.
        dark: Whether the page prefers dark colours.
        scale: Device pixels per CSS pixel.
        phone: Whether it is a phone.
    """

    def __init__(
        self, width: int, height: int, *, dark: bool = False, scale: float = 1, phone: bool = False
    ) -> None:
        self._metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self._dark = dark
        self._buffer = b""
        self._number = 0
        #: Messages of the browser that answer no call.
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        binary = shutil.which("chromium") or shutil.which("google-chrome")
        if binary is None:
            raise SystemExit("no Chromium here; get one by: apt-get install chromium")
        self._folder = tempfile.TemporaryDirectory(prefix="celery-dq-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def descriptors() -> None:
            # The protocol reads descriptor 3 and writes descriptor 4.
            first, second = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(first, 3)
            os.dup2(second, 4)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            [binary, *options],
            preexec_fn=descriptors,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", **self._metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(ANSWER_S)
            if answer is None:
                raise TimeoutError(f"Chromium did not answer {method}")
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, timeout_s: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], timeout_s)[0]:
                return None
            part = os.read(self._in, 1 << 16)
            if not part:
                raise EOFError("Chromium has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def listen(self, seconds: float) -> None:
        """Collect events for some seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            event = self._read(left)
            if event is not None:
                self.events.append(event)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        wait_until(
            lambda: self.evaluate("document.readyState == 'complete' && location.href != 'about:blank'"), 10
        )

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key."""
        both = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **both)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def problems(self) -> list[str]:
        """Return what the console has reported: errors, and violations of the content security policy."""
        found = []
        for event in self.events:
            entry = event.get("params", {}).get("entry", {})
            if event.get("method") == "Log.entryAdded" and entry.get("level") in ("error", "warning"):
                found.append(f"{entry['text']} {entry.get('url', '')}")
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
        return found

    def requests(self) -> int:
        """Return the number of requests that the page has sent."""
        return sum(event.get("method") == "Network.requestWillBeSent" for event in self.events)
