"""
Two models in one server: a request names the one that answers, and each continues where it stopped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from cairn.journal import events as ev
from tests.support.processes.subprocess_server import (
    Listener,
    Serving,
    ask,
    assert_valid,
    assistant,
    eventually,
    run_ops,
    started,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "


def test_two_models_take_turns(tmp_path: Path, other_directory: Path, cold: Serving) -> None:
    """
    Pebble, a random model, and Pebble again: the third request is a continuation from disk, with
    the bits of a cold answer. Afterwards the journal is valid, and a session of each model replays
    on it.
    """
    models = tmp_path / "models.toml"
    models.write_text(
        f"[models.pebble]\nbuiltin = true\naliases = ['gpt-4o']\n"
        f"[models.random]\npath = '{other_directory}'\n",
        encoding="utf-8",
    )
    talk = [user(PATH * 12)]
    with started(tmp_path / "home", "--models", models) as server:
        assert "pebble, random; one in memory at a time" in server.greeting()
        first = ask(server, *talk, model="gpt-4o")
        beside = ask(server, *talk, model="random", max_tokens=8)
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [("pebble", "not_loaded"), ("random", "loaded")] == [
            (model["id"], model["cairn"]["state"]) for model in listed
        ]
        talk += [assistant(first.text), user("And then?")]
        again = ask(server, *talk, model="pebble")
        assert (first.session, "continuation", None) == (again.session, again.path, again.reason)
        assert again.cached_tokens >= first.prompt_tokens // 64 * 64 > 0
        assert again.cached_tokens == 64 * len(server.events(ev.BlockLoaded))
        assert ask(cold, *talk, cache_prompt=False).bits == again.bits
        server.wait_idle()
        assert 0 == server.stop()

    assert ["pebble", "random", "pebble"] == [e.name for e in server.events(ev.ModelLoaded)]
    assert 2 == len(server.events(ev.ModelUnloaded))
    assert_valid(server.data_dir)
    for session in (first.session, beside.session):
        code, out, err = run_ops("replay", session, "--engine", "--data-dir", server.data_dir)
        assert 0 == code, out + err
        assert out.splitlines()[-1].startswith("same: ")


@pytest.mark.long
def test_a_stop_while_a_model_is_loaded(tmp_path: Path, other_directory: Path) -> None:
    """
    The stop does not wait for the load, which does not end here because of its template. Waiting
    clients are informed, this is journaled, and nothing is lost: the next server continues from the
    files.
    """
    slow = shutil.copytree(other_directory, tmp_path / "slow")
    endless = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    (slow / "chat_template.jinja").write_text(endless, encoding="utf-8")
    models = tmp_path / "models.toml"
    models.write_text(
        f"[models.pebble]\nbuiltin = true\n[models.slow]\npath = '{slow}'\n", encoding="utf-8"
    )
    talk = [user(PATH * 12)]
    options = ("--models", models)
    with started(tmp_path / "home", *options) as server:
        first = ask(server, *talk)
        # Sent whole: a stream has its status with the first keep-alive.
        waiting = Listener(server, user("Hello"), model="slow", stream=False)
        eventually(lambda: server.events(ev.ModelUnloaded))
        assert 0 == server.stop()
        assert 503 == waiting.end().status
        assert waiting.refusal is not None
        assert "server_stopping" == waiting.refusal["error"]["code"]
    assert "Traceback" not in server.stderr()
    assert ["slow"] == [line["model"] for line in server.log() if "load abandoned" in line["event"]]
    assert ["pebble"] == [event.name for event in server.events(ev.ModelLoaded)]
    assert ["slow"] == [event.name for event in server.events(ev.ModelLoadFailed)]
    assert isinstance(server.recorded()[-1].event, ev.ServerStopped)
    assert_valid(server.data_dir)

    with started(tmp_path / "home", *options) as again:
        answer = ask(again, *talk, assistant(first.text), user("And then?"))
        assert (first.session, "continuation") == (answer.session, answer.path)
        assert answer.cached_tokens >= first.prompt_tokens // 64 * 64 > 0
        assert 0 == again.stop()
    assert [] == again.events(ev.ServerLost)


@pytest.mark.long
def test_a_file_of_models_is_checked(tmp_path: Path) -> None:
    """`ops doctor` and `ops serve` report what is wrong with it, where, and what to do."""
    models = tmp_path / "models.toml"
    models.write_text("[models.a]\npath = 'nothing'\n", encoding="utf-8")
    said = f"{models}, line 1, [models.a]: There is no model directory at '{tmp_path}/nothing'."
    data_dir = ("--data-dir", tmp_path / "home")
    code, out, _ = run_ops("doctor", "--models", models, *data_dir)
    assert (1, True) == (code, said in out)
    code, _, err = run_ops("serve", "--models", models, *data_dir)
    assert (2, True) == (code, said in err)
    models.write_text("[models.a]\nbuiltin = true\n", encoding="utf-8")
    _, out, _ = run_ops("doctor", "--models", models, *data_dir)
    assert "models    a (" in out
    code, _, err = run_ops("serve", "--models", models, "--model", tmp_path, *data_dir)
    assert 2 == code
    assert "--model is for one model and cannot be used with --models" in err
