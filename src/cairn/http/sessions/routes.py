"""The routes of sessions, the cache and bugs, and what their query parameters mean."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import cast

import trio
from quart import Quart, Response, g, request

from cairn.actors.looking import (
    PAGE_MAX,
    LiveRows,
    Looking,
    NothingThere,
    SessionFilter,
    SessionView,
)
from cairn.http.access.keys import Keys, sees_all
from cairn.http.access.pages import forged, is_own
from cairn.http.adapter import STREAM_HEADERS, json_response
from cairn.http.health import shared_objects
from cairn.http.server.connection import OwningRequest
from cairn.http.server.live_streams import LiveStreams
from cairn.http.service import Server, Service, SessionService
from cairn.http.sessions.objects import (
    BugPage,
    ClosedSession,
    SessionDetails,
    SessionPage,
    bug_object,
    cache_object,
    forgotten_object,
    session_object,
    shown_name,
    turn_object,
)
from cairn.http.wire.checks import ClientError
from cairn.http.wire.json import encode
from cairn.journal.tenants import session_id, session_tenant

ADDRESS = "/v1/sessions"
CACHE = "/v1/cache"
BUGS = "/v1/bugs"

PAGE_DEFAULT = 50
_KEEP_ALIVE_S = 15.0
_TEXT_MAX = 200
_EVENTS = "/events"
_FORGET = "/forget"

_YES = ("true", "1")
_NO = ("false", "0")


def add_session_routes(
    app: Quart,
    server: Server,
    service: Callable[[], Service],
    keys: Keys | None,
    admits: Callable[[str | None], bool],
    streams: LiveStreams,
) -> None:
    """
    Add the routes.

    Args:
        service: the server as the caller sees it.
        keys: the API keys of callers, which say whose sessions a caller may see.
        admits: whether pages of an origin may call the server, because its operator allowed that.
        streams: those that are open.
    """

    def changing(name: str) -> tuple[SessionService, str]:
        """The caller's sessions, and the id of the one that it calls by a name."""
        # A page on another port of this host may send requests, as to all addresses of the API.
        origin = request.headers.get("origin")
        if origin is not None and not is_own(request) and not admits(origin):
            raise forged()
        held = service().sessions(of_all=sees_all(g.tenant, keys))
        return held, named_session(held, name)

    def looking() -> Looking:
        texts = flag(request.args, "texts")
        return service().looking(of_all=sees_all(g.tenant, keys), texts=texts)

    @app.get(ADDRESS)
    async def list_sessions() -> Response:
        look, args = looking(), request.args
        which = SessionFilter(
            text=args.get("q", "")[:_TEXT_MAX],
            state=args.get("state"),
            model=args.get("model"),
            client=args.get("client"),
            of_tenant=args.get("tenant"),
            with_bugs=flag(args, "bugs"),
            before=number(args, "before", None),
        )
        limit = _limit(args)
        found, more = look.sessions(which, limit)
        await look.note_texts(*(one.summary for one in found))
        data = [session_object(one, g.tenant, words=look.sees_texts(one.summary)) for one in found]
        before = data[-1].position if more else None
        return json_response(SessionPage(data=data, has_more=more, before=before))

    @app.get(f"{ADDRESS}/<path:name>")
    async def get_session(name: str) -> Response:
        look, args = looking(), request.args
        view = find_session(look, name)
        turns, _ = await look.turns(view.summary.id, number(args, "before", None), _limit(args))
        more = bool(turns) and turns[-1].number > 1
        return json_response(
            SessionDetails(
                session=session_object(view, g.tenant, words=look.sees_texts(view.summary)),
                turns=[turn_object(one, g.tenant) for one in turns],
                has_more=more,
                before=turns[-1].number if more else None,
            )
        )

    @app.delete(f"{ADDRESS}/<path:name>")
    async def close_session(name: str) -> Response:
        held, session = changing(name)
        await held.close(session)
        name = shown_name(session, session_tenant(session), g.tenant)
        return json_response(ClosedSession(id=name))

    @app.post(f"{ADDRESS}/<path:name>{_FORGET}")
    async def forget_session(name: str) -> Response:
        held, session = changing(name)
        found = await held.forget(session, with_agent=flag(request.args, "agent"))
        return json_response(forgotten_object(found, g.tenant))

    @app.get(f"{ADDRESS}/<path:name>{_EVENTS}")
    async def session_events(name: str) -> Response:
        look, args = looking(), request.args
        try:
            view = find_session(look, name)
        except ClientError:
            # A client may have given a session a name that ends like this address.
            if f"{name}{_EVENTS}" in _names(look, f"{name}{_EVENTS}"):
                return await get_session(f"{name}{_EVENTS}")
            raise
        seen = request.headers.get("last-event-id")
        after = number({"after": seen} if seen is not None else args, "after", 0)
        if flag(args, "stream"):
            # Until the client leaves.
            resources = cast(OwningRequest, request).resources
            resources.enter_context(streams.one_of(g.tenant))
            live = look.live(view.summary.id, after or 0)
            rows = await resources.enter_async_context(live)
            response = Response(streams.until_stopped(_streamed(rows)), headers=STREAM_HEADERS)
            response.timeout = None
            return response
        before = number(args, "before", None)
        found, more = await look.events(
            view.summary.id, after=after or 0, before=before, most=_limit(args)
        )
        last = found[-1]["position"] if found and more and before is None else None
        return json_response({"object": "list", "data": found, "has_more": more, "after": last})

    @app.get(CACHE)
    async def get_cache() -> Response:
        look = looking()
        view = look.cache(_limit(request.args))
        names = {
            one.session: shown_name(one.session, session_tenant(one.session), g.tenant)
            for one in view.sessions
        }
        found = cache_object(view, names)
        if look.of_all:
            found.pool, found.blocks = shared_objects(server.statistics())
        return json_response(found)

    @app.get(BUGS)
    async def list_bugs() -> Response:
        look = looking()
        found, more = await look.bugs(number(request.args, "before", None), _limit(request.args))
        data = []
        for one in found:
            session = one.session
            name = session and shown_name(session, session_tenant(session), g.tenant)
            data.append(bug_object(one, name))
        before = data[-1].position if more else None
        return json_response(BugPage(data=data, has_more=more, before=before))


async def _streamed(rows: LiveRows) -> AsyncIterator[bytes]:
    """Rows as server-sent events; their ids are positions, from which a client may go on."""
    # At once, so that a page knows that it is connected.
    yield b": connected\n\n"
    while True:
        found = None
        with trio.move_on_after(_KEEP_ALIVE_S):
            found = await rows.next()
        if found is None:
            yield b": alive\n\n"
            continue
        if not found:
            yield b"event: %s\ndata: {}\n\n" % (b"gone" if rows.gone else b"too_slow")
            return
        yield b"".join(
            b"id: %d\nevent: row\ndata: %s\n\n" % (row["position"], encode(row)) for row in found
        )


def _names(look: Looking, name: str) -> list[str]:
    """The ids that a name may mean: in the caller's tenant, and for an operator in any."""
    return [session_id(look.tenant, name), *([name] if look.of_all else [])]


def find_session(look: Looking, name: str) -> SessionView:
    """
    The session that the caller calls by a name.

    Raises:
        ClientError: there is none.
    """
    for one in _names(look, name):
        try:
            return look.session(one)
        except NothingThere:
            continue
    raise _not_found(name)


def named_session(held: SessionService, name: str) -> str:
    """
    The id of the session that the caller calls by a name.

    Raises:
        ClientError: there is none.
    """
    session = held.find(name)
    if session is None:
        raise _not_found(name)
    return session


def _not_found(name: str) -> ClientError:
    return ClientError(
        f"there is no session {name[:_TEXT_MAX]!r}; GET {ADDRESS} lists them",
        code="session_not_found",
        status=404,
    )


def flag(args: Mapping[str, str], name: str) -> bool:
    """
    Whether a parameter is true; false if it is absent.

    Raises:
        ClientError: it is neither true nor false.
    """
    value = args.get(name, "false")
    if value not in (*_YES, *_NO):
        raise ClientError(f"{name} must be true or false", param=name)
    return value in _YES


def number(args: Mapping[str, str], name: str, default: int | None) -> int | None:
    """
    A parameter that counts.

    Raises:
        ClientError: it is no count.
    """
    value = args.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit()) or len(value) > 18:
        raise ClientError(f"{name} must be a number that is not negative", param=name)
    return int(value)


def _limit(args: Mapping[str, str]) -> int:
    limit = number(args, "limit", PAGE_DEFAULT)
    assert limit is not None
    if not 1 <= limit <= PAGE_MAX:
        raise ClientError(f"limit must be between 1 and {PAGE_MAX}", param="limit")
    return limit
