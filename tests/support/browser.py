"""A headless Chromium, driven over the WebDriver protocol."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

DRIVER = shutil.which("chromedriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]

WAIT = 180.0
"""Seconds after which something that should happen is taken to have failed; a loaded machine is slow."""


class Browser:
    """One window. Used as a context, which ends the processes it started."""

    def __init__(self, *arguments: str) -> None:
        """`arguments`: further ones for Chromium."""
        self._arguments = [*ARGUMENTS, *arguments]

    def __enter__(self) -> Browser:
        assert DRIVER and CHROMIUM, MISSING
        self._process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = next(
            found[1] for line in self._process.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        self._base = f"http://127.0.0.1:{port}/session"
        options = {"args": self._arguments, "binary": CHROMIUM}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self._base += "/" + self._call("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("", method="DELETE")
        finally:
            self._process.terminate()
            self._process.wait(10)
            assert self._process.stdout is not None
            self._process.stdout.close()

    def show(self, page: Path | str, width: int, height: int = 900, scheme: str = "light") -> None:
        """Open the file or address in a window of this size and colour scheme."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.cdp("Emulation.setEmulatedMedia", media)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", metrics)
        self._call("/url", {"url": page.resolve().as_uri() if isinstance(page, Path) else page})

    def run(self, script: str) -> Any:
        """The value of a JavaScript function body."""
        return self._call("/execute/sync", {"script": script, "args": []})

    def wait(self, condition: str, seconds: float = WAIT) -> Any:
        """The value of a JavaScript expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}")):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.05)
        return value

    def keys(self, text: str, hold: float = 0) -> None:
        """Press keys, as a person does who has no mouse; each is held for so many seconds."""
        pressed: list[dict[str, Any]] = []
        for key in text:
            pressed.append({"type": "keyDown", "value": key})
            pressed += [{"type": "pause", "duration": int(1000 * hold)}] if hold else []
            pressed.append({"type": "keyUp", "value": key})
        self._call("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": pressed}]})

    def requests(self) -> list[str]:
        """The address of every request that the page made since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self._call("/se/log", {"type": "performance"})]
        sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [message["params"]["request"]["url"] for message in sent]

    def drop(self, selector: str, *paths: Path) -> None:
        """Drop files or folders on an element, once the page has stopped moving under it."""
        script = f"""const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{block: 'center'}});
            const box = found.getBoundingClientRect();
            const x = box.x + box.width / 2, y = box.y + Math.min(box.height / 2, 30);
            return found.contains(document.elementFromPoint(x, y)) ? [x, y] : null"""
        end, before, place = time.monotonic() + WAIT, None, self.run(script)
        while place is None or place != before:
            assert time.monotonic() < end, f"{selector} does not come to rest in sight"
            time.sleep(0.1)
            before, place = place, self.run(script)
        data = {"items": [], "files": [str(path.resolve()) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.cdp("Input.dispatchDragEvent", {"type": kind, "x": place[0], "y": place[1], "data": data})

    def console(self) -> list[dict[str, Any]]:
        """What the page said on its console since the last call."""
        return list(self._call("/se/log", {"type": "browser"}))

    def cdp(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        content = (body or {}) if method == "POST" else None
        answer = httpx.request(method, self._base + path, json=content, timeout=WAIT, trust_env=False)
        return answer.raise_for_status().json()["value"]
