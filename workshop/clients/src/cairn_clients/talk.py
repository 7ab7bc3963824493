"""
Hold a conversation of three turns with a client library.

Runs as its own program, with only the library on the path. ``python -P talk.py LIBRARY URL
LANGUAGE_MODEL`` prints one line of JSON for each answer: its text, and how many tokens of its
prompt were reused, as reported by the library. Ollama's drops that, so it is 1 for a continuation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

HEAD = "You are a guide who knows every cairn between the lower hut and the pass. " * 60
SAID = (
    "My name is Anna and the code of the hut is 4711. " * 8,
    "What is my name?",
    "And the code of the hut?",
)
TOKENS = 24

Ask = Callable[[list[dict[str, Any]]], tuple[str, int]]


def by_openai(url: str, model: str) -> Ask:
    """Chat completions, each streamed."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(messages: list[dict[str, Any]]) -> tuple[str, int]:
        system: Any = [{"role": "system", "content": HEAD}, *messages]
        with client.chat.completions.stream(
            model=model,
            messages=system,
            max_completion_tokens=TOKENS,
            stream_options={"include_usage": True},
        ) as stream:
            found: Any = stream.get_final_completion()
            cached = found.usage.prompt_tokens_details.cached_tokens
            return found.choices[0].message.content or "", cached

    return ask


def by_responses(url: str, model: str) -> Ask:
    """Responses, each of which continues the previous one by its id."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    last: list[Any] = [openai.omit]

    def ask(messages: list[dict[str, Any]]) -> tuple[str, int]:
        found: Any = client.responses.create(
            model=model,
            instructions=HEAD,
            input=messages[-1]["content"],
            previous_response_id=last[0],
            max_output_tokens=TOKENS,
        )
        last[0] = found.id
        return found.output_text, found.usage.input_tokens_details.cached_tokens

    return ask


def by_anthropic(url: str, model: str) -> Ask:
    """Messages, each streamed, with cache hints that move along."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    hint = {"cache_control": {"type": "ephemeral"}}

    def ask(messages: list[dict[str, Any]]) -> tuple[str, int]:
        last = [{"type": "text", "text": messages[-1]["content"], **hint}]
        sent: Any = [*messages[:-1], {"role": "user", "content": last}]
        system: Any = [{"type": "text", "text": HEAD, **hint}]
        with client.messages.stream(
            model=model, system=system, messages=sent, max_tokens=TOKENS
        ) as stream:
            found = stream.get_final_message()
            said = "".join(block.text for block in found.content if block.type == "text")
            return said, found.usage.cache_read_input_tokens or 0

    return ask


def by_langchain(url: str, model: str) -> Ask:
    """LangChain's chat model, each answer streamed."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        max_tokens=TOKENS,
        max_retries=0,
        stream_usage=True,
    )

    def ask(messages: list[dict[str, Any]]) -> tuple[str, int]:
        whole: Any = None
        for piece in chat.stream([{"role": "system", "content": HEAD}, *messages]):
            whole = piece if whole is None else whole + piece
        return str(whole.content), whole.usage_metadata["input_token_details"]["cache_read"]

    return ask


def by_ollama(url: str, model: str) -> Ask:
    """Ollama's chat, each answer streamed, by the name that clients give to a model."""
    import ollama

    paths: list[str] = []

    def note(response: Any) -> None:
        paths.append(response.headers["x-cairn-path"])

    client = ollama.Client(host=url, event_hooks={"response": [note]})

    def ask(messages: list[dict[str, Any]]) -> tuple[str, int]:
        pieces = client.chat(
            model=f"{model}:latest",
            messages=[{"role": "system", "content": HEAD}, *messages],
            stream=True,
            keep_alive="5m",
            options={"num_predict": TOKENS},
        )
        *first, last = pieces
        if not last.done or not last.eval_count:
            raise SystemExit(f"the last line has no end: {last}")
        said = "".join(one.message.content or "" for one in first)
        return said, int(paths[-1] == "continuation")

    return ask


TALKS = {
    "openai": by_openai,
    "responses": by_responses,
    "anthropic": by_anthropic,
    "langchain": by_langchain,
    "ollama": by_ollama,
}


def main(library: str, url: str, model: str) -> None:
    """Hold the conversation."""
    ask = TALKS[library](url, model)
    messages: list[dict[str, Any]] = []
    for said in SAID:
        messages.append({"role": "user", "content": said})
        answer, cached = ask(messages)
        print(json.dumps({"said": answer, "cached": cached}), flush=True)
        messages.append({"role": "assistant", "content": answer or "…"})


if __name__ == "__main__":
    main(*sys.argv[1:])
