"""A real Chromium, driven over the W3C WebDriver protocol with the standard library.

It is found as `chromedriver` and `chromium` (Debian's packages chromium-driver and chromium). It reaches nothing but
this machine: what a page asks of others goes to a proxy that nobody listens on, and is recorded.
"""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("chromium-browser")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Space": " ", "Home": "\ue011", "End": "\ue010"}
KEYS |= {"ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015"}


class Browser:
    """One tab. Scripts see their arguments as `arguments`; an async one ends with a call of its last argument."""

    def __init__(self, address, profile, *, loopback=False):
        self.address = address
        arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--proxy-server=127.0.0.1:9",  # the port `discard`: nobody is there
            f"--user-data-dir={profile}",
        ]
        if not loopback:
            arguments.append("--proxy-bypass-list=<-loopback>")
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{found['sessionId']}"
        self.call("timeouts", script=120_000, pageLoad=60_000)

    def _ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def call(self, command, **body):
        return self._ask("POST", f"{self.session}/{command}", body)

    def close(self):
        self._ask("DELETE", self.session)

    def open(self, address):
        self.call("url", url=address)

    def script(self, text, *arguments):
        return self.call("execute/sync", script=text, args=list(arguments))

    def wait_for(self, text, *arguments):
        """The value of an expression of JavaScript with `await`."""
        script = f"""const done = arguments[arguments.length - 1];
            (async () => ({text}))().then((v) => done({{v}}), (e) => done({{e: String(e)}}))"""
        found = self.call("execute/async", script=script, args=list(arguments))
        assert "e" not in found, found.get("e")
        return found.get("v")

    def until(self, expression, seconds=60.0):
        """Waits until an expression is true, and gives its value."""
        limit = time.monotonic() + seconds
        while not (found := self.script(f"return {expression}")):
            assert time.monotonic() < limit, f"still not: {expression}"
            time.sleep(0.05)
        return found

    def find(self, css):
        return self.call("element", using="css selector", value=css)[_ELEMENT]

    def click(self, css):
        self.call(f"element/{self.find(css)}/click")

    def press(self, *names):
        """Keys to whatever has the focus."""
        steps = [{"type": kind, "value": KEYS.get(n, n)} for n in names for kind in ("keyDown", "keyUp")]
        self.call("actions", actions=[{"type": "key", "id": "keys", "actions": steps}])

    def drag(self, places):
        """The pointer down at the first place of the window, over the others, and up."""
        (x, y), *rest = [tuple(map(round, place)) for place in places]
        steps = [{"type": "pointerMove", "x": x, "y": y}, {"type": "pointerDown", "button": 0}]
        steps += [{"type": "pointerMove", "x": x, "y": y, "duration": 20} for x, y in rest]
        steps.append({"type": "pointerUp", "button": 0})
        self.call("actions", actions=[{"type": "pointer", "id": "mouse", "actions": steps}])

    def devtools(self, command, **parameters):
        return self.call("goog/cdp/execute", cmd=command, params=parameters)

    def resize(self, width, height=900, *, dark=False, still=True):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        self.devtools("Emulation.setScrollbarsHidden", hidden=True)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        media += [{"name": "prefers-reduced-motion", "value": "reduce"}] if still else []
        self.devtools("Emulation.setEmulatedMedia", features=media)

    def screenshot(self, path, *, whole=True):
        found = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self):
        """What the console has said since the last call, warnings and errors."""
        return [e["message"] for e in self.call("se/log", type="browser") if e["level"] in ("WARNING", "SEVERE")]

    def requests(self):
        """Addresses the page has asked for since the last call, without itself and what it holds."""
        events = [json.loads(entry["message"])["message"] for entry in self.call("se/log", type="performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("file:", "data:", "blob:", "chrome:"))]


@contextmanager
def chromium(profile, **options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
                break
            except OSError:
                assert driver.poll() is None and time.monotonic() < limit, "chromedriver does not answer"
                time.sleep(0.1)
        browser = Browser(f"http://127.0.0.1:{port}", profile, **options)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if DRIVER is None or CHROMIUM is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    with chromium(tmp_path_factory.mktemp("profile"), loopback=True) as found:
        found.open("about:blank")
        found.requests()  # those of the browser's own first page
        yield found
