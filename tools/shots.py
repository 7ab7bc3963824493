"""
Pictures of the explorer's pages, made by a person's clicks in Chromium.

``make shots`` starts a server with the built-in model, holds conversations with it, and visits each
page in light and dark, 1,280 and 390 pixels wide. It fails if a page logs an error, runs into its
own policy, or is wider than the window; if the keyboard, the chat, the live page or the login do
not do what they should; if a page does not notice that its server is gone; if axe finds a serious
fault; or if text of a conversation runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright

GUIDE = (
    "You are a guide in the hills. It is {clock} now. Describe the way from cairn to cairn, name "
    "what can be seen from each of them, and say how long the next leg takes on foot. Answer "
    "in short sentences, and never invent a path that is not on the map."
)
MAP = {
    "type": "function",
    "function": {
        "name": "look_at_map",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
ATTACK = (
    '<img src=x onerror="document.title=1"><script>document.title=1</script> **[x](javascript:1)**'
)
SETTLED_S = 1.5
SIZES = ((1280, 860), (390, 844))


@contextlib.contextmanager
def served(python: str, directory: Path, *options: str) -> Iterator[str]:
    """A server with the built-in model, at the URL."""
    command = [python, "-P", "-m", "cairn.ops", "serve", "--port", "0", *options]
    server = subprocess.Popen(
        [*command, "--data-dir", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        greeting = server.stdout.readline()
        if "http://" not in greeting:
            raise SystemExit("The server did not start; `ops serve` says why.")
        yield greeting.split()[-1]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def post(url: str, body: dict[str, Any]) -> Any:
    """The answer to a request."""
    asked = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answered:
        return json.load(answered)


def converse(url: str) -> None:
    """Hold conversations of which each page has something to show."""

    def ask(messages: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
        body = {"messages": messages, "max_tokens": 48, "seed": 1, **more}
        found = post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]
        time.sleep(SETTLED_S)  # as long as a person takes to read
        return [*messages, {"role": "assistant", "content": found["content"]}]

    def user(words: str) -> dict[str, Any]:
        return {"role": "user", "content": words}

    ask([user(ATTACK)])
    said = ask([user("Hello! My name is Jordis, and I live in the hills.")])
    ask([*said, user("What is my name?")])
    system = {"role": "system", "content": GUIDE.format(clock="14:05")}
    said = ask([system, user("Where do we start?")], tools=[MAP])
    said = ask([*said, user("And from the first cairn? " * 4)], tools=[MAP])
    first = said[:3]
    said = ask([*said, user("What if the stream is too high to cross? " * 4)], tools=[MAP])
    ask([*first, user("And after the ford, to the left? " * 4)], tools=[MAP])
    later = {"role": "system", "content": GUIDE.format(clock="14:06")}
    ask([later, *said[1:], user("And then?")], tools=[MAP])
    post(f"{url}/v1/agents", {"agent_id": "guide", "system_prompt": "Answer in short sentences."})
    for words in ("Hello! My name is Jordis.", "What is my name?"):
        asked = {"messages": [user(words)], "max_tokens": 48}
        post(f"{url}/v1/agents/guide/generate", asked)
        time.sleep(SETTLED_S)


class Person:
    """Visits pages and looks at them."""

    def __init__(self, browser: Any, out: Path) -> None:
        self._browser, self._out = browser, out
        self.faults: list[str] = []

    @contextlib.contextmanager
    def window(
        self, scheme: str, width: int, height: int, *, scripts: bool = True
    ) -> Iterator[Page]:
        """A window of the browser, whose errors are faults."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            java_script_enabled=scripts,
        )
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: self.faults.append(f"{page.url}: {error}"))
        page.on("console", lambda said: self._said(page, said))
        yield page
        context.close()

    def _said(self, page: Page, said: Any) -> None:
        # What a page shows, it need not be silent about in the console.
        expected = ("status of 401", "status of 503", "net::ERR_")
        if said.type == "error" and not any(words in said.text for words in expected):
            self.faults.append(f"{page.url}: {said.text}")

    def look(self, page: Page, name: str, scheme: str) -> None:
        """Take a picture, and find what sticks out."""
        width = page.viewport_size["width"] if page.viewport_size else 0
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            self.faults.append(f"{name} at {width} pixels is {wide} pixels wide")
        if page.evaluate("document.title") == "1":
            self.faults.append(f"{name}: text of a conversation ran")
        for one in Axe().run(page).response["violations"]:
            if one["impact"] in ("serious", "critical"):
                places = [place["html"][:100] for place in one["nodes"][:3]]
                self.faults.append(f"{name}, {scheme}, {width}: {one['id']}: {places}")
        path = self._out / f"{name}-{scheme}-{width}.jpg"
        page.screenshot(path=path, type="jpeg", quality=60)


def clock_session(url: str) -> str:
    """The session whose system prompt had another time."""
    with urllib.request.urlopen(f"{url}/v1/sessions?limit=50", timeout=60) as found:
        sessions = json.load(found)["data"]
    for one in sessions:
        with urllib.request.urlopen(f"{url}/v1/sessions/{one['id']}", timeout=60) as found:
            if any(turn["habit"] == "clock" for turn in json.load(found)["turns"]):
                return str(one["id"])
    raise SystemExit("No session was explained by a clock.")


def longest_session(url: str) -> str:
    """The session with the most turns that no agent has."""
    with urllib.request.urlopen(f"{url}/v1/sessions?limit=50", timeout=60) as found:
        sessions = json.load(found)["data"]
    return str(
        max((one for one in sessions if not one["named"]), key=lambda one: one["turns"])["id"]
    )


def visit(person: Person, url: str) -> None:
    """Each page, in both schemes and sizes."""
    pages = {
        "sessions": "/",
        "session": f"/explorer/session?id={longest_session(url)}",
        "clock": f"/explorer/session?id={clock_session(url)}",
        "events": f"/explorer/events?id={longest_session(url)}",
        "cache": "/explorer/cache",
        "live": "/explorer/live",
        "models": "/explorer/models",
        "connect": "/explorer/connect",
        "api": "/explorer/api",
        "chat": "/explorer/chat?agent=guide",
        "forget": f"/explorer/session/forget?id={longest_session(url)}",
    }
    for scheme in ("light", "dark"):
        for width, height in SIZES:
            with person.window(scheme, width, height) as page:
                for name, path in pages.items():
                    page.goto(url + path)
                    person.look(page, name, scheme)


def use(person: Person, url: str) -> None:
    """Use the pages as a person does."""
    with person.window("light", *SIZES[0]) as page:
        page.goto(url)
        page.keyboard.press("?")
        expect(page.locator("#keys")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        page.keyboard.type("Where do we")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=Where*")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/explorer/session?**")
        page.locator(".turn-events > summary").first.click()
        expect(page.locator(".turn-events .events").first).to_be_visible()

        page.goto(f"{url}/explorer/chat")
        expect(page.locator("#message")).to_be_focused()
        page.locator(".settings summary").click()
        page.locator("[name=max_tokens]").fill("32")
        page.locator("#message").fill("Hello! My name is Anna. " + ATTACK)
        page.keyboard.press("Enter")
        page.wait_for_url("**/explorer/chat?agent=**")
        expect(page.locator(".under .why").first).to_be_visible()
        agent = page.url
        page.locator(".settings summary").click()
        page.locator("[name=max_tokens]").fill("32")
        page.locator("#message").fill("What is my name?")
        page.keyboard.press("Enter")
        expect(page.locator(".exchange")).to_have_count(2)
        expect(page.locator("#message")).to_be_focused()
        edit(page)
        page.goto(agent)
        page.locator("[data-fork]").first.click()
        page.wait_for_url(lambda now: now != agent)
        expect(page.locator(".exchange")).to_have_count(1)
        page.locator("[data-delete]").click()
        expect(page.locator("[data-delete]")).to_contain_text("for good?")
        page.locator("[data-delete]").click()
        page.wait_for_url("**/explorer/chat")
        person.look(page, "new-chat", "light")

        page.locator(".settings summary").click()
        page.locator("[name=max_tokens]").fill("4000")
        page.locator("#message").fill("Explain quantum physics")
        page.locator("[data-send]").click()
        page.locator("[data-stop]").click()
        expect(page.locator("#answering")).to_contain_text("Stopped.")

        page.goto(f"{url}/explorer/live")
        post(
            f"{url}/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64},
        )
        expect(page.locator("#ended")).to_contain_text("Tell me a story.")
        expect(page.locator("#strip rect").first).to_be_attached()
        person.look(page, "live", "light")


def edit(page: Page) -> None:
    """Edit the last of two turns: there is a fork once the message is sent, and no earlier."""
    conversations, before = page.locator("aside li"), page.url
    count = conversations.count()
    page.locator("[data-edit]").last.click()
    expect(page.locator("#message")).to_have_value("What is my name?")
    page.locator("[data-editing] button").click()
    expect(page.locator("#message")).to_have_value("")
    page.locator("[data-edit]").last.click()
    page.reload()
    expect(conversations).to_have_count(count)
    page.locator("[data-edit]").last.click()
    page.locator("#message").fill("Where do we start?")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda now: now != before)
    expect(page.locator(".exchange .from-user").last).to_contain_text("Where do we start?")
    expect(page.locator(".exchange")).to_have_count(2)
    expect(conversations).to_have_count(count + 1)


def check_and_end(person: Person, url: str) -> None:
    """Verify and replay a session, close it, and forget it; unload a model and load it."""
    session = f"{url}/explorer/session?id={longest_session(url)}"
    for scheme in ("light", "dark"):
        for width, height in SIZES:
            with person.window(scheme, width, height) as page:
                page.goto(session)
                page.get_by_role("button", name="Verify its rows").click()
                expect(page.locator(".notice.good")).to_contain_text("are as they were written")
                person.look(page, "verified", scheme)
                page.goto(session)
                page.get_by_role("button", name="Replay its decisions").click()
                expect(page.locator(".notice.good")).to_contain_text("Same:")
                person.look(page, "replayed", scheme)
    with person.window("light", *SIZES[0]) as page:
        page.goto(session)
        page.get_by_role("link", name="Close …").click()
        page.get_by_role("button", name="Close").click()
        page.wait_for_url("**/explorer/session/close**")  # the box is not ticked
        page.get_by_label("Yes, close this session").check()
        page.get_by_role("button", name="Close").click()
        page.wait_for_url("**/explorer/session?**")
        expect(page.locator("main")).to_contain_text("closed:")
        page.get_by_role("link", name="Forget …").click()
        page.get_by_label("Yes, forget this session for good").check()
        page.get_by_role("button", name="Forget").click()
        expect(page.locator("h1")).to_have_text("Forgotten")
        person.look(page, "forgotten", "light")

        page.goto(f"{url}/explorer/models")
        page.get_by_role("button", name="Unload").click()
        page.get_by_role("button", name="Load").click()
        expect(page.get_by_role("button", name="Unload")).to_be_visible()


def read(person: Person, url: str) -> None:
    """Read the pages without scripts."""
    with person.window("light", *SIZES[0], scripts=False) as page:
        page.goto(f"{url}/explorer/session?id={clock_session(url)}")
        expect(page.locator(".diff del")).to_have_text("14:05")
        page.locator(".turn-events > summary").click()
        page.get_by_role("link", name="Open these events").click()
        expect(page.locator(".events").first).to_contain_text("path_selected")
        page.goto(f"{url}/explorer/chat?agent=guide")
        expect(page.locator(".chat")).to_contain_text("What is my name?")
        page.goto(f"{url}/explorer/live")
        expect(page.locator("#ended")).to_contain_text("Tell me a story.")


def log_in(person: Person, python: str, directory: Path) -> None:
    """A server with keys asks for one, and shows a tenant its own."""
    keys = directory / "keys"
    keys.write_text(f"alice={'a' * 24}\nlocal={'k' * 24}\n", encoding="utf-8")
    keys.chmod(0o600)
    with (
        served(python, directory, "--api-key-file", str(keys)) as url,
        person.window("light", *SIZES[0]) as page,
    ):
        page.goto(f"{url}/explorer/cache")
        person.look(page, "login", "light")
        page.locator("[name=key]").fill("a" * 24)
        page.keyboard.press("Enter")
        page.wait_for_url("**/explorer/cache")
        expect(page.locator("h1")).to_have_text("Cache")
        page.locator("header form button").click()
        expect(page.locator("h1")).to_have_text("Log in")


def lose(person: Person, python: str, directory: Path) -> None:
    """Pages say that their server is gone or wants a key, and go on when it is there again."""
    keys = directory / "keys"
    keys.write_text(f"local={'k' * 24}\n", encoding="utf-8")
    keys.chmod(0o600)
    with (
        person.window("light", *SIZES[0]) as page,
        person.window("light", *SIZES[0]) as chat,
    ):
        connection, dot = page.locator("#connection"), page.locator(".state .dot")
        with served(python, directory) as url:
            page.goto(f"{url}/explorer/models")
            expect(dot).to_have_class("dot good")
            page.get_by_role("button", name="Unload").click()
            expect(dot).to_have_class("dot idle")
            page.get_by_role("button", name="Load").click()
            expect(dot).to_have_class("dot good")
            page.goto(f"{url}/explorer/live")
            chat.goto(f"{url}/explorer/chat")
            stopped = time.monotonic()
        if time.monotonic() - stopped > 20:
            person.faults.append("a page that follows the server delays its end")
        expect(connection).to_contain_text("The server does not answer; last seen at")
        expect(dot).to_have_class("dot good lost")
        person.look(page, "lost", "light")
        chat.locator("#message").fill("Hello")
        chat.keyboard.press("Enter")
        gone = "The server does not answer. Is it running?"
        expect(chat.locator("#answering")).to_have_text(gone)
        expect(chat.locator("#message")).to_be_focused()
        expect(chat.locator("#message")).to_have_value("Hello")
        port = url.rsplit(":", 1)[-1]
        with served(python, directory, "--port", port):
            expect(connection).to_be_hidden()
            expect(dot).to_have_class("dot good")
        expect(connection).to_be_visible()
        with served(python, directory, "--port", port, "--api-key-file", str(keys)):
            expect(connection).to_contain_text("requires a login")
            connection.get_by_role("link", name="Log in").click()
            page.locator("[name=key]").fill("k" * 24)
            page.keyboard.press("Enter")
            page.wait_for_url("**/explorer/live")


def bugs(person: Person, python: str, directory: Path) -> None:
    """A bug that a drill made."""
    drill = [python, "-P", "-m", "cairn.ops", "drill", "layer-short", "--data-dir", str(directory)]
    subprocess.run(drill, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (made,) = (directory / "drills").iterdir()
    with served(python, made) as url:
        for scheme in ("light", "dark"):
            for width, height in SIZES:
                with person.window(scheme, width, height) as page:
                    page.goto(f"{url}/explorer/bugs")
                    expect(page.locator("article.bug").first).to_be_visible()
                    person.look(page, "bugs", scheme)


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description="Pictures of the explorer's pages.")
    parser.add_argument("--python", required=True, help="the interpreter that has Cairn")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/pictures/explorer"))
    options = parser.parse_args()
    expect.set_options(timeout=60_000)
    options.out.mkdir(parents=True, exist_ok=True)
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    )
    with (
        tempfile.TemporaryDirectory() as name,
        sync_playwright() as driver,
        contextlib.closing(
            driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        ) as browser,
    ):
        place, person = Path(name), Person(browser, options.out)
        with served(options.python, place / "own") as url:
            converse(url)
            visit(person, url)
            use(person, url)
            read(person, url)
            check_and_end(person, url)
        bugs(person, options.python, place / "bugs")
        (place / "lost").mkdir()
        lose(person, options.python, place / "lost")
        (place / "keys").mkdir()
        log_in(person, options.python, place / "keys")
    if person.faults:
        raise SystemExit("\n".join(dict.fromkeys(person.faults)))


if __name__ == "__main__":
    main()
