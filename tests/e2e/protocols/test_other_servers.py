"""
What clients of other servers send, to a whole server over a model with random weights: values and
fields that other servers take, addresses that only others have, and Ollama's API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from cairn.journal import events as ev
from tests.e2e.conftest import servers
from tests.support.models.random_model import make_random_model
from tests.support.processes.subprocess_server import (
    DEADLINE_S,
    Serving,
    assistant,
    eventually,
    user,
)

Body = dict[str, Any]

BLOCK = 16
MAX_TOKENS = 12
LATER_LAYER = re.compile(r"model\.layers\.[1-9]")
GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
COLOUR: Body = {
    "type": "object",
    "properties": {"c": {"enum": ["red", "blue"]}},
    "required": ["c"],
}
OPEN: Body = {**COLOUR, "additionalProperties": True}
CHAT, TEXTS, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)


def make_infill_model(directory: Path) -> Path:
    """The first layer of the random model, with the tokens by which models for code fill a gap."""
    make_random_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(list(GAP))
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = load_file(str(directory / "model.safetensors"))
    weights = {name: one for name, one in weights.items() if not LATER_LAYER.match(name)}
    rows = weights["model.embed_tokens.weight"]
    # Their rows are those of other tokens, so that they are likely neither more nor less.
    grown = rows.repeat([1] * (len(rows) - 1) + [1 + len(GAP)], axis=0)
    weights["model.embed_tokens.weight"] = grown
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "mlx"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config |= {"vocab_size": len(grown), "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that gives keep-alives often, and short answers. Its journal is verified."""
    folder = tmp_path_factory.mktemp("others")
    with servers(folder, make_infill_model(folder / "model")) as start:
        yield start(
            *("--block-tokens", BLOCK, "--heartbeat", 0.05, "--max-tokens", MAX_TOKENS),
            *("--min-cache-tokens", 0),
        )


def sent(server: Serving, path: str, headers: Any = None, **fields: Any) -> httpx.Response:
    """A response with the status 200."""
    url = f"{server.url}{path}"
    response = httpx.post(url, json=fields, headers=headers, timeout=DEADLINE_S)
    assert 200 == response.status_code, response.text
    return response


def post(server: Serving, path: str, **fields: Any) -> Any:
    """The body of an answer."""
    return sent(server, path, **fields).json()


def chat(server: Serving, *messages: Body, **fields: Any) -> Any:
    """A greedy chat completion without thoughts."""
    plain = {"temperature": 0, "enable_thinking": False}
    return post(server, CHAT, messages=list(messages), **plain | fields)


def said(answer: Any) -> str:
    """The text of the only choice of an answer."""
    (choice,) = answer["choices"]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def ollama(server: Serving, *messages: Body, **fields: Any) -> Any:
    """A greedy answer of Ollama's, as a whole, without thoughts."""
    options = {"temperature": 0, **fields.pop("options", {})}
    asked = {"stream": False, "think": False, "options": options, **fields}
    return post(server, "/api/chat", messages=list(messages), **asked)


def whole_blocks(tokens: int) -> int:
    """How many of the tokens are in whole blocks, which are reused on every machine."""
    return (tokens - 1) // BLOCK * BLOCK


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_tokens": -1}, {}),
        ({"max_completion_tokens": -1}, {}),
        ({"top_k": -1, "seed": 5, "temperature": 1}, {"seed": 5, "temperature": 1}),
        ({"top_p": 0, "seed": 5, "temperature": 1}, {"temperature": 0}),
        ({"stop": ""}, {}),
        ({"stop": ["", "no such text"]}, {}),
    ],
)
def test_values_mean_what_they_mean_elsewhere(server: Serving, theirs: Body, ours: Body):
    """The answer is that to a request which says the same in Cairn's values."""
    found, expected = (chat(server, user("Which way?"), **one) for one in (theirs, ours))
    assert MAX_TOKENS == found["usage"]["completion_tokens"]
    assert said(expected) == said(found)
    assert said(found)


# --- closed objects ------------------------------------------------------------------------------


def formats(schema: Body) -> list[Body]:
    """A schema as a format, in both forms."""
    return [
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}},
    ]


def texts_of(server: Serving, schema: Body, form: int) -> list[str]:
    """Some answers of a format, at a high temperature."""
    asked = {"temperature": 3, "max_tokens": 40, "response_format": formats(schema)[form]}
    return [said(chat(server, user("Which?"), seed=seed, **asked)) for seed in range(3)]


@pytest.mark.parametrize("form", [0, 1], ids=["json_object", "json_schema"])
def test_objects_of_a_format_are_closed(server: Serving, form: int):
    """An object has the named properties alone, unless its schema says that there may be more."""
    assert all(["c"] == list(json.loads(text)) for text in texts_of(server, COLOUR, form))
    assert any(text.count('"') > 4 for text in texts_of(server, OPEN, form))


def test_objects_of_calls_are_closed(server: Serving):
    """So are the arguments of calls that are required, in chat completions and in messages."""
    function = {"name": "paint", "parameters": COLOUR}
    asked = {"temperature": 3, "seed": 1, "max_tokens": 60, "tool_choice": "required"}
    answer = chat(
        server, user("Paint"), tools=[{"type": "function", "function": function}], **asked
    )
    called = answer["choices"][0]["message"]["tool_calls"]
    assert called
    assert all(["c"] == list(json.loads(one["function"]["arguments"])) for one in called)
    answer = post(
        server,
        MESSAGES,
        messages=[user("Paint")],
        tools=[{"name": "paint", "input_schema": COLOUR}],
        tool_choice={"type": "any"},
        temperature=1,
        seed=1,
        max_tokens=60,
    )
    blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert blocks
    assert all(["c"] == list(block["input"]) for block in blocks)


# --- an answer that the client began -------------------------------------------------------------


def test_an_answer_that_the_client_began_is_continued(server: Serving):
    """All protocols continue the same text with the same words, and the prompt ends with it."""
    begun = [user("Tell me of the pass."), assistant("The stone lies")]
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    whole = chat(server, *begun, **asked)
    marked = chat(server, begun[0], {**begun[1], "prefix": True})
    by_messages = post(server, MESSAGES, messages=begun, max_tokens=MAX_TOKENS, temperature=0)
    by_ollama = ollama(server, *begun)
    words = [said(whole), said(marked), by_ollama["message"]["content"]]
    words.append("".join(block["text"] for block in by_messages["content"]))
    assert 1 == len(set(words)), words
    tokens = post(server, "/tokenize", messages=begun, enable_thinking=False, **asked)["tokens"]
    assert len(tokens) == whole["usage"]["prompt_tokens"] == by_ollama["prompt_eval_count"]
    prompt = post(server, "/detokenize", tokens=tokens)["content"]
    assert prompt.endswith("The stone lies")
    again = chat(server, *begun)
    assert len(tokens) < again["usage"]["prompt_tokens"]


def test_the_turn_after_it_continues_the_session(server: Serving):
    """What the client began and what was written are one message then."""
    begun = [user("Tell me of the hut."), assistant("The hut stands")]
    first = chat(server, *begun, continue_final_message=True)
    server.wait_idle()
    joined = assistant(f"{begun[1]['content']}{said(first)}")
    later = chat(server, begun[0], joined, user("And then?"))
    cairn, usage = later["cairn"], first["usage"]
    assert (first["cairn"]["session"], "continuation") == (cairn["session"], cairn["path"])
    assert cairn["reused_tokens"] >= whole_blocks(usage["prompt_tokens"])


# --- completions ---------------------------------------------------------------------------------


def test_several_prompts_with_their_echoes(server: Serving):
    """Each answer is that to its prompt alone, after the prompt, also if it is token ids."""
    prompts = ["The path goes", "A cairn is"]
    ids = post(server, "/tokenize", content=prompts[1])["tokens"]
    plain = {"temperature": 0, "max_tokens": 6}
    alone = [said(post(server, TEXTS, prompt=one, **plain)) for one in prompts]
    both = post(server, TEXTS, prompt=[prompts[0], ids], echo=True, **plain)
    found = [choice["text"] for choice in both["choices"]]
    assert [f"{one}{text}" for one, text in zip(prompts, alone, strict=True)] == found
    assert 12 == both["usage"]["completion_tokens"]
    stream = sent(server, TEXTS, prompt=prompts, echo=True, stream=True, **plain).text
    pieces = [json.loads(one[6:]) for one in stream.split("\n\n") if one.startswith("data: {")]
    streamed = ["", ""]
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        streamed[choice["index"]] += choice["text"]
    assert found == streamed


def test_a_gap_is_filled(server: Serving):
    """The prompt has the model's tokens for a gap around the two texts, in Ollama's API too."""
    first, second, third = GAP
    written = f"{first}def path(stones):\n{second}\nreturn way\n{third}"
    assert 1 == post(server, "/tokenize", content=first)["count"]
    plain = {"temperature": 0, "max_tokens": 6}
    expected = post(server, TEXTS, prompt=written, **plain)
    asked = {"prompt": "def path(stones):\n", "suffix": "\nreturn way\n"}
    found = post(server, TEXTS, **asked, **plain)
    assert said(expected) == said(found)
    assert expected["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"]
    options = {"temperature": 0, "num_predict": 6}
    theirs = post(server, "/api/generate", **asked, options=options, stream=False)
    assert said(expected) == theirs["response"]


# --- further addresses ---------------------------------------------------------------------------


def test_a_count_equals_the_response(server: Serving):
    """The tokens that are counted are those of the request's prompt."""
    asked = {"instructions": "Be brief.", "input": "Which way to the pass?"}
    counted = post(server, f"{RESPONSES}/input_tokens", **asked)
    assert "response.input_tokens" == counted["object"]
    answer = post(server, RESPONSES, **asked, max_output_tokens=4)
    assert answer["usage"]["input_tokens"] == counted["input_tokens"]


def test_a_conversation_is_compacted_and_goes_on(server: Serving):
    """The items that replace it are what its user said and a summary, and can be sent back."""
    talk: list[Body] = [
        user("My hut has the code 4711."),
        assistant("Noted."),
        user("And what is the way?"),
    ]
    # By default this model draws, so it writes another summary each time, and about one answer in a
    # hundred ends before its limit. A greedy one is the same each time, and does not.
    greedy = {"temperature": 0}
    items = post(server, f"{RESPONSES}/compact", input=talk, **greedy)["output"]
    assert ["user", "user"] == [one["role"] for one in items if one["type"] == "message"]
    assert "compaction" == items[-1]["type"]
    onward = [*items, user("Go on.")]
    answer = post(server, RESPONSES, input=onward, max_output_tokens=4, **greedy)
    assert answer["usage"]["output_tokens"] == 4


def test_tokens_and_facts(server: Serving):
    """A text becomes tokens and comes back; the facts are those of the server."""
    text = "Über die Steine 石, 4711."
    tokens = post(server, "/tokenize", content=text)
    assert tokens["count"] == len(tokens["tokens"]) > 1
    assert text == post(server, "/detokenize", tokens=tokens["tokens"])["content"]
    props = httpx.get(f"{server.url}/props", timeout=DEADLINE_S).json()
    settings = props["default_generation_settings"]
    assert MAX_TOKENS == settings["params"]["n_predict"]
    assert server.health()["context_tokens"] == settings["n_ctx"] == tokens["max_model_len"]


def test_what_has_no_effect_is_in_a_header_and_once_in_the_log(server: Serving):
    """The header comes with every answer, the entry in the log once a conversation."""
    talk = [user("How high is the pass?")]
    headers = []
    for _ in range(2):
        asked = {"messages": talk, "temperature": 0, "enable_thinking": False, "guided_json": {}}
        response = sent(server, CHAT, {"user-agent": "app/1.0"}, **asked)
        headers.append(response.headers["x-cairn-warning"])
        answer = response.json()
        talk += [assistant(said(answer)), user("And then?")]
        server.wait_idle()
    assert ["ignored: guided_json"] * 2 == headers
    session = answer["cairn"]["session"]
    entries = [
        entry
        for entry in server.log()
        if entry["event"] == "fields without effect" and entry["session"] == session
    ]
    assert [["guided_json"]] == [entry["fields"] for entry in entries]
    assert "app" == entries[0]["client"]
    plain = sent(server, CHAT, messages=talk, max_tokens=1)
    assert "x-cairn-warning" not in plain.headers


@pytest.mark.parametrize(("client", "counts"), [("claude-cli/2.1.330", True), ("curl/8", False)])
def test_claude_code_gets_an_event_in_a_long_prefill(server: Serving, client: str, counts: bool):
    """Besides pings, which it does not count; the answer is not changed by it."""
    long = f"{client} " + "Each stone lies on the path, and the path goes over the hill. " * 500
    asked = {"messages": [user(long)], "max_tokens": 4, "temperature": 0, "stream": True}
    text = sent(server, MESSAGES, {"user-agent": client}, **asked).text
    found = [json.loads(one.partition("\ndata: ")[2]) for one in text.split("\n\n")[:-1]]
    kinds = [one["type"] for one in found]
    begun = kinds.index("message_start")
    assert "ping" in kinds[begun : kinds.index("content_block_start")]
    deltas = [one["delta"]["stop_reason"] for one in found if one["type"] == "message_delta"]
    assert "max_tokens" == deltas.pop()
    assert counts == bool(deltas)
    assert set() == set(deltas) - {None}
    assert "message_stop" == kinds[-1]


# --- Ollama --------------------------------------------------------------------------------------


def ollama_lines(server: Serving, path: str, **fields: Any) -> tuple[httpx.Response, list[Any]]:
    """A streamed answer, with its lines."""
    response = sent(server, f"/api/{path}", **fields)
    assert "application/x-ndjson" == response.headers["content-type"]
    return response, [json.loads(line) for line in response.text.splitlines()]


def test_a_conversation_of_ollamas_continues_its_session(server: Serving):
    """Turn by turn, and chat completions go on with it: the same text, and the same session."""
    talk = [{"role": "system", "content": "You know every cairn between the hut and the pass."}]
    sessions, known = set(), 0
    for turn, words in enumerate(("Where are you?", "And the way?", "And then?")):
        talk.append(user(words))
        options = {"temperature": 0, "num_ctx": 8192}
        asked = {"messages": talk, "model": "any:latest", "think": False, "options": options}
        response, lines = ollama_lines(server, "chat", **asked)
        *pieces, last = lines
        assert not any(one["done"] for one in pieces)
        text = "".join(one["message"]["content"] for one in pieces)
        assert (True, "length", "") == (
            last["done"],
            last["done_reason"],
            last["message"]["content"],
        )
        assert MAX_TOKENS == last["eval_count"]
        names = ("prompt_eval_duration", "eval_duration")
        assert 0 < sum(last[name] for name in names) == last["total_duration"]
        cairn = last["cairn"]
        assert "ignored: options.num_ctx" == response.headers["x-cairn-warning"]
        assert ("continuation" if turn else "new_session") == cairn["path"]
        assert known <= cairn["reused_tokens"] <= last["prompt_eval_count"]
        known = whole_blocks(last["prompt_eval_count"])
        sessions.add(cairn["session"])
        talk.append(assistant(text))
        server.wait_idle()
    assert 1 == len(sessions)
    later = chat(server, *talk, user("Thanks."))
    assert (later["cairn"]["session"], "continuation") == (*sessions, later["cairn"]["path"])
    assert "ollama.chat" in {event.protocol for event in server.events(ev.RequestReceived)}


def test_an_answer_of_ollamas_is_that_of_chat_completions(server: Serving):
    """Whole and streamed, and of a prompt; with its thoughts where it has some."""
    expected = chat(server, user("What is a cairn?"))
    whole = ollama(server, user("What is a cairn?"))
    assert said(expected) == whole["message"]["content"]
    asked = {"prompt": "What is a cairn?", "think": False, "options": {"temperature": 0}}
    _, lines = ollama_lines(server, "generate", **asked)
    assert said(expected) == "".join(one["response"] for one in lines)
    thought = chat(server, user("What is a cairn?"), enable_thinking=True)
    message = ollama(server, user("What is a cairn?"), think=True)["message"]
    ours = thought["choices"][0]["message"]
    assert ours["content"] == message["content"]
    assert ours.get("reasoning_content") == message.get("thinking")


def test_formats_and_tools_of_ollamas(server: Serving):
    """A format constrains the answer; tools are in the prompt, and calls and results come back."""
    options: Body = {"temperature": 3, "seed": 2, "num_predict": 40}
    found = ollama(server, user("Which?"), format=COLOUR, options=options)
    assert {"c"} == set(json.loads(found["message"]["content"]))
    options = {"temperature": 0, "num_predict": 40, "stop": ["}"]}
    any_object = ollama(server, user("Which?"), format="json", options=options)
    assert any_object["message"]["content"].lstrip().startswith("{")
    tool = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
    plain = ollama(server, user("Paint"))["prompt_eval_count"]
    offered = ollama(server, user("Paint"), tools=[tool])["prompt_eval_count"]
    call = {"function": {"name": "paint", "arguments": {"c": "red"}}}
    talk: list[Body] = [
        user("Paint"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_name": "paint"},
    ]
    assert plain < offered < ollama(server, *talk, tools=[tool])["prompt_eval_count"]


def test_what_ollamas_clients_read(server: Serving):
    """The model, in lists and by its name, and a version that clients take."""

    def get(path: str) -> Any:
        response = httpx.get(f"{server.url}/api/{path}", timeout=DEADLINE_S)
        assert 200 == response.status_code
        return response.json()

    (listed,), (loaded,) = get("tags")["models"], get("ps")["models"]
    assert listed["name"] == loaded["name"] == server.health()["model"]
    assert 0 < listed["size"] == loaded["size"]
    shown = post(server, "/api/show", model=f"{listed['name']}:latest")
    assert server.health()["context_tokens"] == shown["model_info"]["mlx.context_length"]
    assert {"completion", "tools", "thinking", "insert"} == set(shown["capabilities"])
    assert (0, 17, 6) < tuple(map(int, get("version")["version"].split(".")))


def test_a_model_is_unloaded_and_loaded_by_ollamas_clients(server: Serving):
    """A request without messages does that; the next one is answered all the same."""
    name = server.health()["model"]
    server.wait_idle()
    assert "unload" == post(server, "/api/chat", model=name, keep_alive=0)["done_reason"]

    def has(state: str) -> bool:
        return state == server.health()["models"][0]["state"]

    eventually(lambda: has("not_loaded"))
    assert "load" == post(server, "/api/generate", model=name)["done_reason"]
    eventually(lambda: has("loaded"))
    assert ollama(server, user("Are you there?"))["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("pull", {"model": "llama3.2"}, 404, "cairn pull"),
        ("embed", {"model": "any", "input": "x"}, 404, "no embedding model"),
        ("show", {"model": "llama3.2"}, 404, "'llama3.2' is not served"),
        ("chat", {"messages": [{**user("x"), "images": ["AAAA"]}]}, 400, "only text"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
        ("chat", {"messages": [user("path " * 40_000)]}, 400, "prompt is too long"),
    ],
)
def test_refusals_have_ollamas_form(
    server: Serving, path: str, body: Body, status: int, words: str
):
    """The error is a text that says what is wrong."""
    response = httpx.post(f"{server.url}/api/{path}", json=body, timeout=DEADLINE_S)
    assert status == response.status_code
    assert words in response.json()["error"]
