"""Chromium without a window, driven over a pipe: pages, what they request, their console, screenshots."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip

WAIT_S = 60.0


class Browser:
    """One page of a Chromium that a test started."""

    def __init__(self, program: str, folder: Path) -> None:
        to_browser, self._writer = os.pipe()
        self._reader, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        start = 'exec "$@" 3<&%d 4>&%d' % (to_browser, from_browser)  # noqa: UP031 - braces are the shell's
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", start, "bash", program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", ""
        #: Addresses that pages requested, and what they wrote to the console as a warning or an error.
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._loaded = 0
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._reader, 1 << 16)
            assert data, "chromium ended; see chromium.log"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:400])
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(parameters["args"])[:400])
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif event == "Page.loadEventFired":
            self._loaded += 1

    def open(self, url: str) -> None:
        """Load `url`, and wait until everything that it requests at once is there."""
        before = self._loaded
        self.call("Page.navigate", url=url)
        while self._loaded == before:
            self._receive()
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return what `expression` is in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of `expression` once it is true.

        Raises:
            TimeoutError: it was not true for a minute.
        """
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if found := self.value(expression):
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{expression} was not true for {WAIT_S:g} s")

    def show(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the page, in pixels, and the colors that the reader prefers: "light" or "dark"."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """Write what the page shows now as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End Chromium."""
        os.close(self._writer)  # it ends when the pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._reader)


@contextmanager
def browser(program: str, folder: Path) -> Iterator[Browser]:
    """Yield a browser, which ends afterwards."""
    started = Browser(program, folder)
    try:
        yield started
    finally:
        started.close()
