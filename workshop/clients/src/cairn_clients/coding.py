"""
Coding agents: Claude Code, opencode and Codex, each with the settings from its page in
``docs/clients``.

Each gets its prompts without a terminal, from a command that ends. The scripted model names the
agent's own tools in its calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from cairn_clients.processes import Failed, Place, run, run_together
from cairn_clients.scripted import Line, calls

NOTE, KEPT = "note.txt", "The key lies under the third stone."
READ, SEND, SEEK = "pearwood", "hornbeam", "whitebeam"
"""
Trigger words for the scripted model: call a tool that reads, one that starts an agent, and one that
searches for a tool.
"""

HAS_READ, HAS_FOUND, AGREES = "It lies under the third stone.", "There it is.", "Good."
TOKENS = 48

Rest = Callable[[], None]


@attrs.frozen(kw_only=True)
class Stage:
    """
    What a conversation needs.

    Attributes:
        url: the server's.
        model: the name that the server gives it.
        program: the client's.
        place: enters a new place, with additional environment variables.
        rest: waits until the server is idle.
    """

    url: str
    model: str
    program: Path
    place: Callable[..., Place]
    rest: Rest


# --- Claude Code -----------------------------------------------------------------------------


def claude_lines() -> list[Line]:
    """What the scripted model says to Claude Code."""
    reads = {"command": f"cat {NOTE}", "description": "Read the note"}
    sends = {
        "description": "Find the key",
        "prompt": "Say where the key is.",
        "subagent_type": "claude",
    }
    return [
        Line(READ, calls("Bash", reads)),
        Line(SEND, calls("Agent", sends)),
        Line(SEEK, calls("ToolSearch", {"query": "select:NotebookEdit"})),
        Line(KEPT, HAS_READ),
        # A parameter of the tool that is searched for.
        Line("notebook_path", HAS_FOUND),
    ]


def _claude(stage: Stage) -> Place:
    place = stage.place(
        ANTHROPIC_BASE_URL=stage.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=stage.model,
        ANTHROPIC_SMALL_FAST_MODEL=stage.model,
        CLAUDE_CODE_MAX_OUTPUT_TOKENS=str(TOKENS),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
        # An answer that was cut off in its thoughts has no text, and is not sent back: what follows
        # is added to the turn before it, which is then a different one.
        MAX_THINKING_TOKENS="0",
        API_TIMEOUT_MS="3000000",
    )
    (place.work / NOTE).write_text(KEPT + "\n", "utf-8")
    return place


def _claude_command(stage: Stage, *words: str) -> list[str | Path]:
    return [stage.program, "-p", "--output-format", "json", "--allowedTools=Bash", *words]


def _claude_said(out: str) -> str:
    try:
        event = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        raise Failed(f"Claude Code gave no result: {out[-500:]!r}") from None
    if event.get("is_error"):
        raise Failed(f"Claude Code gave an error: {str(event)[:1500]}")
    return str(event.get("result", ""))


def claude_continued(stage: Stage) -> None:
    """A run, and one that continues it."""
    place = _claude(stage)
    for words in (["My name is Anna. Say hello."], ["--continue", "What is my name?"]):
        try:
            _claude_said(run(place, *_claude_command(stage, *words)))
        except Failed as error:
            # If no answer ended by itself, Claude Code gives up after it asked for more three
            # times. That is the model's doing; how its turns were served is checked all the same.
            if "max_output_tokens" not in str(error):
                raise
        stage.rest()


def claude_calls(stage: Stage) -> None:
    """A run with a call, and one that continues it."""
    place = _claude(stage)
    asked = f"{READ}: where does {NOTE} say that the key is?"
    expect(HAS_READ, _claude_said(run(place, *_claude_command(stage, asked))))
    stage.rest()
    more = ["--continue", "Thank you."]
    expect(AGREES, _claude_said(run(place, *_claude_command(stage, *more))))
    stage.rest()


def claude_twice(stage: Stage) -> None:
    """Two runs at once, each with a call, and both continued, also at once."""
    places = [_claude(stage), _claude(stage)]
    asked = f"{READ}: where does {NOTE} say that the key is?"
    for words, answer in (([asked], HAS_READ), (["--continue", "Thank you."], AGREES)):
        command = _claude_command(stage, *words)
        for out in run_together(*((place, command) for place in places)):
            expect(answer, _claude_said(out))
        stage.rest()


def claude_sends(stage: Stage) -> None:
    """A run that starts an agent, and one that continues it."""
    place = _claude(stage)
    _claude_said(run(place, *_claude_command(stage, f"{SEND}: let an agent find the key.")))
    stage.rest()
    expect(AGREES, _claude_said(run(place, *_claude_command(stage, "--continue", "Thank you."))))
    stage.rest()


def claude_searches(stage: Stage) -> None:
    """A run that searches for a tool, which is declared from then on, and one that continues it."""
    place = _claude(stage)
    asked = f"{SEEK}: is there a tool for notebooks?"
    expect(HAS_FOUND, _claude_said(run(place, *_claude_command(stage, asked))))
    stage.rest()
    expect(AGREES, _claude_said(run(place, *_claude_command(stage, "--continue", "Thank you."))))
    stage.rest()


# --- opencode --------------------------------------------------------------------------------


def opencode_lines() -> list[Line]:
    """What the scripted model says to opencode."""
    call = calls("bash", {"command": f"cat {NOTE}", "description": "Reads the note"})
    return [Line(READ, call), Line(KEPT, HAS_READ)]


def _opencode(stage: Stage) -> Place:
    place = stage.place(
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
    )
    limits = {"context": 65_536, "output": TOKENS}
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "cairn": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Cairn",
                "options": {"baseURL": f"{stage.url}/v1", "apiKey": "none"},
                "models": {stage.model: {"name": stage.model, "limit": limits}},
            }
        },
        "model": f"cairn/{stage.model}",
        "small_model": f"cairn/{stage.model}",
        "permission": {"bash": "allow"},
    }
    (place.work / "opencode.json").write_text(json.dumps(settings, indent=2), "utf-8")
    (place.work / NOTE).write_text(KEPT + "\n", "utf-8")
    return place


def _opencode_said(out: str) -> str:
    texts, failed = [], None
    for line in out.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("type") == "error":
            failed = event
        if event.get("type") == "text":
            texts.append(str(event["part"]["text"]))
    if failed is not None or not texts:
        raise Failed(f"opencode said nothing, or an error: {out[-1500:]}")
    return texts[-1].strip()


def opencode_continued(stage: Stage) -> None:
    """A run, and one that continues it."""
    place = _opencode(stage)
    for words in (["My name is Anna. Say hello."], ["-c", "What is my name?"]):
        _opencode_said(run(place, stage.program, "run", "--format", "json", *words))
        stage.rest()


def opencode_calls(stage: Stage) -> None:
    """A run with a call, and one that continues it."""
    place = _opencode(stage)
    asked = f"{READ}: where does {NOTE} say that the key is?"
    for words, answer in (([asked], HAS_READ), (["-c", "Thank you."], AGREES)):
        out = run(place, stage.program, "run", "--format", "json", *words)
        expect(answer, _opencode_said(out))
        stage.rest()


# --- Codex -----------------------------------------------------------------------------------


def codex_lines() -> list[Line]:
    """
    What the scripted model says to Codex.

    Codex sets no limit to an answer and treats one that was cut off as a failure, so it is not run
    on Pebble, whose answers to long prompts do not end.
    """
    return [Line(READ, calls("exec_command", {"cmd": f"cat {NOTE}"})), Line(KEPT, HAS_READ)]


def _codex(stage: Stage) -> Place:
    place = stage.place()
    folder = place.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""\
model = "{stage.model}"
model_provider = "cairn"
model_context_window = 65536
check_for_update_on_startup = false

[model_providers.cairn]
name = "Cairn"
base_url = "{stage.url}/v1"
wire_api = "responses"

[analytics]
enabled = false
""",
        "utf-8",
    )
    (place.work / NOTE).write_text(KEPT + "\n", "utf-8")
    return place


def _codex_command(stage: Stage, *words: str) -> list[str | Path]:
    open_door = "--dangerously-bypass-approvals-and-sandbox"
    return [stage.program, "exec", "--json", "--skip-git-repo-check", open_door, *words]


def _codex_said(out: str) -> str:
    texts = []
    for line in out.splitlines():
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        item = event.get("item") or {}
        if event.get("type") == "item.completed" and item.get("type") == "agent_message":
            texts.append(str(item["text"]))
        if event.get("type") == "turn.failed":
            raise Failed(f"Codex's turn failed: {str(event)[:1500]}")
    if not texts:
        raise Failed(f"Codex said nothing: {out[-1500:]}")
    return texts[-1].strip()


def codex_calls(stage: Stage) -> None:
    """A run with a call, and one that continues it."""
    place = _codex(stage)
    asked = f"{READ}: where does {NOTE} say that the key is?"
    for words, answer in (([asked], HAS_READ), (["resume", "--last", "Thank you."], AGREES)):
        expect(answer, _codex_said(run(place, *_codex_command(stage, *words))))
        stage.rest()


def expect(answer: str, said: str) -> None:
    """
    Check that the client printed what the model said.

    Raises:
        Failed: it printed something else.
    """
    if said.strip() != answer:
        raise Failed(f"the client printed {said[:500]!r}, and the model said {answer!r}")
