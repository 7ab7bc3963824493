"""The pages next to the protocols, and the border: addresses, methods, sizes, hosts."""

from __future__ import annotations

import html
import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import attrs
import httpx
import pytest
import structlog

from cairn.actors.errors import Broken, ModelNotLoaded, QueueFull
from cairn.actors.requests.messages import ContextUse
from cairn.engine.sampling import Sampling
from cairn.http.access.keys import Keys
from cairn.http.app import create_app
from cairn.http.openapi.document import OPERATIONS
from cairn.http.wire.checks import BODY_BYTES_MAX
from tests.http.conftest import Serve
from tests.http.fake_service import FACTS, FakeService

pytestmark = pytest.mark.trio

ASK = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
CHAT = "/v1/chat/completions"


async def get(service: FakeService, path: str, **options: Any) -> tuple[int, Any]:
    """The status and JSON of a page."""
    response = await create_app(service).test_client().get(path, **options)
    return response.status_code, json.loads(await response.get_data(as_text=True))


async def test_health():
    """
    The page has what runs, how full it is, and the journal's position; contexts are the caller's
    own.
    """
    service = FakeService()
    service.used = {
        "local": (ContextUse(session="agent/notes", tokens=96, left=4000),),
        "bob": (ContextUse(session="agent/bob", tokens=1, left=4095),),
    }
    assert (
        200,
        {
            "status": "ok",
            "model": FACTS.model,
            "fingerprint": FACTS.fingerprint,
            "context_tokens": 4096,
            "block_tokens": 64,
            "contexts": [{"session": "agent/notes", "tokens": 96, "left": 4000}],
            "models": [{"name": FACTS.model, "state": "loaded", "waiting": 0}],
            "started": FACTS.started_s,
            "sessions": {"idle": 3, "decoding": 1},
            "queue": {"queued": 2, "running": 1},
            "pool": {
                "slabs": 4,
                "slabs_total": 8,
                "bytes": 400,
                "bytes_total": 1000,
            },
            "blocks": {
                "count": 5,
                "bytes": 500,
                "bytes_total": 5000,
                "disk_count": 6,
                "disk_bytes": 600,
                "disk_bytes_total": 6000,
            },
            "memory": {
                "kv_live_bytes": 390,
                "kv_expected_bytes": 380,
                "weights_bytes": 1100,
                "active_bytes": 1500,
                "cache_bytes": 20,
            },
            "journal_position": 77,
            "journal_stall": None,
            "journal_head": f"77:{'7' * 64}",
            "journal_checkpoint": f"70:{'a' * 64}",
            "bugs": 1,
            "degraded": {},
            "admission_bug": None,
        },
    ) == await get(service, "/health")


async def test_health_of_a_closed_server():
    """A server that admits no requests says so by its status, with the bug."""
    service = FakeService()
    service.change(admission_bug="bug-1")
    status, body = await get(service, "/health")
    assert (503, "admission_closed", "bug-1") == (status, body["status"], body["admission_bug"])


async def test_health_of_a_degraded_server():
    """A bug has ended idle work, but requests are answered, so the status code is 200."""
    service = FakeService()
    service.change(degraded={"expiry": "bug-1"})
    status, body = await get(service, "/health")
    assert (200, "degraded", {"expiry": "bug-1"}) == (status, body["status"], body["degraded"])
    service.change(journal_stall="locked")
    assert "journal_stalled" == (await get(service, "/health"))[1]["status"]


async def test_models():
    """A model's name may contain a slash."""
    model = {
        "id": FACTS.model,
        "object": "model",
        "created": FACTS.started_s,
        "owned_by": "cairn",
        "type": "model",
        "display_name": FACTS.model,
        "created_at": f"{datetime.fromtimestamp(FACTS.started_s, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "cairn": {
            "kind": "chat",
            "state": "loaded",
            "waiting": 0,
            "aliases": [],
            "fingerprint": FACTS.fingerprint,
            "context_tokens": FACTS.context_tokens,
        },
    }
    page = {"has_more": False, "first_id": FACTS.model, "last_id": FACTS.model}
    found = await get(FakeService(), "/v1/models")
    assert (200, {"object": "list", "data": [model], **page}) == found
    assert (200, model) == await get(FakeService(), f"/v1/models/{FACTS.model}")
    status, body = await get(FakeService(), "/v1/models/unknown/model")
    assert (404, "model_not_found") == (status, body["error"]["code"])
    assert "'unknown/model'" in body["error"]["message"]


async def test_several_models():
    """All are listed, with their state, and each is found by its name and its aliases."""
    service = FakeService()
    service.aliases = ("gpt-4o",)
    other = attrs.evolve(FACTS, model="other", fingerprint="", context_tokens=0)
    service.others = {"other": other}
    _, body = await get(service, "/v1/models")
    assert [FACTS.model, "other"] == [model["id"] for model in body["data"]]
    assert (200, body["data"][0]) == await get(service, "/v1/models/gpt-4o")
    assert (200, body["data"][1]) == await get(service, "/v1/models/other")
    assert {
        "kind": "chat",
        "state": "not_loaded",
        "waiting": 1,
        "aliases": [],
        "fingerprint": None,
        "context_tokens": None,
    } == body["data"][1]["cairn"]
    status, body = await get(service, "/v1/models/third")
    assert 404 == status
    assert f"send one of {FACTS.model!r}, 'other', or no model" in body["error"]["message"]
    _, health = await get(service, "/health")
    assert {"name": "other", "state": "not_loaded", "waiting": 1} == health["models"][1]


async def test_a_model_that_is_not_loaded_has_its_own_defaults():
    """
    Fields that are left out have the defaults of the named model, and unknown names are reported.
    """
    service = FakeService()
    cool = attrs.evolve(FACTS, model="cool", defaults=Sampling(temperature=0.25))
    service.others = {"cool": cool}
    client = create_app(service, strict_model_names=True).test_client()
    for name, status in (("cool", 200), (FACTS.model, 200), ("none", 404)):
        body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
        response = await client.post(CHAT, json=body, headers={"host": "localhost"})
        assert status == response.status_code
    temperatures = [command.sampling.temperature for command in service.commands]
    assert [0.25, FACTS.defaults.temperature] == temperatures


async def test_a_body_that_is_nested_too_deeply_where_there_are_several_models():
    """The model's name is looked for before the body is read; the body is refused all the same."""
    service = FakeService()
    service.others = {"cool": attrs.evolve(FACTS, model="cool")}
    client = create_app(service).test_client()
    response = await client.post(
        CHAT, data=b'{"x":' + b"[" * 100_000, headers={"host": "localhost"}
    )
    assert 400 == response.status_code


async def test_a_model_that_could_not_be_loaded():
    """It is a server error, with a time to retry."""
    refusal = ModelNotLoaded("not loaded", retry_after_s=30)
    client = create_app(FakeService(refusal=refusal)).test_client()
    response = await client.post(CHAT, data=ASK, headers={"host": "localhost"})
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (503, "30") == (response.status_code, response.headers["retry-after"])
    assert ("model_not_loaded", "model") == (error["code"], error["param"])


async def test_how_to_connect():
    """Readers see a command to copy, with the address that they used, and nothing that runs."""
    service = FakeService()
    service.facts = attrs.evolve(FACTS, model="<script>x</script>")
    client = create_app(service).test_client()
    response = await client.get("/explorer/connect", headers={"host": "127.0.0.1:8080"})
    text = await response.get_data(as_text=True)
    assert "text/html; charset=utf-8" == response.content_type
    assert "curl -N http://127.0.0.1:8080/v1/chat/completions" in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert "default-src 'none'" in response.headers["content-security-policy"]


async def test_the_api_as_a_page():
    """It has all addresses of the API."""
    client = create_app(FakeService()).test_client()
    text = await (await client.get("/explorer/api")).get_data(as_text=True)
    assert [] == [path for _, path in OPERATIONS if f"<code>{path}</code>" not in text]


@pytest.mark.parametrize("with_keys", [False, True])
async def test_how_to_connect_to_a_server_with_keys(with_keys: bool):
    """
    If a key is required, the command to copy has one, and the page does not say that any will do.
    """
    keys = Keys([("alice", "a key of alice's")]) if with_keys else None
    client = create_app(FakeService(), keys=keys).test_client()
    response = await client.get("/explorer/connect", headers={"x-api-key": "a key of alice's"})
    text = await response.get_data(as_text=True)
    assert with_keys == ("authorization: Bearer $CAIRN_API_KEY" in html.unescape(text))
    assert with_keys == ("your API key" in text)
    assert with_keys != ("No key is needed" in text)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("get", "/nothing", 404, "not_found"),
        ("post", "/v1/completion", 404, "not_found"),
        ("get", CHAT, 405, "method_not_allowed"),
        ("delete", "/health", 405, "method_not_allowed"),
        ("post", "/", 405, "method_not_allowed"),
    ],
)
async def test_wrong_address_or_method(method: str, path: str, status: int, code: str):
    """An unknown address is an envelope too; a wrong method names the right one."""
    client = create_app(FakeService()).test_client()
    response = await getattr(client, method)(path)
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (status, code, "invalid_request_error") == (
        response.status_code,
        error["code"],
        error["type"],
    )
    assert (status == 405) == ("allow" in response.headers)
    if status == 405:
        allowed = response.headers["allow"]
        methods = " and".join(allowed.rsplit(",", 1))
        assert f"this address accepts only {methods}" == error["message"]
        takes = {CHAT: "POST, OPTIONS", "/health": "GET, HEAD, OPTIONS", "/": "GET, HEAD, OPTIONS"}
        assert takes[path] == allowed


async def message_at(path: str, *, method: str = "post") -> str:
    """The error message at an unknown address, in the form of its protocol."""
    client = create_app(FakeService()).test_client()
    response = await getattr(client, method)(path)
    body = json.loads(await response.get_data(as_text=True))
    assert (404, "not_found") == (response.status_code, body["error"]["code"])
    # Anthropic's clients request messages, whatever their base URL is.
    assert ("messages" in path) == ("type" in body)
    message: str = body["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("path", "meant", "fault"),
    [
        ("/v1/v1/chat/completions", CHAT, "has one /v1 too many"),
        ("/v1/v1/v1/completions", "/v1/completions", "has one /v1 too many"),
        ("/v1/v1/messages", "/v1/messages", "has one /v1 too many"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens", "has one /v1 too many"),
        ("/v1/v1/models/any/name", "/v1/models/any/name", "has one /v1 too many"),
        ("/chat/completions", CHAT, "lacks /v1"),
        ("/messages", "/v1/messages", "lacks /v1"),
        ("/responses", "/v1/responses", "lacks /v1"),
        ("/responses/resp_1/input_items", "/v1/responses/resp_1/input_items", "lacks /v1"),
        ("/completions", "/v1/completions", "lacks /v1"),
        ("/models", "/v1/models", "lacks /v1"),
    ],
)
async def test_a_base_url_with_another_v1(path: str, meant: str, fault: str):
    """The error names the mistake and the address that was meant, for any method."""
    expected = f"nothing found at {path!r}: the client's base URL {fault}; the address is {meant!r}"
    assert [expected] * 2 == [await message_at(path, method=method) for method in ("get", "post")]


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/v1", "/v1/rerank", "/v1/v1/rerank", "/v2/models", "/nothing"]
)
async def test_nothing_at_an_address(path: str):
    """If no /v1 would help, the error names the requested address and where to look."""
    assert f"nothing found at {path!r}; GET / lists the addresses" == await message_at(path)


async def test_an_address_is_quoted_in_the_message():
    """It is cut, and control characters are escaped, also in the address that was meant."""
    message = await message_at("/" + quote("\x1b[2J\n") + "x" * 5000)
    assert f"nothing found at '/\\x1b[2J\\n{'x' * 194}'; GET / lists the addresses" == message
    message = await message_at("/models/" + quote("\x1b[2J") + "x" * 5000)
    assert "'/v1/models/\\x1b[2Jxxx" in message
    assert len(message) < 600


async def test_large_body_is_refused(serve: Serve):
    """
    A body over the limit is a 413, whether or not its length was announced, and is not passed on.
    """
    service = FakeService()
    app = create_app(service)
    app.config["MAX_CONTENT_LENGTH"] = 1000
    response = await app.test_client().post(CHAT, data=b" " * 1001)
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (413, "request_too_large") == (response.status_code, error["code"])
    async with app.test_client().request(CHAT, method="POST") as connection:
        for _ in range(3):
            await connection.send(b" " * 500)
        await connection.send_complete()
        response = await connection.as_response()
    assert 413 == response.status_code
    assert [] == service.commands


async def test_large_body_on_the_wire(serve: Serve, client: httpx.AsyncClient):
    """The limit of a served app is 32 MiB."""
    service = FakeService()
    url = await serve(service)
    start, end = ASK.encode().split(b"Hello")
    fits = start + b"x" * (BODY_BYTES_MAX - len(start) - len(end)) + end
    assert (32 * 1024 * 1024, 200) == (
        len(fits),
        (await client.post(url + CHAT, content=fits)).status_code,
    )
    response = await client.post(url + CHAT, content=fits + b" ")
    assert (413, "request_too_large", "the body is larger than 32 MiB; send a smaller one") == (
        response.status_code,
        response.json()["error"]["code"],
        response.json()["error"]["message"],
    )


HOSTS = [
    ("localhost", (), 200),
    ("localhost:8080", (), 200),
    ("LocalHost.:8080", (), 200),
    ("127.0.0.1", (), 200),
    ("192.168.1.7:8080", (), 200),
    ("[::1]", (), 200),
    ("[::1]:8080", (), 200),
    ("evil.example", (), 403),
    ("evil.example:8080", (), 403),
    ("localhost.evil.example", (), 403),
    ("127.0.0.1.evil.example", (), 403),
    ("box.lan:8080", ("box.lan",), 200),
    ("BOX.lan", ("Box.LAN",), 200),
    ("other.lan", ("box.lan",), 403),
    ("evil.example", ("*",), 200),
    ("localhost:", (), 200),
]


@pytest.mark.parametrize(("host", "allowed", "status"), HOSTS)
async def test_hosts(host: str, allowed: tuple[str, ...], status: int):
    """Addresses and allowed names pass; a name that a web page made up does not."""
    service = FakeService()
    client = create_app(service, hosts_allowed=allowed).test_client()
    response = await client.post(CHAT, data=ASK, headers={"host": host})
    assert status == response.status_code
    assert (1 if status == 200 else 0) == len(service.commands)
    if status == 403:
        error = json.loads(await response.get_data(as_text=True))["error"]
        assert "host_not_allowed" == error["code"]


ORIGINS = [
    ("http://localhost:8000", "localhost:8000", (), 200),
    ("http://localhost:3000", "localhost:8000", (), 200),
    ("http://LocalHost", "localhost.:8000", (), 200),
    ("http://127.0.0.1:8000", "127.0.0.1:8000", (), 200),
    ("http://[::1]:8000", "[::1]:8000", (), 200),
    ("https://evil.example", "localhost:8000", (), 403),
    ("https://localhost.evil.example", "localhost:8000", (), 403),
    ("http://6.6.6.6", "127.0.0.1:8000", (), 403),
    ("http://localhost:8000", "127.0.0.1:8000", (), 403),
    ("http://localhost@evil.example", "localhost", (), 403),
    ("http://[::1", "localhost", (), 403),
    ("null", "localhost", (), 403),
    ("null", "null", ("null",), 403),
    ("", "localhost", (), 403),
    ("https://Box.LAN", "localhost", ("box.lan",), 200),
    ("https://other.lan", "localhost", ("box.lan",), 403),
    ("https://evil.example", "localhost", ("*",), 200),
]


@pytest.mark.parametrize(("origin", "host", "allowed", "status"), ORIGINS)
async def test_origins(origin: str, host: str, allowed: tuple[str, ...], status: int):
    """
    A page from the server's own host or an allowed one may call; another page may not, even
    blindly.
    """
    service = FakeService()
    client = create_app(service, hosts_allowed=allowed).test_client()
    # What a form on a page can send: a browser sends no preflight for it.
    headers = {"host": host, "origin": origin, "content-type": "text/plain"}
    response = await client.post(CHAT, data=ASK, headers=headers)
    assert status == response.status_code
    assert (1 if status == 200 else 0) == len(service.commands)
    if status == 403:
        error = json.loads(await response.get_data(as_text=True))["error"]
        assert "origin_not_allowed" == error["code"]


@pytest.mark.parametrize(
    ("origin", "site", "hint"),
    [
        ("https://chat.example", "cross-site", "allow this origin (--cors ORIGIN)"),
        ("http://localhost:3000", None, "allow this origin (--cors ORIGIN)"),
        ("https://box.lan", "same-site", "allow this origin (--cors ORIGIN)"),
        ("https://box.lan", "same-origin", "allow the page's host name (--allow-host NAME)"),
        ("null", "cross-site", "serve the page from one, and ask the server's operator"),
        ("app://notes", None, "only http and https origins can be allowed"),
    ],
)
async def test_how_to_allow_a_page(origin: str, site: str | None, hint: str):
    """
    A page from another origin needs --cors. One that calls its own host is behind a proxy, and
    needs --allow-host; one with an invalid origin must be opened from elsewhere.
    """
    headers = {"host": "127.0.0.1:8000", "origin": origin}
    headers |= {"sec-fetch-site": site} if site else {}
    status, body = await get(FakeService(), "/health", headers=headers)
    assert (403, "origin_not_allowed") == (status, body["error"]["code"])
    message = body["error"]["message"]
    assert message.startswith(f"pages from {origin!r} may not call this server; ")
    assert hint in message
    options = {name for name in ("--cors", "--allow-host") if name in message}
    assert {"--allow-host" if site == "same-origin" else "--cors"} == options


SECRET = "a word of the client's"
REFUSED = [
    ("post", CHAT, {"n": 17}, None, 400, "invalid_value", "n"),
    ("post", CHAT, {"tool_choice": SECRET}, None, 400, "invalid_value", "tool_choice"),
    ("get", "/not\nhere?q=a", {}, None, 404, "not_found", None),
    ("get", CHAT, {}, None, 405, "method_not_allowed", None),
    ("post", CHAT, {}, QueueFull("full", retry_after_s=5), 429, "queue_full", None),
    ("post", CHAT, {}, Broken("bug-1"), 500, "kv_cache_inv_violation", None),
    ("post", CHAT, {}, RuntimeError(SECRET), 500, "internal_error", None),
]


@pytest.mark.parametrize(
    ("method", "path", "fields", "refusal", "status", "code", "param"),
    REFUSED,
    ids=[row[5] for row in REFUSED],
)
async def test_refusals_leave_a_line_and_a_count(
    method: str,
    path: str,
    fields: dict[str, Any],
    refusal: Exception | None,
    status: int,
    code: str,
    param: str | None,
):
    """Every error answer is one line at level info without the client's text, and is counted."""
    client = create_app(FakeService(refusal=refusal)).test_client()
    body = {"messages": [{"role": "user", "content": SECRET}], **fields}
    with structlog.testing.capture_logs() as logs:
        response = await getattr(client, method)(
            quote(path, safe="/?="), **({"data": json.dumps(body)} if method == "post" else {})
        )
    assert status == response.status_code
    (line,) = [entry for entry in logs if entry["log_level"] == "info"]
    bug = {"bug_id": refusal.bug_id} if isinstance(refusal, Broken) else {}
    assert (
        bug
        | {
            "event": "request refused",
            "log_level": "info",
            "status": status,
            "code": code,
            "param": param,
            "path": quote(path.split("?")[0]),
        }
        == line
    )
    text = await (await client.get("/metrics")).get_data(as_text=True)
    assert 'cairn_requests_total{outcome="refused"} 1.0' in text.splitlines()


async def test_good_answers_are_no_refusals():
    """The control: a good answer has no such line and no count."""
    client = create_app(FakeService()).test_client()
    with structlog.testing.capture_logs() as logs:
        assert 200 == (await client.post(CHAT, data=ASK)).status_code
    assert [] == logs
    text = await (await client.get("/metrics")).get_data(as_text=True)
    assert 'cairn_requests_total{outcome="refused"} 0.0' in text.splitlines()


async def test_error_in_a_page_is_an_envelope():
    """An unexpected error is a 500 with an id, also outside of the protocols."""
    service = FakeService()
    service.figures = None  # type: ignore[assignment]
    status, body = await get(service, "/health")
    assert (500, "internal_error") == (status, body["error"]["code"])
    assert "NoneType" not in body["error"]["message"]


@pytest.mark.parametrize("strict", [False, True])
async def test_another_models_name(strict: bool):
    """
    Any name is accepted, and the answer names the model that served it. With strict names another
    one is a 404 that lists the models; the right name, or none, is accepted.
    """
    service = FakeService()
    client = create_app(service, strict_model_names=strict).test_client()

    async def ask(**fields: Any) -> tuple[int, Any]:
        body = json.dumps({**json.loads(ASK), **fields})
        response = await client.post(CHAT, data=body)
        return response.status_code, json.loads(await response.get_data(as_text=True))

    for fields in ({}, {"model": None}, {"model": ""}, {"model": FACTS.model}):
        status, answer = await ask(**fields)
        assert (200, FACTS.model) == (status, answer["model"])
    status, answer = await ask(model="gpt-9")
    if not strict:
        assert (200, FACTS.model) == (status, answer["model"])
        assert "gpt-9" == service.commands[-1].requested_model
        return
    error = answer["error"]
    assert (404, "model_not_found", "model") == (status, error["code"], error["param"])
    assert "'gpt-9'" in error["message"]
    assert repr(FACTS.model) in error["message"]
    assert "invalid_request_error" == error["type"]
    assert 4 == len(service.commands)
