"""
How the server behaves to clients that know little of it: names, defaults, adapters.
"""

from __future__ import annotations

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.serving import user

HELLO = [user("Hello")]


def test_what_was_asked_for_and_what_served_are_told(start: Start):
    """
    A request for another model is served, and journal and answer say by what; a server that is
    strict refuses it and serves its own name and none.
    """
    easy, strict = start(), start("--model-name", "stones", "--strict-model-names")

    answer = easy.post(messages=HELLO, model="gpt-9", max_tokens=2).json()

    (loaded,) = easy.events(ev.ModelLoaded)
    assert loaded.name == answer["model"] != "gpt-9"
    assert ["gpt-9"] == [one.asked_model for one in easy.events(ev.RequestReceived)]
    assert [404, 200, 200] == [
        strict.post(messages=HELLO, max_tokens=2, **model).status_code
        for model in ({"model": "gpt-9"}, {"model": "stones"}, {})
    ]
    assert ["stones", ""] == [one.asked_model for one in strict.events(ev.RequestReceived)]
