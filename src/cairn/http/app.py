"""
The application: routes, limits, and the border for errors.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import cast
from urllib.parse import quote, urlsplit

import structlog
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from quart import Response, g, has_request_context, request, websocket
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from werkzeug.exceptions import BadHost
from werkzeug.routing import MapAdapter

from .chat import streamed_answer, whole_answer
from .connection import OwningConnection, OwningRequest, with_readable_path
from .errors import ClientError, describe
from .metrics import Metrics
from .openai import Ignored, read_chat_request
from .openai_answers import model_object
from .pages import front_page
from .service import Service
from .wire import encode

log = structlog.get_logger(__name__)

BODY_BYTES_MAX = 32 * 1024 * 1024

#: A name or an address, or an IPv6 address in brackets; then a port.
_HOST = re.compile(r"(?:\[(?P<bracketed>[^\[\]]*)\]|(?P<name>[^\[\]:]+))(?::[0-9]*)?")

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class CairnApp(QuartTrio):
    """
    Quart on trio whose requests own contexts.
    """

    asgi_http_class = OwningConnection
    request_class = OwningRequest

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """
        Serve a request, a websocket's handshake, or the server's own beginning and end.
        """
        await super().__call__(with_readable_path(scope), receive, send)

    def create_url_adapter(self, request: BaseRequestWebsocket | None) -> MapAdapter | None:
        """
        Find the route; a host on which that fails outside the border is left to ``check_names``.
        """
        try:
            return super().create_url_adapter(request)
        except BadHost:  # a name with an empty part, or one that is too long
            assert request is not None
            return self.url_map.bind(
                "localhost",
                url_scheme=request.scheme,
                default_method=request.method,
                path_info=request.path,
            )


def create_app(
    service: Service, *, hosts_allowed: Collection[str] = (), strict_model_names: bool = False
) -> CairnApp:
    """
    The application over a service.

    Args:
        hosts_allowed: names, besides ``localhost`` and plain addresses, by which clients may call
            the server; ``"*"`` for any. A page on the web can give a name of its own the address
            of this machine, and its visitors' browsers would then talk to the server. Pages of
            these names may call the server as well.
        strict_model_names: refuse a request for another model than the one that is served.
            Otherwise any name will do: clients often cannot be told another one.
    """
    app = CairnApp(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_BYTES_MAX
    app.url_map.strict_slashes = False
    metrics = Metrics(service)
    ignored = Ignored()
    hosts = frozenset(host.lower() for host in hosts_allowed)

    @app.before_request
    async def check_names() -> None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        _check_host(host, hosts)
        _check_origin(origin, host, hosts)

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        _check_encoding(request.headers.get("content-encoding", ""))
        body = await request.get_data(cache=False, as_text=False, parse_form_data=False)
        g.body_is_read = True
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = read_chat_request(body, headers, ignored, service.facts)
        if strict_model_names and asked.command.asked_model:
            _check_model(asked.command.asked_model, service)
        if not asked.stream:
            return await whole_answer(service, asked)
        resources = cast(OwningRequest, request).resources
        return await streamed_answer(service, asked, resources)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model_object(service.facts)]})

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        _check_model(name, service)
        return _json(model_object(service.facts))

    @app.get("/health")
    async def health() -> Response:
        return _health(service)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), content_type=metrics.content_type)

    @app.get("/")
    async def page() -> Response:
        text = front_page(service.facts, service.statistics(), request.host_url.rstrip("/"))
        response = Response(text, content_type="text/html; charset=utf-8")
        response.headers["content-security-policy"] = _PAGE_POLICY
        return response

    @app.after_request
    async def close_unread(response: Response) -> Response:
        # Hypercorn closes a connection whose body was not read. A client that has not been told
        # would send its next request there.
        if request.http_version.startswith("1") and _has_body() and not g.get("body_is_read"):
            response.headers["connection"] = "close"
        return response

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        metrics.count_refusal()
        return _error(error)

    return app


def _health(service: Service) -> Response:
    facts, now = service.facts, service.statistics()
    status = "ok"
    if now.admission_bug is not None:
        status = "admission_closed"
    elif now.journal_full:
        status = "journal_full"
    body = {
        "status": status,
        "model": facts.model,
        "fingerprint": facts.fingerprint,
        "context_tokens": facts.context_tokens,
        "started": facts.started_s,
        "sessions": now.sessions,
        "queue": {"queued": now.queued, "running": now.running},
        "pool": {
            "slabs": now.slabs,
            "slabs_total": now.slabs_total,
            "bytes": now.slab_bytes,
            "bytes_total": now.slab_bytes_total,
            "kv_live_bytes": now.kv_live_bytes,
        },
        "blocks": {
            "count": now.blocks,
            "bytes": now.block_bytes,
            "bytes_total": now.block_bytes_total,
            "disk_count": now.disk_blocks,
            "disk_bytes": now.disk_bytes,
            "disk_bytes_total": now.disk_bytes_total,
        },
        "journal_position": now.journal_position,
        "bugs": now.bugs,
        "admission_bug": now.admission_bug,
    }
    # A balancer looks at the status alone.
    return _json(body, status=200 if status == "ok" else 503)


def _check_model(name: str, service: Service) -> None:
    if name != service.facts.model:
        raise ClientError(
            f"the model {name[:200]!r} is not served here; {service.facts.model!r} is: send that "
            "name, or none",
            param="model",
            code="model_not_found",
            status=404,
        )


def _has_body() -> bool:
    return bool(request.content_length) or "transfer-encoding" in request.headers


def _check_host(header: str, allowed: frozenset[str]) -> None:
    # No browser leaves the header out.
    if not header or "*" in allowed:
        return
    name = _host_name(header)
    if name == "localhost" or name in allowed or _is_address(name):
        return
    raise ClientError(
        f"this server is not called {(name or header)[:200]!r}; call it by an address, or "
        "have its operator allow the name (--allow-host)",
        code="host_not_allowed",
        status=403,
    )


def _check_origin(origin: str | None, host: str, allowed: frozenset[str]) -> None:
    # A page of another host cannot read an answer, but without this it could ask: a browser sends
    # a form, or a post of plain text, to any address. What is no browser sends no origin.
    if origin is None or "*" in allowed:
        return
    try:
        name = (urlsplit(origin).hostname or "").removesuffix(".")
    except ValueError:
        name = ""
    if name and (name == _host_name(host) or name in allowed):
        return
    raise ClientError(
        f"a page of {origin[:200]!r} may not call this server; have its operator allow the name "
        "(--allow-host)",
        code="origin_not_allowed",
        status=403,
    )


def _check_encoding(header: str) -> None:
    if header.strip().lower() not in ("", "identity"):
        raise ClientError(
            f"the body is encoded as {header[:40]!r}; send it as it is",
            code="unsupported_encoding",
            status=415,
        )


def _host_name(header: str) -> str:
    """
    The name in a ``Host``, without its port; empty where the header is none.
    """
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


def _json(body: object, status: int = 200) -> Response:
    return Response(encode(body), status=status, content_type="application/json")


def _error(error: Exception) -> Response:
    answer = describe(error)
    asked = request if has_request_context() else websocket
    log.info(
        "request refused",
        **answer.ids,
        status=answer.status,
        code=answer.code,
        param=answer.param,
        # Quoted, so that it stays one line.
        path=quote(asked.path[:200]),
    )
    return Response(
        encode(answer.envelope()),
        status=answer.status,
        headers=dict(answer.headers),
        content_type="application/json",
    )
