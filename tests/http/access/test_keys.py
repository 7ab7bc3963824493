"""API keys, tenants, and what a caller without a key is shown."""

from __future__ import annotations

import hmac
import inspect
import json
from typing import Any

import attrs
import httpx
import openai
import pytest
import structlog
import trio

from cairn.actors.agents.messages import AgentService
from cairn.actors.errors import Broken, CannotRecord
from cairn.actors.requests.messages import Generate
from cairn.http.access import keys as access
from cairn.http.access.keys import Keys
from cairn.http.app import create_app
from cairn.http.explorer import routes as explorer
from cairn.http.server.listen import bind_socket, serve_http
from cairn.http.service import Service
from cairn.journal.events import BlockEvicted, Event, RequestRejected, TokensEmitted
from tests.http.fake_service import ACCEPTED, ANSWER, FACTS, FINISHED, FakeService, Hold

pytestmark = pytest.mark.trio

ALICE, BOB = "alice's key, as long as keys are", "bob's key, which is another one"
NEW = "alice's next key, while both hold"
KEYS = Keys([("alice", ALICE), ("bob", BOB), ("alice", NEW)])
ASK = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"

Headers = list[tuple[str, str]]


async def ask(service: FakeService, headers: Headers, keys: Keys | None = KEYS) -> Any:
    """A response to a chat completion with these headers."""
    client = create_app(service, keys=keys).test_client()
    return await client.post(CHAT, data=json.dumps(ASK), headers=headers)


GOOD: list[tuple[Headers, str]] = [
    ([("Authorization", f"Bearer {ALICE}")], "alice"),
    ([("authorization", f"bearer  {BOB} ")], "bob"),
    ([("x-api-key", ALICE)], "alice"),
    ([("X-API-Key", f" {BOB}")], "bob"),
    ([("x-api-key", NEW)], "alice"),
    ([("authorization", f"Bearer {ALICE}"), ("x-api-key", ALICE)], "alice"),
    ([("authorization", f"Bearer {ALICE}"), ("x-api-key", NEW)], "alice"),
    ([("authorization", "Bearer none"), ("x-api-key", BOB)], "bob"),
    ([("authorization", f"Bearer {BOB}"), ("x-api-key", "none")], "bob"),
]


@pytest.mark.parametrize(("headers", "tenant"), GOOD)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_key_is_its_tenant(headers: Headers, tenant: str, stream: bool):
    """A key may come in either header; the service gets its tenant."""
    service = FakeService()
    client = create_app(service, keys=KEYS).test_client()
    body = json.dumps({**ASK, "stream": stream})
    assert 200 == (await client.post(CHAT, data=body, headers=headers)).status_code
    assert [tenant] == service.tenants


BAD: list[tuple[Headers, str]] = [
    ([], "requires an API key"),
    ([("authorization", "Bearer ")], "requires an API key"),
    ([("authorization", ALICE)], "requires an API key"),
    ([("authorization", f"Basic {ALICE}")], "requires an API key"),
    ([("x-api-key", "")], "requires an API key"),
    ([("authorization", f"Bearer {ALICE}x")], "unknown API key"),
    ([("authorization", f"Bearer {ALICE[:-1]}")], "unknown API key"),
    ([("x-api-key", ALICE.upper())], "unknown API key"),
    ([("x-api-key", "größe")], "unknown API key"),
    ([("authorization", f"Bearer {ALICE}"), ("x-api-key", BOB)], "two tenants"),
]


@pytest.mark.parametrize(("headers", "text"), BAD)
async def test_no_key_no_answer(headers: Headers, text: str):
    """
    A missing, wrong or ambiguous key is a 401 in the envelope, and the request reaches no service.
    Neither the answer nor the log contains the key.
    """
    service = FakeService()
    with structlog.testing.capture_logs() as logs:
        response = await ask(service, headers)
    body = await response.get_data(as_text=True)
    error = json.loads(body)["error"]
    assert (401, "invalid_api_key", "invalid_request_error", None) == (
        response.status_code,
        error["code"],
        error["type"],
        error["param"],
    )
    assert text in error["message"]
    assert "Bearer" == response.headers["www-authenticate"]
    assert [] == service.commands
    # A client may be guessing keys.
    assert [(401, "invalid_api_key", "warning", "<local>")] == [
        (line["status"], line["code"], line["log_level"], line["address"]) for line in logs
    ]
    for secret in (ALICE, ALICE[:-1], ALICE.upper(), BOB, "größe"):
        assert secret not in body + str(logs)


async def test_every_address_requires_a_key():
    """
    All routes, and unknown addresses, are closed without a key, so that a new adapter is closed
    from the start. Only the health endpoint is open, and what a browser needs to log in.
    """
    application = create_app(FakeService(), keys=KEYS)
    client: Any = application.test_client()
    opened = {"get_health", *explorer.OPEN}
    rules = [rule for rule in application.url_map.iter_rules() if rule.endpoint not in opened]
    assert {"/", CHAT, MESSAGES, COUNT, "/metrics", "/v1/models"} <= {rule.rule for rule in rules}
    addresses = [(rule.rule.replace("<path:name>", "x"), rule.methods) for rule in rules]
    for path, methods in [*addresses, ("/nothing", {"GET"}), (CHAT, {"PATCH"})]:
        for method in methods or ():
            response = await client.open(path, method=method)
            assert (path, 401) == (path, response.status_code)
            if path == "/explorer/live/stream":
                continue  # it has no end
            known = await client.open(path, method=method, headers={"x-api-key": ALICE})
            assert 401 != known.status_code


@pytest.mark.parametrize(
    ("figures", "status", "code"),
    [
        ({}, "ok", 200),
        ({"degraded": {"expiry": "bug-1"}}, "degraded", 200),
        ({"admission_bug": "bug-1"}, "admission_closed", 503),
        ({"journal_stall": "locked"}, "journal_stalled", 503),
    ],
)
async def test_health_without_a_key(figures: dict[str, Any], status: str, code: int):
    """Without a valid key, a caller learns only whether the server is well."""
    service = FakeService()
    service.change(**figures)
    client = create_app(service, keys=KEYS).test_client()
    for headers in ({}, {"x-api-key": "none"}):
        response = await client.get("/health", headers=headers)
        body = json.loads(await response.get_data(as_text=True))
        assert (code, {"status": status, "api_key": "required"}) == (response.status_code, body)
    response = await client.get("/health", headers={"x-api-key": BOB})
    body = json.loads(await response.get_data(as_text=True))
    assert (code, FACTS.model) == (response.status_code, body["model"])


@pytest.mark.parametrize("headers", [[], [("authorization", "Bearer any")], [("x-api-key", ALICE)]])
async def test_without_keys_every_caller_is_local(headers: Headers):
    """
    A server without keys ignores any key that a client sends: official clients always send one.
    """
    service = FakeService()
    assert 200 == (await ask(service, headers, keys=None)).status_code
    assert ["local"] == service.tenants


async def test_an_adapter_cannot_choose_the_tenant():
    """Neither a command nor a method of the service that adapters hold takes a tenant."""
    assert "tenant" not in attrs.fields_dict(Generate)
    for protocol in (Service, AgentService):
        for name, method in vars(protocol).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                assert "tenant" not in inspect.signature(method).parameters


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_anthropics_clients_have_a_tenant_too(path: str):
    """
    Messages and counts are served for the key's tenant; without a key the error is Anthropic's.
    """
    service = FakeService()
    client = create_app(service, keys=KEYS).test_client()
    body = json.dumps({**ASK, "max_tokens": 3})
    assert 200 == (await client.post(path, data=body, headers={"x-api-key": BOB})).status_code
    assert ["bob"] == service.tenants
    response = await client.post(path, data=body, headers={"x-api-key": "none"})
    refusal = json.loads(await response.get_data(as_text=True))
    assert (401, "Bearer") == (response.status_code, response.headers["www-authenticate"])
    assert ("error", "authentication_error") == (refusal["type"], refusal["error"]["type"])
    assert "invalid_api_key" == refusal["error"]["code"]
    assert 1 == len(service.commands)


async def test_there_is_no_service_outside_of_a_request():
    """A caller, and thus a tenant, exists only while a request is handled."""
    with pytest.raises(RuntimeError):
        access.service_of_caller(FakeService())


async def test_requests_at_once_are_each_their_own():
    """Two requests at the same time, and two in a row, are not mixed up."""
    held = Hold()
    service = FakeService([ACCEPTED, held, FINISHED], ANSWER)
    client = create_app(service, keys=KEYS).test_client()

    async def first() -> None:
        await client.post(CHAT, data=json.dumps(ASK), headers={"x-api-key": ALICE})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await held.reached.wait()
        await client.post(CHAT, data=json.dumps(ASK), headers={"x-api-key": BOB})
        held.released.set()
    await client.post(CHAT, data=json.dumps(ASK), headers={"x-api-key": ALICE})
    assert ["alice", "bob", "alice"] == service.tenants


@pytest.mark.parametrize("given", [ALICE, NEW, BOB, "none"])
async def test_every_known_key_is_compared(given: str, monkeypatch: pytest.MonkeyPatch):
    """A key is compared with all known keys, whether it matches the first, the last or none."""
    compared: list[bytes] = []
    same = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return same(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    KEYS.owners([given])
    assert 3 == len(set(compared)) == len(compared)


async def test_keys_are_not_stored():
    """Only the digest of a key is kept, and no object shows the key itself."""
    held = repr(vars(KEYS)) + repr(KEYS)
    assert ("alice", "bob") == KEYS.tenants
    for key in (ALICE, BOB, NEW):
        assert key not in held


@pytest.mark.parametrize("refusal", [Broken("bug-1"), CannotRecord()])
async def test_a_refusal_names_the_tenant_in_the_log(refusal: Exception):
    """The log names the tenant of a refused request, except the default tenant."""
    with structlog.testing.capture_logs() as logs:
        await ask(FakeService(refusal=refusal), [("x-api-key", ALICE)])
        await ask(FakeService(refusal=refusal), [], keys=None)
    lines = [line for line in logs if line["event"] == "request refused"]
    assert ["alice", None] == [line.get("tenant") for line in lines]


OPERATOR = "the operator's key, for the tenant local"


def emitted(session: str) -> Event:
    """Two tokens of a session."""
    return TokensEmitted(session=session, request="r", first=0, emitted=2, ids=(1, 2), text="ab")


async def seen(service: FakeService, path: str, key: str, keys: Keys, *events: Event) -> str:
    """What the owner of a key gets at a path, after these events."""
    client = create_app(service, keys=keys).test_client()
    service.commit(*events)
    await client.post(CHAT, data="{", headers={"x-api-key": BOB})  # refused
    response = await client.get(path, headers={"x-api-key": key})
    text: str = await response.get_data(as_text=True)
    return text


async def test_the_metrics_of_a_tenant_are_its_own():
    """
    A tenant sees the counters of its own requests and nothing of the machine; the operator's key,
    that of the tenant `local`, sees all, and so does the only tenant of a server.
    """
    events = (
        emitted("@alice/notes"),
        emitted("@bob/notes"),
        emitted("notes"),
        RequestRejected(request="r", tenant="alice", status=429, code="queue_full"),
        BlockEvicted(key="k", bytes=1, memory_blocks=0, memory_bytes=0, reason="space"),
    )
    three = Keys([("alice", ALICE), ("bob", BOB), ("local", OPERATOR)])
    alice, bob, all_ = [
        (await seen(FakeService(), "/metrics", key, three, *events)).splitlines()
        for key in (ALICE, BOB, OPERATOR)
    ]
    for found, tokens, rejected, refused in ((alice, 2, 1, 0), (bob, 2, 0, 1), (all_, 6, 1, 1)):
        assert f"cairn_tokens_emitted_total {tokens}.0" in found
        assert f'cairn_requests_total{{outcome="rejected"}} {rejected}.0' in found
        assert f'cairn_requests_total{{outcome="refused"}} {refused}.0' in found
    shared = ("cairn_blocks_evicted_total 1.0", "cairn_journal_position ", "cairn_queue_depth ")
    for name in shared:
        assert any(line.startswith(name) for line in all_)
        assert not any(line.startswith(name) for line in (*alice, *bob))
    only = await seen(FakeService(), "/metrics", BOB, Keys([("bob", BOB)]), *events)
    assert "cairn_tokens_emitted_total 6.0" in only.splitlines()


async def test_the_health_of_a_tenant_has_no_figures_of_others():
    """What other tenants have a part in is left out; the operator's key shows it."""
    three = Keys([("alice", ALICE), ("bob", BOB), ("local", OPERATOR)])
    alice = json.loads(await seen(FakeService(), "/health", ALICE, three))
    everything = json.loads(await seen(FakeService(), "/health", OPERATOR, three))
    assert {
        *("status", "model", "fingerprint", "context_tokens", "block_tokens", "contexts"),
        *("models", "started", "journal_stall", "admission_bug"),
    } == set(alice)
    assert {
        "sessions",
        "queue",
        "pool",
        "blocks",
        "memory",
        "journal_position",
        "journal_head",
        "journal_checkpoint",
        "bugs",
        "degraded",
    } == set(everything) - set(alice)
    assert [{"name", "state"}] == [set(model) for model in alice["models"]]
    page = "/explorer/live"
    assert "in the queue" not in await seen(FakeService(), page, ALICE, three)
    assert "in the queue" in await seen(FakeService(), page, OPERATOR, three)


@pytest.mark.parametrize("key", [ALICE, "sk-of-another-service-000"])
@pytest.mark.parametrize("path", ["/{}", "/v1/{}/models", "/v1/responses/{}"])
async def test_a_key_in_the_path_is_not_logged(key: str, path: str):
    """A client that sends a key in the path is refused, and the log does not have the key."""
    client = create_app(FakeService(), keys=KEYS).test_client()
    with structlog.testing.capture_logs() as logs:
        refused = await client.get(path.format(key))
        unknown = await client.get(f"/v2/{key}", headers={"x-api-key": ALICE})
    assert [401, 404] == [refused.status_code, unknown.status_code]
    assert [path.format("..."), "/v2/..."] == [line["path"] for line in logs]
    assert key not in repr(logs)


async def test_official_client(nursery: trio.Nursery):
    """The OpenAI client recognises a refused key; the metrics name no tenant."""
    service, shutdown = FakeService(), trio.Event()

    async def serve(*, task_status: trio.TaskStatus[str]) -> None:
        app = create_app(service, keys=KEYS)
        await serve_http(
            app,
            bind_socket("127.0.0.1", 0),
            shutdown=shutdown,
            on_ready=task_status.started,
            on_stop=app.streams.stop,
            grace_s=1.0,
        )

    url = await nursery.start(serve)

    def call(key: str) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=60) as api:
            return api.chat.completions.create(model="any", **ASK)  # type: ignore[call-overload]

    with pytest.raises(openai.AuthenticationError) as caught:
        await trio.to_thread.run_sync(call, "none")
    assert "invalid_api_key" == caught.value.code
    assert "Grüße!" == (await trio.to_thread.run_sync(call, BOB)).choices[0].message.content
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"{url}/metrics", headers={"x-api-key": BOB})).text
    assert 'cairn_requests_total{outcome="refused"} 0.0' in text.splitlines()
    assert "alice" not in text
    assert "bob" not in text
    shutdown.set()
