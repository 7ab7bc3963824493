"""
Each kind of miss, as a person finds it in the explorer alone: the page of the session says in a
sentence why a prompt was computed again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cairn.journal import events as ev
from tests.support.processes.subprocess_server import Serving, eventually, started

SYSTEM = (
    "You are a guide in the hills who knows each path. It is {} now. Describe the way from cairn "
    "to cairn, and say how long each leg takes on foot in good weather."
)
LOOK, WALK = (
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "It does a thing that is described here at length, so that it counts.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
    for name in ("look", "walk")
)
ASKED = "Where do we start, and what do we see from there on a clear day in autumn?"


class Person:
    """Someone with a client that answers are sent to, and a browser."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        self.said: list[dict[str, Any]] = []
        self.session = ""

    def begins(self, clock: str, words: str = ASKED, **more: Any) -> Person:
        """Begin a conversation."""
        self.said = [{"role": "system", "content": SYSTEM.format(clock)}]
        return self.says(words, **more)

    def says(self, words: str, **more: Any) -> Person:
        """Say something and wait until the server is idle."""
        self.said.append({"role": "user", "content": words})
        body = {"messages": self.said, "max_tokens": 16, "seed": 1, **more}
        answer = httpx.post(f"{self.server.url}/v1/chat/completions", json=body, timeout=300)
        assert 200 == answer.status_code, answer.text
        self.session = answer.headers["x-cairn-session"]
        message = answer.json()["choices"][0]["message"]
        self.said.append({"role": "assistant", "content": message["content"]})
        self.server.wait_idle()
        return self

    def reads(self) -> str:
        """The words of the page of the last session, those about its last turn."""
        page = httpx.get(
            f"{self.server.url}/explorer/session",
            params={"id": self.session},
            headers={"accept": "text/html"},
        )
        assert 200 == page.status_code
        turn = page.text.split('<p class="why">')[1].split("</div>")[0]
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", turn)).split())


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, other_directory: Path) -> Iterator[Serving]:
    """A server with Pebble and a random model, and with enough room."""
    folder = tmp_path_factory.mktemp("misses")
    models = folder / "models.toml"
    models.write_text(
        f"[models.pebble]\nbuiltin = true\n[models.random]\npath = '{other_directory}'\n", "utf-8"
    )
    with started(folder / "home", "--models", models, "--block-tokens", "16") as server:
        yield server


def test_a_clock(roomy: Serving) -> None:
    """The time in the system prompt."""
    # Words of its own: what other people say too may be meant to continue their conversations.
    person = Person(roomy).begins("14:05", "How far is it to the last cairn from here today?")
    person.said[0] = {"role": "system", "content": SYSTEM.format("14:06")}
    found = person.says("And then?").reads()
    assert found.startswith("clock ")
    assert "14:05 became 14:06 . A clock in the system prompt" in found


def test_reordered_tools(roomy: Serving) -> None:
    """The same ones in another order."""
    person = Person(roomy).begins(
        "ten", "Which tools have you got for the way?", tools=[LOOK, WALK]
    )
    found = person.says("And then?", tools=[WALK, LOOK]).reads()
    assert found.startswith("reordered tools ")
    assert "The client sent the same tools in another order" in found


def test_an_edit(roomy: Serving) -> None:
    """A message of the past is another one."""
    person = Person(roomy).begins("eleven", "I like red wine in the evening, and you?")
    person.said[1] = {"role": "user", "content": "I like blue wine in the evening, and you?"}
    found = person.says("And then?").reads()
    assert found.startswith("a message changed ")
    assert "red became blue . That is usual after an edit" in found


@pytest.mark.long
def test_another_model(roomy: Serving) -> None:
    """In the same conversation."""
    person = Person(roomy).begins("twelve")
    found = person.says("And then?", model="random").reads()
    assert found.startswith("other model ")
    assert "Name the same model in all requests of a conversation." in found


def test_expiry(roomy: Serving) -> None:
    """A short TTL."""
    person = Person(roomy).begins("one", "This one is short-lived, as its client wants it.", ttl=1)
    session = person.session

    def expired() -> bool:
        """The session, and what it sealed, which was used a little later."""
        found = httpx.get(f"{roomy.url}/v1/sessions/{session}").json()["session"]
        sealed = {one.key for one in roomy.events(ev.BlockSealed, session=session)}
        filed = {one.key for one in roomy.events(ev.BlockSpilled)}
        evicted = {one.key for one in roomy.events(ev.BlockEvicted, reason="expired")}
        removed = {one.key for one in roomy.events(ev.BlockFileRemoved, reason="expired")}
        gone = sealed <= evicted and sealed & filed <= removed
        return gone and found["kv"]["where"] == "nowhere"

    eventually(expired)
    found = person.says("And then?").reads()
    assert found.startswith("expired ")
    assert "it was not used for its TTL. Set a longer --ttl" in found


def test_busy(roomy: Serving) -> None:
    """A client that goes on before its answer is there."""
    person = Person(roomy).begins("two", model="random")
    person.said.append({"role": "user", "content": "Say all that you know about the hills."})
    long = {"messages": list(person.said), "max_tokens": 2000, "seed": 1, "model": "random"}
    url = f"{roomy.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**long, "stream": True}, timeout=300) as answer:
        lines = answer.iter_lines()
        next(lines)
        person.said.append({"role": "assistant", "content": "I know"})
        done = threading.Event()

        def go_on() -> None:
            body = {
                "messages": [*person.said, {"role": "user", "content": "Wait!"}],
                "max_tokens": 4,
                "model": "random",
            }
            person.session = httpx.post(url, json=body, timeout=300).headers["x-cairn-session"]
            done.set()

        thread = threading.Thread(target=go_on)
        thread.start()
        for _ in lines:
            if done.is_set():
                break
        thread.join()
    roomy.wait_idle()
    found = person.reads()
    assert found.startswith("busy ")
    assert "which was busy with another request. Have the client wait for an answer" in found


def test_a_disabled_cache(roomy: Serving) -> None:
    """A request that wants none."""
    found = Person(roomy).begins("three").says("And then?", cache_prompt=False).reads()
    assert found.startswith("cache disabled ")
    assert "The request disabled the cache ( cache_prompt: false )." in found


@pytest.mark.long
def test_eviction(tmp_path: Path) -> None:
    """Others took the room."""
    options = ("--disk-mb", "0", "--blocks-max", "8", "--pool-slabs", "1", "--block-tokens", "16")
    with started(tmp_path / "home", *options) as server:
        person = Person(server).begins("four")
        for number in range(4):
            Person(server).begins("five", f"Number {number}. " * 30)
        found = person.says("And then?").reads()
        assert found.startswith("evicted ")
        assert "whose blocks were evicted to make room" in found


@pytest.mark.long
def test_too_short(tmp_path: Path) -> None:
    """A prompt below the least that is cached."""
    options = ("--disk-mb", "0", "--min-cache-tokens", "500", "--pool-slabs", "1")
    with started(tmp_path / "home", *options, "--block-tokens", "16") as server:
        person = Person(server).begins("six")
        for number in range(2):
            Person(server).begins("seven", f"Number {number}.")
        found = person.says("And then?").reads()
        assert found.startswith("too short ")
        assert "it had fewer than 500 tokens. A smaller --min-cache-tokens" in found


DROPPED = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n%s\n</think>\n\n{%- endif -%}"
)


@pytest.mark.parametrize(
    ("thought", "sent", "starts", "says"),
    [
        pytest.param("I look at the map.", {}, "dropped thinking", "have the client send it back",
                     marks=pytest.mark.long),
        ("I look at the map.", {"reasoning_content": "I look at the map."}, "continued",
         "The client sent thinking back, and the model's chat template leaves out"),
        pytest.param("", {}, "continued", "begins an answer with an empty thinking block",
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_thinking_that_is_gone(
    thought: str,
    sent: dict[str, str],
    starts: str,
    says: str,
    tmp_path: Path,
    other_directory: Path,
) -> None:
    """By the client or by the template: each has its own sentence."""
    model = tmp_path / "thinks"
    model.mkdir()
    for file in other_directory.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = msgspec.json.decode((model / "tokenizer_config.json").read_bytes())
    config["chat_template"] = DROPPED.replace("%s", thought)
    (model / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    with started(tmp_path / "home", "--model", model, "--no-prewarm") as server:
        person = Person(server).begins("eight")
        person.said[-1] |= sent
        found = person.says("And then?").reads()
        assert found.startswith(starts)
        assert says in found
