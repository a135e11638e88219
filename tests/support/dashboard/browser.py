"""A real browser on a dashboard that a real command serves, and a watch over everything that neither may do."""

import contextlib
import re
import select
import shutil
import time
from urllib.parse import urlsplit

from support.processes.command import start_command

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WHY_NOT = "needs Debian's chromium (`make tools` installs it as root) and playwright from the `test` extra"
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Where the page is at rest: what it asked for has come, and was drawn.
_SETTLED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


class Dash:
    """``shoal dash`` on a folder, whose address has been read.

    Args:
        folder: of runs.
        cache: where columns and the session's key are kept.
        port: 0 for any.
    """

    def __init__(self, folder, cache, port=0):
        words = ["dash", str(folder), "--port", str(port)]
        self.cache = cache
        self._process = start_command(
            *words, environment={"XDG_CACHE_HOME": str(cache)}, stdout=-1, stderr=-1, text=True
        )
        self.entrance = self._read_address()
        self.base = "{0.scheme}://{0.netloc}".format(urlsplit(self.entrance))
        self.port = urlsplit(self.entrance).port

    def _read_address(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self._process.stdout], [], [], 1.0)
            line = self._process.stdout.readline() if ready else ""
            found = re.search(r"http://\S+/enter\?code=\S+", line)
            if found:
                return found[0]
            assert self._process.poll() is None, self._process.stderr.read()
        raise AssertionError("the dashboard printed no address within 60 s")

    def end(self):
        """Stop it as a user does; its exit code."""
        self._process.terminate()
        self._process.communicate(timeout=30)
        return self._process.returncode


class Watched:
    """A page, and what went wrong on it: errors, reports of the content policy, requests to other hosts, answers above 399."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-US", **options)
        self.context.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI}`))"
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._take(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"pageerror: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("response", self._answered)

    def _take(self, kind, text):
        if kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")

    def _answered(self, response):
        if response.status >= 400:
            self.problems.append(f"{response.status} {response.url}")

    def enter(self, dash):
        """Come in by the printed address."""
        self.dash = dash
        self.page.goto(dash.entrance)
        self.page.wait_for_selector("tbody tr, .empty")

    def open(self, place):
        """Go to a view by its address inside the page, and wait until it is drawn."""
        self.page.evaluate("(place) => { location.hash = place; }", place)
        self.settle()

    def settle(self):
        """Wait until nothing is asked for any more and everything is drawn. The stream of news never ends: it does not count."""
        self.page.wait_for_function(
            "() => !document.querySelector('main .loading') && performance.now() > 0 && document.readyState === 'complete'"
        )
        self.page.evaluate(_SETTLED)

    def foreign(self):
        """Requests to anywhere but the dashboard; what the page made itself (blob:) is no request."""
        return [url for url in self.requests if not url.startswith((self.dash.base, "blob:", "data:"))]

    def check(self, allowed=()):
        """Nothing went wrong since the last look, but what is allowed."""
        problems = [one for one in self.problems if not any(re.search(pattern, one) for pattern in allowed)]
        self.problems.clear()
        assert not problems, problems
        assert not self.foreign(), self.foreign()

    def texts(self, selector):
        """The texts of all elements that a selector finds."""
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def end(self):
        """Close it."""
        with contextlib.suppress(Exception):
            self.context.close()
