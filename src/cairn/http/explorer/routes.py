"""
The routes of the explorer. Pages change nothing: what does is a POST that only a page of this
server can send, or the API's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import structlog
from quart import Blueprint, Quart, Response, g, has_request_context, request
from werkzeug.datastructures import Headers

from cairn.actors.looking import Looking, NothingThere, SessionFilter, SessionView
from cairn.http.access.keys import Keys, sees_all, tenant_of
from cairn.http.access.pages import forged, is_own
from cairn.http.adapter import STREAM_HEADERS
from cairn.http.agents.requests import look_up_last_turns
from cairn.http.explorer.feed import Feed
from cairn.http.explorer.forget import add_forget_pages
from cairn.http.explorer.forms import form_fields
from cairn.http.explorer.login import COOKIE, LOGIN_S, Logins
from cairn.http.explorer.pages import asset, page, redirected, with_policy
from cairn.http.explorer.shown import agent_of
from cairn.http.health import shared_objects
from cairn.http.models import answering, listed, model_list
from cairn.http.openapi import document as openapi
from cairn.http.server.connection import OwningRequest
from cairn.http.server.live_streams import LiveStreams
from cairn.http.service import Server, Service
from cairn.http.sessions.objects import (
    EventObject,
    SessionObject,
    TurnObject,
    bug_object,
    cache_object,
    session_object,
    shown_name,
    turn_object,
)
from cairn.http.sessions.routes import find_session, flag, number
from cairn.http.wire.checks import ClientError
from cairn.http.wire.errors import ErrorAnswer
from cairn.journal.agents import session_of
from cairn.journal.explanations import short
from cairn.journal.invariants import SENTENCES
from cairn.journal.lifecycle import SessionState
from cairn.journal.tenants import session_name, session_tenant

log = structlog.get_logger(__name__)

NAME = "explorer"
HOME = "/"
PREFIX = "/explorer"
LOGIN = f"{PREFIX}/login"

_SHORT = re.compile(r"[0-9a-f]{8}[0-9a-f-]*").fullmatch
_SESSIONS = 50
_TURNS = 30
_CHAT_TURNS = 50
_EVENTS = 100
_BEFORE_BUG = 12
_CACHED = 40
_AGENTS = 100
_STALLS = {
    "disk_full": "the journal's disk is full",
    "locked": "another program has locked the journal",
    "no_descriptors": "the server may open no more files (`ulimit -n`)",
    "connection_lost": "the connection to the journal's database is lost",
}

_IDLE_WORK = {
    "expiry": "what expires is not removed (bug id {})",
    "shadow_checks": "no answers are checked (bug id {})",
    "block_files": "blocks cannot be written to {}",
}

#: What a browser loads before anyone is logged in.
OPEN = frozenset({f"{NAME}.get_asset", f"{NAME}.icon", f"{NAME}.login", f"{NAME}.log_in"})


def add_explorer(
    app: Quart,
    server: Server,
    service: Callable[[], Service],
    keys: Keys | None,
    logins: Logins,
    streams: LiveStreams,
    tool: str,
) -> None:
    """
    Add the pages.

    Args:
        service: the server as the caller sees it.
        keys: the API keys of callers, which say whose sessions a caller may see.
        logins: of browsers, which send a cookie in the place of a key.
        streams: those that are open.
        tool: how the operator calls `ops`.
    """
    pages, feed = Blueprint(NAME, __name__), Feed(server)

    def of_all() -> bool:
        return sees_all(g.tenant, keys)

    def looking() -> Looking:
        return service().looking(of_all=of_all(), texts=flag(request.args, "texts"))

    def shown(template: str, **values: Any) -> Response:
        facts, now = server.facts, server.statistics()
        state = ""
        if now.admission_bug is not None:
            state = f"admission is closed; bug id {now.admission_bug}"
        elif now.journal_stall is not None:
            state = f"{_STALLS[now.journal_stall]}; no requests are answered"
        elif now.degraded and of_all():
            ended = (_IDLE_WORK[name].format(why) for name, why in now.degraded.items())
            state = f"degraded: {', '.join(ended)}"
        states = {one.facts.model: one.state for one in server.models}
        return page(
            template,
            facts=facts,
            model_state=states.get(facts.model, "loaded"),
            base=request.host_url.rstrip("/"),
            state=state,
            bug_count=now.bugs if of_all() else None,
            of_all=of_all(),
            with_keys=keys is not None,
            others=keys is not None and of_all() and len(keys.tenants) > 1,
            logged_in=logins.tenant_of(request) is not None,
            tenant=g.tenant,
            texts=flag(request.args, "texts"),
            path=request.path,
            tool=tool,
            **values,
        )

    async def operators_form() -> dict[str, str]:
        """As ``form_fields``, of an operator."""
        fields = await form_fields()
        if not of_all():
            raise ClientError(
                "only the operator's key may do this", code="operator_only", status=403
            )
        return fields

    @pages.get(HOME)
    async def sessions() -> Response:
        look, args = looking(), request.args
        which = SessionFilter(
            text=args.get("q", "")[:200],
            state=args.get("state") or None,
            model=args.get("model") or None,
            client=args.get("client") or None,
            with_bugs=flag(args, "bugs"),
            before=number(args, "before", None),
        )
        found, more = look.sessions(which, _SESSIONS)
        await look.note_texts(*(one.summary for one in found))
        data = [session_object(one, g.tenant, words=look.sees_texts(one.summary)) for one in found]
        return shown(
            "sessions.html",
            sessions=data,
            before=data[-1].position if more else None,
            which=which,
            states=[*map(str, SessionState), "closed"],
            models=[one.facts.model for one in answering(server.models)],
        )

    @pages.get(f"{PREFIX}/session")
    async def session() -> Response:
        look = looking()
        view = _session(look, request.args.get("id", ""))
        turns, total = await look.turns(
            view.summary.id, number(request.args, "before", None), _TURNS
        )
        shown_turns = [turn_object(one, g.tenant) for one in turns]
        seen = session_object(view, g.tenant, words=look.sees_texts(view.summary))
        more = bool(turns) and turns[-1].number > 1
        return shown(
            "session.html",
            session=seen,
            turns=shown_turns,
            total=total,
            before=shown_turns[-1].number if more else None,
            agent=agent_of(seen.id),
            may_see_texts=look.sees_texts(view.summary),
        )

    async def asked_session() -> tuple[Looking, str, SessionObject]:
        """The session that a form names: how to look at it, its id, and what a page shows of it."""
        look, fields = looking(), await form_fields()
        view = _session(look, fields.get("id", ""))
        await look.note_texts(view.summary)
        seen = session_object(view, g.tenant, words=look.sees_texts(view.summary))
        return look, view.summary.id, seen

    @pages.post(f"{PREFIX}/session/verify")
    async def verify_session() -> Response:
        look, session_id, seen = await asked_session()
        return shown("check.html", session=seen, rows=await look.verify(session_id), replay=None)

    @pages.post(f"{PREFIX}/session/replay")
    async def replay_session() -> Response:
        look, session_id, seen = await asked_session()
        return shown("check.html", session=seen, rows=None, replay=await look.replay(session_id))

    add_forget_pages(pages, PREFIX, service, of_all, shown)

    @pages.get(f"{PREFIX}/events")
    async def events() -> Response:
        look, args = looking(), request.args
        view = _session(look, args.get("id", ""))
        after, last = number(args, "after", 0) or 0, number(args, "last", None)
        found, more = await look.events(view.summary.id, after=after, most=_EVENTS)
        rows = [msgspec.convert(_plain(one), EventObject) for one in found]
        if last is not None:
            more = more and rows[-1].position < last
            rows = [one for one in rows if one.position <= last]
        return shown(
            "events.html",
            session=session_object(view, g.tenant, words=look.sees_texts(view.summary)),
            rows=rows,
            after=rows[-1].position if rows and more else None,
            last=last,
        )

    @pages.get(f"{PREFIX}/bugs")
    async def bugs() -> Response:
        look = looking()
        found, more = await look.bugs(number(request.args, "before", None), 20)
        data, before = [], []
        for one in found:
            name = one.session
            data.append(bug_object(one, name and shown_name(name, session_tenant(name), g.tenant)))
            rows: list[dict[str, Any]] = []
            # Of a session that was pruned there are none.
            with contextlib.suppress(NothingThere):
                if name is not None:
                    rows, _ = await look.events(
                        name, before=one.fault.event.at_position + 1, most=_BEFORE_BUG
                    )
            before.append([msgspec.convert(_plain(row), EventObject) for row in rows])
        return shown(
            "bugs.html",
            bugs=list(zip(data, before, strict=True)),
            before=data[-1].position if more else None,
            sentences=SENTENCES,
        )

    @pages.get(f"{PREFIX}/cache")
    async def cache() -> Response:
        look = looking()
        view = look.cache(_CACHED)
        names = {
            one.session: shown_name(one.session, session_tenant(one.session), g.tenant)
            for one in view.sessions
        }
        summaries = {one.session: look.session(one.session).summary for one in view.sessions}
        await look.note_texts(*summaries.values())
        words = {
            names[session]: summary.words if look.sees_texts(summary) else ""
            for session, summary in summaries.items()
        }
        found = cache_object(view, names)
        if look.of_all:
            found.pool, found.blocks = shared_objects(server.statistics())
        return shown("cache.html", cache=found, words=words, totals=look.of_all)

    @pages.get(f"{PREFIX}/live")
    async def live() -> Response:
        return shown("live.html", frame=feed.frame(g.tenant, of_all=of_all()))

    @pages.get(f"{PREFIX}/live/stream")
    async def live_stream() -> Response:
        # A server that is not there yet refuses here, and not within the stream.
        service()
        # Until the client leaves.
        cast(OwningRequest, request).resources.enter_context(streams.one_of(g.tenant))
        stream = feed.stream(g.tenant, of_all=of_all())
        response = Response(streams.until_stopped(stream), headers=STREAM_HEADERS)
        response.timeout = None
        return with_policy(response)

    @pages.get(f"{PREFIX}/models")
    async def models() -> Response:
        known = answering(server.models)
        return shown(
            "models.html",
            models=model_list(known).data,
            failures={one.facts.model: one.failure for one in known} if of_all() else {},
            sizes=await server.model_sizes() if of_all() else {},
        )

    @pages.post(f"{PREFIX}/models/load")
    async def load_model() -> Response:
        fields = await operators_form()
        server.load_model(listed(fields.get("model", ""), answering(server.models)).facts.model)
        return redirected(f"{PREFIX}/models")

    @pages.post(f"{PREFIX}/models/unload")
    async def unload_model() -> Response:
        await operators_form()
        server.unload_model()
        return redirected(f"{PREFIX}/models")

    @pages.get(f"{PREFIX}/connect")
    async def connect() -> Response:
        return shown("connect.html")

    @pages.get(f"{PREFIX}/api")
    async def api() -> Response:
        document = openapi.description(with_keys=keys is not None)
        return shown("api.html", operations=_operations(document))

    @pages.get(f"{PREFIX}/chat")
    async def chat() -> Response:
        name = request.args.get("agent", "")
        agents = sorted(service().agents.all(), key=lambda one: -one.used_us)[:_AGENTS]
        look = looking()
        words = {one.name: _words_of(look, one.name) for one in agents}
        if not name:
            return shown(
                "chat.html",
                agents=agents,
                words=words,
                agent=None,
                turns=[],
                tokens={},
                system=None,
                before=None,
                is_last=True,
            )
        until = number(request.args, "before", None)
        found = await look_up_last_turns(name, service(), until, _CHAT_TURNS)
        held, new = service().agents.one(name), await service().agents.created(name)
        return shown(
            "chat.html",
            agents=agents,
            words=words,
            agent=held,
            turns=found,
            tokens=await _by_request(look, name),
            system=new.system if new is not None else None,
            before=found[0].turn if found and found[0].turn > 1 else None,
            is_last=until is None,
        )

    @pages.get(LOGIN)
    async def login() -> Response:
        return login_page("", _next(request.args.get("next", "")))

    @pages.post(LOGIN)
    async def log_in() -> Response:
        fields = await form_fields()
        key, to = fields.get("key", "").strip(), _next(fields.get("next", ""))
        if keys is None:
            return redirected(to)
        try:
            tenant = tenant_of(Headers({"x-api-key": key}), keys)
        except ClientError as error:
            log.warning("login refused", address=request.remote_addr)
            return login_page(error.args[0] if key else "Enter an API key.", to, status=401)
        response = redirected(to)
        response.set_cookie(
            COOKIE,
            logins.begin(tenant),
            max_age=LOGIN_S,
            httponly=True,
            samesite="Strict",
            secure=request.scheme == "https",
        )
        return response

    @pages.post(f"{PREFIX}/logout")
    async def log_out() -> Response:
        if not is_own(request):
            raise forged()
        logins.end(request)
        response = redirected(LOGIN)
        response.delete_cookie(COOKIE, httponly=True, samesite="Strict")
        return response

    @pages.get(f"{PREFIX}/assets/<name>")
    async def get_asset(name: str) -> Response:
        found = asset(name)
        if found is None:
            raise ClientError("there is no such file", code="not_found", status=404)
        return found

    @pages.get("/favicon.ico")
    async def icon() -> Response:
        found = asset("icon.svg")
        assert found is not None
        return found

    app.register_blueprint(pages)


def _session(look: Looking, name: str) -> SessionView:
    """
    The session of a name, or the only one whose id begins with it, as lists show ids.

    Raises:
        ClientError: there is none.
    """
    try:
        return find_session(look, name)
    except ClientError:
        if _SHORT(name) is None:
            raise
        found, _ = look.sessions(SessionFilter(text=name), _SESSIONS)
        begun = [one for one in found if _begins(one.summary.id, name)]
        if len(begun) != 1:
            raise
        return begun[0]


def _begins(session: str, name: str) -> bool:
    """Whether a session has an id that is shortened, and it begins with a name."""
    return short(session) == name[:8] and session_name(session).startswith(name)


def _words_of(look: Looking, agent: str) -> str:
    """The first words of an agent's conversation; empty if it has none yet."""
    try:
        return find_session(look, session_of(agent)).summary.words
    except ClientError:
        return ""


async def _by_request(look: Looking, agent: str) -> dict[str, TurnObject]:
    """The last turns of an agent's session, by their requests; none if it has no session yet."""
    try:
        view = find_session(look, session_of(agent))
    except ClientError:
        return {}
    turns, _ = await look.turns(view.summary.id, None, 100)
    return {one.request: turn_object(one, g.tenant) for one in turns if one.request is not None}


def wants_page() -> bool:
    """
    Whether a browser requests one of these pages, or opens an address that has nothing for it;
    others are sent JSON for errors.
    """
    if not has_request_context() or "text/html" not in request.headers.get("accept", ""):
        return False
    if request.endpoint is None:
        return request.method == "GET"
    return request.endpoint.startswith(f"{NAME}.")


def login_page(message: str, to: str, *, status: int = 200) -> Response:
    """
    The form in which a person enters an API key.

    Args:
        message: why the last one was refused; empty if there was none.
        to: where to go on.
    """
    return page("login.html", status=status, message=message, to=to)


def error_page(answer: ErrorAnswer) -> Response:
    """An error, as a page."""
    response = page(
        "error.html",
        status=answer.status,
        # A person follows the page's links instead.
        message=answer.message.partition("; GET /")[0],
        code=answer.code,
        path=request.path,
        starting=answer.code == "server_starting",
    )
    response.headers.update(answer.headers)
    return response


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row, with what is raw JSON in it decoded."""
    return {
        name: msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
        for name, value in row.items()
    }


def _operations(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The operations of the API, in the order of its document."""
    return [
        {
            "method": method.upper(),
            "path": path,
            "summary": one["summary"],
            "parameters": one.get("parameters", []),
            "body": one.get("requestBody", {}).get("content", {}),
            "answers": {code: about["description"] for code, about in one["responses"].items()},
        }
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    ]


def _next(path: str) -> str:
    """Where to go on after a login: a page of the explorer, and nowhere else."""
    return path if path.startswith(f"{PREFIX}/") and "\\" not in path else HOME
