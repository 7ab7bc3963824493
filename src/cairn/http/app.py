"""The application: routes, limits, and the border for errors."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar, cast
from urllib.parse import quote, urlsplit

import attrs
import structlog
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from quart import Response, current_app, g, has_request_context, request, websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from werkzeug.exceptions import BadHost, NotFound
from werkzeug.routing import MapAdapter

from cairn.actors.errors import StillStarting
from cairn.actors.requests.messages import ListedModel, ServerFacts
from cairn.engine.machine.descriptors import descriptors_max
from cairn.http.access.cors import Cors, read_origin
from cairn.http.access.keys import Keys, sees_all, service_of_caller, tenant_of
from cairn.http.adapter import (
    AnswerBuilder,
    StreamBuilder,
    json_response,
    streamed_answer,
    whole_answer,
)
from cairn.http.agents.routes import add_agent_routes
from cairn.http.chat_completions.answers import ChatAnswer, ChatStream
from cairn.http.chat_completions.request import read_chat_request
from cairn.http.completions import errors as completions_errors
from cairn.http.completions.answers import TextAnswer, TextStream
from cairn.http.completions.prompts import InTurn, with_echoes
from cairn.http.completions.request import read_text_request
from cairn.http.embeddings import errors as embeddings_errors
from cairn.http.embeddings.request import embedding_list, read_embeddings_request
from cairn.http.explorer import routes as explorer
from cairn.http.explorer.login import Logins, has_key
from cairn.http.health import health, starting_health
from cairn.http.messages import errors as messages_errors
from cairn.http.messages.answers import MessagesAnswer, MessagesStream
from cairn.http.messages.objects import TokenCount
from cairn.http.messages.request import read_count_request, read_messages_request
from cairn.http.metrics.latencies import Generating, Timed
from cairn.http.metrics.registry import MetricsByTenant
from cairn.http.models import check_answers, listed, model_list, model_object, named_model
from cairn.http.ollama import errors as ollama_errors
from cairn.http.ollama.routes import add_ollama_routes
from cairn.http.openapi import document as openapi
from cairn.http.responses import errors as responses_errors
from cairn.http.responses.answers import ResponsesAnswer, ResponsesStream
from cairn.http.responses.compaction import CompactedAnswer, compacting
from cairn.http.responses.objects import InputTokens
from cairn.http.responses.request import Draft, read_responses_request
from cairn.http.responses.stored import completed, delete, look_up, look_up_input
from cairn.http.server.connection import OwningConnection, OwningRequest, with_readable_path
from cairn.http.server.live_streams import LiveStreams, StreamLimits
from cairn.http.service import Server
from cairn.http.sessions.routes import add_session_routes
from cairn.http.tokens.objects import TokensText
from cairn.http.tokens.request import (
    props_of,
    read_detokenize_request,
    read_tokenize_request,
    token_list,
)
from cairn.http.wire.checks import BODY_BYTES_MAX, ClientError
from cairn.http.wire.clients import client_name
from cairn.http.wire.errors import ErrorAnswer, describe, request_header
from cairn.http.wire.not_found import meant_by, nothing_at
from cairn.http.wire.parameters import Ignored, ReadRequest
from cairn.http.wire.traceparent import read_traceparent
from cairn.http.wire.warned import Conversations, Warned, warning_of
from cairn.journal.tenants import KEY_MIN, LOCAL

log = structlog.get_logger(__name__)

#: A name or an address, or an IPv6 address in brackets; then a port.
_HOST = re.compile(r"(?:\[(?P<bracketed>[^\[\]]*)\]|(?P<name>[^\[\]:]+))(?::[0-9]*)?")

#: Load balancers call these without a key, and are shown no more than they need.
_OPEN = frozenset({"get_health"}) | explorer.OPEN


_R = TypeVar("_R", bound=ReadRequest)
#: A request of responses is complete only once what it refers to is looked up.
_D = TypeVar("_D", bound=ReadRequest | Draft)


class CairnApp(QuartTrio):
    """
    Quart on trio, with requests that own contexts.

    Attributes:
        streams: the live streams that are open.
    """

    streams: LiveStreams

    asgi_http_class = OwningConnection
    request_class = OwningRequest

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve a request, a websocket's handshake, or the server's startup and shutdown."""
        await super().__call__(with_readable_path(scope), receive, send)

    def create_url_adapter(self, request: BaseRequestWebsocket | None) -> MapAdapter | None:
        """Find the route. A host name that cannot be parsed is left to ``check_caller``."""
        try:
            return super().create_url_adapter(request)
        except BadHost:  # a label that is empty or too long
            assert request is not None
            return self.url_map.bind(
                "localhost",
                url_scheme=request.scheme,
                default_method=request.method,
                path_info=request.path,
            )


def create_app(
    server: Server,
    *,
    hosts_allowed: Collection[str] = (),
    strict_model_names: bool = False,
    keys: Keys | None = None,
    cors: Collection[str] = (),
    streams: StreamLimits | None = None,
    tool: str = "ops",
) -> CairnApp:
    """
    The application over a server.

    Args:
        hosts_allowed: names, besides ``localhost`` and plain addresses, by which clients may call
            the server; ``"*"`` for any. Without this check, a web page could point a name of its
            own at this machine's address, and its visitors' browsers would talk to the server.
            Pages from these names may call the server as well.
        strict_model_names: refuse requests for models that are not served. Otherwise any name is
            accepted, because many clients cannot be configured to send another one.
        keys: the API keys of callers; without them, any client that reaches the server may call it.
        cors: origins whose pages may call the server and read its answers.
        streams: how many live streams may be open; by default as many as fit this process's
            descriptors.
        tool: how the operator calls `ops`, for commands that pages show.
    """
    app = CairnApp(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_BYTES_MAX
    app.url_map.strict_slashes = False
    tenants = keys.tenants if keys is not None else ()
    metrics = MetricsByTenant(server, [one for one in tenants if not sees_all(one, keys)])
    ignored, conversations = Ignored(), Conversations()
    service = partial(service_of_caller, server)
    hosts = frozenset(host.lower() for host in hosts_allowed)
    readers, logins = Cors(cors), Logins()
    live = app.streams = LiveStreams(streams or StreamLimits.of(descriptors_max()))

    @app.before_request
    async def check_caller() -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        _check_host(host, hosts)
        if not readers.admits(origin):
            _check_origin(origin, host, hosts)
        elif _is_preflight():
            requested = request.headers.get("access-control-request-headers")
            return Response(b"", status=204, headers=readers.preflight(requested))
        try:
            g.tenant = tenant_of(request.headers, keys)
        except ClientError:
            g.tenant = logins.tenant_of(request)
            if g.tenant is None and request.endpoint not in _OPEN:
                if explorer.wants_page() and not has_key(request):
                    return explorer.login_page("", request.full_path, status=401)
                raise
        return None

    async def body_of() -> tuple[bytes, Mapping[str, str]]:
        _check_encoding(request.headers.get("content-encoding", ""))
        body = await request.get_data(cache=False, as_text=False, parse_form_data=False)
        g.body_is_read = True
        return body, {name.lower(): value for name, value in request.headers.items()}

    def check_model(name: str) -> None:
        check_answers(name, server.models)
        if strict_model_names and name:
            listed(name, server.models)

    async def asked_of(read: Callable[[bytes, Mapping[str, str], Ignored, ServerFacts], _D]) -> _D:
        body, headers = await body_of()
        facts = service().facts_of(named_model(body, server.models))
        asked = read(body, headers, ignored, facts)
        check_model(asked.command.requested_model)
        return asked

    async def answered(
        read: _R, whole: Callable[[_R], AnswerBuilder], stream: Callable[[_R], StreamBuilder]
    ) -> Response:
        timed = Timed(service(), metrics.latencies_of(g.tenant))
        client = client_name(request.headers.get("user-agent", ""))
        caller = read_traceparent(request.headers.getlist("traceparent"))
        command, *more = (
            attrs.evolve(one, client=client, traceparent=caller)
            for one in (read.command, *read.more)
        )
        asked: Generating = InTurn(timed, more) if more else timed
        if read.ignored:
            asked = Warned(asked, conversations, read.ignored)
        if read.stream:
            resources = cast(OwningRequest, request).resources
            response = await streamed_answer(asked, command, stream(read), resources)
        else:
            response = await whole_answer(asked, command, whole(read))
        response.headers.update(warning_of(read.ignored))
        return response

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await answered(await asked_of(read_chat_request), ChatAnswer, ChatStream)

    @app.post(completions_errors.ADDRESS)
    async def completions() -> Response:
        read = await with_echoes(await asked_of(read_text_request), service())
        return await answered(read, TextAnswer, TextStream)

    @app.post(embeddings_errors.ADDRESS)
    async def embeddings() -> Response:
        body, _ = await body_of()
        read = read_embeddings_request(body, ignored, server.models)
        found = await service().embed(read.command)
        headers = {**request_header(found.request), **warning_of(read.ignored)}
        return json_response(await embedding_list(found, read), headers=headers)

    @app.post(responses_errors.ADDRESS)
    async def responses() -> Response:
        draft = await asked_of(read_responses_request)
        read = await completed(draft, service())
        return await answered(read, ResponsesAnswer, ResponsesStream)

    @app.post(f"{responses_errors.ADDRESS}/input_tokens")
    async def count_response() -> Response:
        read = await completed(await asked_of(read_responses_request), service())
        return json_response(InputTokens(input_tokens=await service().count(read.command)))

    @app.post(f"{responses_errors.ADDRESS}/compact")
    async def compact_response() -> Response:
        draft = await asked_of(read_responses_request)
        read = compacting(await completed(draft, service()))
        return await answered(read, CompactedAnswer, ResponsesStream)

    @app.get(f"{responses_errors.ADDRESS}/<name>")
    async def response(name: str) -> Response:
        return json_response(await look_up(name, service(), request.args))

    @app.delete(f"{responses_errors.ADDRESS}/<name>")
    async def delete_response(name: str) -> Response:
        return json_response(await delete(name, service()))

    @app.get(f"{responses_errors.ADDRESS}/<name>/input_items")
    async def response_input(name: str) -> Response:
        return json_response(await look_up_input(name, service(), request.args))

    @app.post(messages_errors.ADDRESS)
    async def messages() -> Response:
        read = await asked_of(read_messages_request)
        return await answered(read, MessagesAnswer, MessagesStream)

    @app.post(f"{messages_errors.ADDRESS}/count_tokens")
    async def count_tokens() -> Response:
        asked = await asked_of(read_count_request)
        return json_response(TokenCount(await service().count(asked.command)))

    @app.post("/tokenize")
    async def tokenize() -> Response:
        asked = await asked_of(read_tokenize_request)
        facts = service().facts_of(asked.command.requested_model)
        return json_response(token_list(await service().tokens(asked.command), asked, facts))

    @app.post("/detokenize")
    async def detokenize() -> Response:
        asked = await asked_of(read_detokenize_request)
        text = (await service().tokens(asked.command)).text
        return json_response(TokensText(text, text))

    @app.get("/props")
    async def props() -> Response:
        return json_response(props_of(service().facts))

    add_agent_routes(
        app,
        service,
        ignored,
        body_of=body_of,
        check_model=check_model,
        answered=lambda read: answered(read, ChatAnswer, ChatStream),
    )

    add_session_routes(app, server, service, keys, readers.admits, live)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(model_list(server.models))

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        return json_response(model_object(listed(name, server.models)))

    def operators_model(name: str) -> ListedModel:
        """A served model that the caller may have loaded and unloaded."""
        if not sees_all(g.tenant, keys):
            raise ClientError(
                "only the operator's key may do this", code="operator_only", status=403
            )
        found = listed(name, server.models)
        if found.embeds is not None:
            raise ClientError(
                f"{found.facts.model!r} is an embedding model, which stays loaded as long as the "
                "server runs",
                param="model",
                code="wrong_kind_of_model",
            )
        return found

    @app.post("/v1/models/<path:name>/load")
    async def load_model(name: str) -> Response:
        asked = operators_model(name).facts.model
        server.load_model(asked)
        return json_response(model_object(listed(asked, server.models)))

    @app.post("/v1/models/<path:name>/unload")
    async def unload_model(name: str) -> Response:
        asked = operators_model(name)
        if asked.state != "not_loaded":
            server.unload_model()
        return json_response(model_object(listed(asked.facts.model, server.models)))

    add_ollama_routes(
        app,
        server,
        service,
        ignored,
        body_of=body_of,
        check_model=check_model,
        operators_model=operators_model,
        answered=answered,
    )

    @app.get("/health")
    async def get_health() -> Response:
        try:
            caller = service() if g.tenant is not None else None
            body = health(server, caller, of_all=caller is not None and sees_all(g.tenant, keys))
        except StillStarting as start:
            answer = starting_health(start, has_key=g.tenant is not None)
            return json_response(answer, 503, {"retry-after": str(start.retry_after_s)})
        # Load balancers look at the status code alone; a degraded server answers requests.
        return json_response(body, status=200 if body.status in ("ok", "degraded") else 503)

    @app.get("/metrics")
    async def scrape() -> Response:
        body, kind = metrics.of(g.tenant).text(request.headers.get("accept", ""))
        return Response(body, content_type=kind)

    @app.get(openapi.ADDRESS)
    async def describe_all() -> Response:
        return json_response(openapi.description(with_keys=keys is not None))

    explorer.add_explorer(app, server, service, keys, logins, live, tool)

    @app.after_request
    async def close_unread(response: Response) -> Response:
        # Hypercorn closes a connection whose body was not read. Without this header, the client
        # would send its next request on it.
        if request.http_version.startswith("1") and _has_body() and not g.get("body_is_read"):
            response.headers["connection"] = "close"
        return response

    @app.after_request
    async def add_cors_headers(response: Response) -> Response:
        response.headers.update(readers.headers(request.headers.get("origin")))
        return response

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        metrics.count_refusal(g.get("tenant"))
        answer = _error(error)
        return explorer.error_page(answer) if explorer.wants_page() else _sent(answer)

    return app


def _is_preflight() -> bool:
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def _has_body() -> bool:
    return bool(request.content_length) or "transfer-encoding" in request.headers


def _check_host(header: str, allowed: frozenset[str]) -> None:
    # Every browser sends the header.
    if not header or "*" in allowed:
        return
    name = _host_name(header)
    if name == "localhost" or name in allowed or _is_address(name):
        return
    raise ClientError(
        f"the host name {(name or header)[:200]!r} is not allowed; use the server's IP address, or "
        "ask its operator to allow the name (--allow-host)",
        code="host_not_allowed",
        status=403,
    )


def _check_origin(origin: str | None, host: str, allowed: frozenset[str]) -> None:
    # A page from another host cannot read an answer, but without this check it could send requests:
    # a browser posts forms and plain text to any address. Other clients send no origin.
    if origin is None or "*" in allowed:
        return
    try:
        name = (urlsplit(origin).hostname or "").removesuffix(".")
    except ValueError:
        name = ""
    if name and (name == _host_name(host) or name in allowed):
        return
    raise ClientError(
        f"pages from {origin[:200]!r} may not call this server; {_origin_hint(origin)}",
        code="origin_not_allowed",
        status=403,
    )


def _origin_hint(origin: str) -> str:
    """How to allow the page."""
    if request.headers.get("sec-fetch-site") == "same-origin":
        # The page calls its own host, through a proxy that calls the server by another name.
        return "ask its operator to allow the page's host name (--allow-host NAME)"
    try:
        read_origin(origin)
    except ValueError:
        return (
            "only http and https origins can be allowed: serve the page from one, and ask the "
            "server's operator to allow it (--cors ORIGIN)"
        )
    return "ask its operator to allow this origin (--cors ORIGIN)"


def _check_encoding(header: str) -> None:
    if header.strip().lower() not in ("", "identity"):
        raise ClientError(
            f"the body has the content encoding {header[:40]!r}; send it without one",
            code="unsupported_encoding",
            status=415,
        )


def _host_name(header: str) -> str:
    """The name in a ``Host`` header, without its port; empty if the header is invalid."""
    found = _HOST.fullmatch(header)
    if found is None:
        return ""
    bracketed = found["bracketed"]
    if bracketed is None:
        return found["name"].lower().removesuffix(".")
    return bracketed.lower() if ":" in bracketed else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _tenant_field() -> dict[str, str]:
    """The tenant for the log, except the default one."""
    tenant = g.get("tenant")
    return {} if tenant in (None, LOCAL) else {"tenant": tenant}


def _without_keys(path: str) -> str:
    """A path without what may be an API key: a client may have one as part of its base URL."""
    return "/".join("..." if len(part) >= KEY_MIN else part for part in path.split("/"))


def _describe_at(path: str, error: Exception) -> ErrorAnswer:
    """The answer to an error, in the protocol of an address."""
    if messages_errors.is_ours(path):
        return messages_errors.messages_error(error)
    if ollama_errors.is_ours(path):
        return ollama_errors.ollama_error(error)
    for protocol in (responses_errors, completions_errors, embeddings_errors):
        if path == protocol.ADDRESS or path.startswith(f"{protocol.ADDRESS}/"):
            return describe(error, protocol.PLACES)
    return describe(error)


def _error(error: Exception) -> ErrorAnswer:
    """The answer to an error, which is logged."""
    asked = request if has_request_context() else websocket
    path, address, is_nowhere = asked.path, {}, isinstance(error, NotFound)
    if isinstance(error, NotFound):
        meant = meant_by(path, current_app.url_map)
        error = ollama_errors.not_here(path) or nothing_at(path, meant)
        path = meant or path
    answer = _describe_at(path, error)
    shown = _without_keys(asked.path) if is_nowhere or answer.status == 401 else asked.path
    write = log.info
    if isinstance(error, StillStarting):
        write = log.debug  # a page asks again every two seconds
    if answer.status == 401:
        # A caller may be guessing keys. Behind a proxy, the address is that of the proxy.
        write, address = log.warning, {"address": asked.remote_addr}
    write(
        "request refused",
        **answer.ids,
        **_tenant_field(),
        status=answer.status,
        code=answer.code,
        param=answer.param,
        # Quoted, so that the entry stays on one line.
        path=quote(shown[:200]),
        **address,
    )
    return answer


def _sent(answer: ErrorAnswer) -> Response:
    return json_response(answer.envelope(), answer.status, answer.headers)
